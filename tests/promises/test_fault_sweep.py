"""A run ends like an uninterrupted one after a fault or kill at any of its file operations.

The run is small and complete: dropout, a moving average, the best weights, evaluations, four kinds of files. For each
of its operations and each fault (see ``injector.Plan``) it is started, resumed to its end, and every third time then
resumed with a larger MAX_ITER. Its files must then equal those of the undisturbed run, or a resume is refused with a
message. Files of the user in its folder must not change.
"""

import dataclasses
import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from comparing import left_behind
from injector import Operation, Plan, recorded
from ranks import fork, tool
from sweep_parts import CONFIG

HERE = Path(__file__).parent

LONGER = ("SOLVER.MAX_ITER", "18")
USERS_FILES = ("notes.txt.old.1", "inference.py", "pretrained.pth", "photos.old.2019/photo.jpg")
# Seconds after which a run counts as hanging. It takes a fifth of a second.
PATIENCE = 60.0
REFUSED = 2


class Case:
    """A run in its own folder, with the user's files beside the run's."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self.run = folder, folder / "run"
        (self.run / "photos.old.2019").mkdir(parents=True)
        for name in USERS_FILES:
            (self.run / name).write_text(f"my {name}")
        self.users = self._users_files()
        (folder / "config.yaml").write_text(yaml.safe_dump({**config, "OUTPUT_DIR": str(self.run)}))
        self._starts = 0

    def start(self, *arguments: str, operation: Operation | None = None, fault: str = "", record: str = "") -> "Ending":
        """Run the training tool once. Its clock starts 10 s later each time."""
        plan = Plan(str(self.run), record, operation, fault, clock=10.0 * self._starts)
        self._starts += 1
        faulty = [HERE / "faulty_run.py", json.dumps(dataclasses.asdict(plan))]
        interpreter, *command = tool("--config-file", self.folder / "config.yaml", *arguments)
        process = fork([interpreter, *faulty, *command], self.folder, apart=True)
        hangs = not process.ended_within(PATIENCE)
        if hangs:
            process.kill()
        return Ending(process.wait(), *process.communicate(), hangs)

    def users_files_changed(self) -> bool:
        return self._users_files() != self.users

    def _users_files(self) -> dict[str, tuple[int, str]]:
        paths = [self.run / name for name in USERS_FILES]
        return {path.name: (path.stat().st_ino, path.read_text()) if path.exists() else (0, "") for path in paths}


@dataclasses.dataclass
class Ending:
    """The result of a process."""

    code: int
    out: str
    err: str | None
    hangs: bool

    @property
    def last_line(self) -> str:
        lines = (self.err or self.out).strip().splitlines()
        return lines[-1][:200] if lines else ""

    def problem(self, *expected: int) -> str:
        """Return what is wrong; empty if nothing is."""
        if self.hangs:
            return "hangs"
        if self.code not in expected:
            return f"ends with {self.code}: {self.last_line}"
        return ""


# ---------------------------------------------------------------------- files of a run


def ending(run: Path) -> dict[str, Any]:
    """Return everything that a run left, but for checkpoints that the next save removes, or has removed."""
    left = left_behind(run)
    state = left.pop("state")
    recent, chosen = (state["hooks"][name] for name in ("PeriodicCheckpointer", "BestCheckpointer"))
    return {
        **left,
        "iteration": state["iteration"],
        "kept": (recent["recent_checkpoints"][-2:], {**chosen, "written": []}),
    }


def differences(found: dict[str, Any], expected: dict[str, Any], left: str = "") -> list[str]:
    """Return the names of differences; the file ``left`` may exist in addition."""
    found = {**found, "files": [name for name in found["files"] if name != left or name in expected["files"]]}
    return [f"{name} differ" for name in expected if found[name] != expected[name]]


# ---------------------------------------------------------------------- the sweep


@dataclasses.dataclass
class Untouched:
    """The run without a fault: its operations, and what it left at its end and after the extension."""

    operations: list[Operation]
    end: dict[str, Any]
    extended: dict[str, Any]


def untouched(folder: Path, config: dict[str, Any]) -> Untouched:
    case = Case(folder, config)
    first = case.start(record=str(folder / "operations"))
    assert first.code == 0, first.err
    end = ending(case.run)
    second = case.start("--resume", *LONGER)
    assert second.code == 0, second.err
    assert not case.users_files_changed()
    return Untouched(recorded(folder / "operations"), end, ending(case.run))


KILL = (("write", ".tmp-model_0000008.pth", 3), "kill before")
"""After the second checkpoint, with records and best weights from before and after it."""


def killed(folder: Path, config: dict[str, Any]) -> Case:
    """Return a run that was killed at :data:`KILL`."""
    case = Case(folder, config)
    ending = case.start(operation=KILL[0], fault=KILL[1])
    assert ending.code == -9, ending
    return case


def try_fault(
    case: Case, whole: Untouched, operation: Operation, fault: str, extend: bool, *arguments: str
) -> list[str] | None:
    """Start a run with one fault, resume it, and return what is wrong, or None if a resume was refused."""
    first = case.start(*arguments, operation=operation, fault=fault)
    kills = fault in ("kill before", "kill after", "torn")
    problem = first.problem(*((-9, 0) if kills else (0, 1, 2)))
    if problem:
        return [f"the run {problem}"]
    words = (os.strerror(errno.EIO), os.strerror(errno.ENOSPC))
    if first.code == 1 and not any(word in (first.err or "") + first.out for word in words):
        return [f"the run fails with another error: {first.last_line}"]
    for arguments, expected in (((), whole.end), (LONGER, whole.extended))[: 1 + extend]:
        resumed = case.start("--resume", *arguments)
        if resumed.code == REFUSED and (resumed.err or "").startswith("error: "):
            return None
        problem = resumed.problem(0)
        if problem:
            return [f"the resume {problem}"]
        # A file that could not be removed, or that an extension removes after a kill at the very end.
        left = "" if kills and arguments else removal_at(whole.operations, operation, fault)
        try:
            different = differences(ending(case.run), expected, left)
        except Exception as error:  # a file is missing or corrupt
            different = [f"{type(error).__name__}: {error}"]
        if different:
            return [f"{text} {'at the end' if not arguments else 'when extended'}" for text in different]
        if case.users_files_changed():
            return ["files of the user are changed"]
    return []


def removal_at(operations: Sequence[Operation], operation: Operation, fault: str) -> str:
    """Return the file whose removal the fault prevents, or an empty string; writing the log does not count."""
    if operation not in operations:
        return operation[1] if operation[0] == "remove" else ""
    start = operations.index(operation) + (fault == "kill after")
    kind, name, _ = next((other for other in operations[start:] if other[1] != "log.txt"), ("", "", 0))
    return name if kind == "remove" else ""


def sweep(
    tmp_path: Path,
    config: dict[str, Any],
    whole: Untouched,
    cases: Sequence[tuple[Operation, str]],
    make: Callable[[Path, dict[str, Any]], Case] = Case,
    *arguments: str,
) -> None:
    """Try faults, three at a time, and report all failures together.

    Args:
        whole: the undisturbed run.
        cases: operations, each with a fault.
        make: prepares the folder in which the run with the fault is started, with these arguments.
    """

    def attempt(numbered: tuple[int, tuple[Operation, str]]) -> list[str] | None:
        number, (operation, fault) = numbered
        case = make(tmp_path / f"case{number}", config)
        return try_fault(case, whole, operation, fault, number % 3 == 0, *arguments)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(attempt, enumerate(cases)))
    wrong = [
        f"{fault:12} {' '.join(map(str, operation)):60} {'; '.join(problems)}"
        for (operation, fault), problems in zip(cases, found, strict=True)
        if problems
    ]
    refused = sum(problems is None for problems in found)
    print(f"{len(whole.operations)} operations, {len(cases)} faults: {refused} refused, {len(wrong)} wrong")
    assert not wrong, f"{len(wrong)} of {len(cases)} faults, {refused} refused:\n" + "\n".join(wrong)


# A disk error while model_best.pth is named in the last evaluation: if the run is later made longer, metrics.json
# keeps the row of that evaluation.
KNOWN = [(("rename", "model_best.pth", 3), "EIO")]


def worth_trying(operations: Iterable[Operation]) -> list[Operation]:
    """Return all operations except most of the many writes of logs and checkpoints: the first two and the last."""
    sizes = Counter((kind, name) for kind, name, _ in operations)

    def is_chosen(operation: Operation) -> bool:
        kind, name, number = operation
        if kind != "write" or not name.endswith((".pth", "log.txt")):
            return True
        return number in (1, 2, sizes[kind, name])

    return list(filter(is_chosen, operations))


# Each fault is tried at every n-th of its operations, from an offset on; errors also at all of the rare kinds.
SHARES = {"kill before": (0, 1), "torn": (1, 4), "kill after": (4, 12), "EIO": (0, 8), "ENOSPC": (2, 8)}
RARE = {"link", "mkdir", "remove", "truncate"}


def faults(operations: Iterable[Operation], every: int = 1) -> list[tuple[Operation, str]]:
    """Return kills before operations and shares of the other faults; every n-th of them.

    A kill after an operation is mostly one before the next. A sync changes no file, so a kill at it is one before the
    next operation, too.
    """
    chosen = worth_trying(operations)
    kinds = {kind for kind, *_ in chosen}
    hit_by = {"torn": {"write"}, "kill before": kinds - {"sync"}, "kill after": kinds - {"sync"}}
    cases: list[tuple[Operation, str]] = []
    for fault, (start, step) in SHARES.items():
        possible = [operation for operation in chosen if operation[0] in hit_by.get(fault, kinds)]
        hit = possible[start :: step * every]
        if fault in ("EIO", "ENOSPC"):
            hit += [operation for operation in possible if operation[0] in RARE and operation not in hit][::every]
        cases += [(operation, fault) for operation in hit]
    return [case for case in cases if case not in KNOWN]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    return untouched(tmp_path_factory.mktemp("untouched") / "sync", CONFIG)


ASYNC = {**CONFIG, "CHECKPOINT": {**CONFIG["CHECKPOINT"], "ASYNC": True}}


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory):
    return untouched(tmp_path_factory.mktemp("untouched") / "async", ASYNC)


def test_the_injector_sees_all_kinds_of_operations(synchronous):
    kinds = Counter(kind for kind, *_ in synchronous.operations)
    assert {"open", "write", "sync", "rename", "link", "remove"} <= kinds.keys()


def test_a_run_ends_the_same_after_a_sample_of_faults(synchronous, tmp_path):
    sweep(tmp_path, CONFIG, synchronous, faults(synchronous.operations, every=97))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_ends_the_same_after_a_fault_at_any_operation(synchronous, tmp_path):
    sweep(tmp_path, CONFIG, synchronous, faults(synchronous.operations))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_asynchronously_saving_run_ends_the_same_after_a_fault_at_any_operation(synchronous, asynchronous, tmp_path):
    assert differences(asynchronous.end, synchronous.end) == []
    assert differences(asynchronous.extended, synchronous.extended) == []
    sweep(tmp_path, ASYNC, asynchronous, faults(asynchronous.operations, every=4))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_ends_the_same_after_a_fault_at_any_operation_of_its_resume(synchronous, tmp_path):
    case, record = killed(tmp_path / "untouched", CONFIG), tmp_path / "operations"
    assert case.start("--resume", record=str(record)).code == 0
    sweep(tmp_path, CONFIG, synchronous, faults(recorded(record), every=4), killed, "--resume")
