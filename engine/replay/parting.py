"""Where two traces part: the first value that differs, and the operation it comes from."""

from typing import NamedTuple

from .trace import Entry, Trace

__all__ = ["Difference", "Origin", "first_difference", "first_operation"]


class Difference(NamedTuple):
    """The first value in which two runs differ.

    ``step``: -1 before the first step. ``kind``: that of the entry; "order" if the runs do different things, "error" if
    one fails, "length" if one stops. ``name``: of the value. ``samples``: indices of the samples that differ, for
    "batch"; the indices of both runs for "samples".
    """

    step: int
    kind: str
    name: str
    samples: tuple[str, ...] = ()


class Origin(NamedTuple):
    """The operation that a difference comes from.

    ``how``: "draws": it draws other random numbers; "itself": equal inputs, other outputs; "outside": an input
    differs that no operation has computed; "path": the runs call different operations, ``name`` and ``other``.
    """

    step: int
    name: str
    how: str
    other: str = ""


def first_difference(first: Trace, second: Trace) -> Difference | None:
    """Return the first value in which two traces differ; None if they are equal."""
    for step, (ours, theirs) in enumerate(zip(first.steps, second.steps, strict=False), start=-1):
        for one, other in zip(ours, theirs, strict=False):
            if one == other:
                continue
            if one.kind == other.kind == "samples":
                return Difference(step, "samples", "", (one.name, other.name))
            if one[:2] != other[:2]:
                return Difference(step, "order", f"{_called(one)}, and {_called(other)}")
            pairs = zip(ours, theirs, strict=False)
            samples = tuple(a.name for a, b in pairs if a.kind == b.kind == "sample" and a != b)
            return Difference(step, one.kind, one.name, samples)
        if len(ours) != len(theirs) and first.error == second.error:
            longer = max(ours, theirs, key=len)
            return Difference(step, "order", f"nothing, and {_called(longer[min(len(ours), len(theirs))])}")
    steps = min(len(first.steps), len(second.steps)) - 1
    if first.error != second.error:
        return Difference(steps - 1, "error", first.error or second.error)
    return Difference(steps, "length", "") if len(first.steps) != len(second.steps) else None


def _called(entry: Entry) -> str:
    return f"{entry.kind} {entry.name}".strip()


def first_operation(first: Trace, second: Trace) -> Origin | None:
    """Return the operation that the first difference of two traces of operations comes from; None if there is none.

    Memory that is not initialized differs as well. It is not a difference, and neither is what is copied from it.
    """
    known: set[int] = set()  # values of the first run that are known to differ
    for step, (ours, theirs) in enumerate(zip(first.steps, second.steps, strict=False), start=-1):
        for one, other in zip(ours, theirs, strict=False):
            if one.name.partition(" ")[0] != other.name.partition(" ")[0]:
                return Origin(step, one.name, "path", other.name)
            inputs = [a for a, b in zip(one.inputs, other.inputs, strict=False) if a != b]
            if not known.issuperset(inputs):
                return Origin(step, one.name, "outside")
            outputs = {a for a, b in zip(one.digests, other.digests, strict=False) if a != b}
            if outputs and not inputs and not _allocates(one.name):
                return Origin(step, one.name, "draws" if one.random else "itself")
            known |= outputs
    return None


def _allocates(name: str) -> bool:
    operation = name.partition(".")[2]
    return operation.startswith(("empty", "new_empty", "resize", "_resize"))
