"""What a model receives of a batch: the rule of ``MODEL.INPUTS``, ``INPUT_MAPPING`` and ``TARGET``."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...config import ConfigError
from ...config.errors import MismatchError, suggest
from ...config.signatures import Parameters, parameters_of
from ...hooks.common import fields_of, unwrap_model
from .clear_errors import describe

INPUT_FORMS = ("auto", "batch", "tuple", "kwargs")
"""Values of MODEL.INPUTS."""

TARGET_NAMES = ("label", "labels", "y", "target", "targets")
"""Default names of the target in a dict batch, and of the parameter of a model that computes its loss."""

_ALL_BUT_LAST = slice(0, -1)


@dataclass(slots=True)
class Call:
    """How a model is called with batches of one form.

    Attributes:
        model: the model.
        part: what of the batch the inputs are: 0, all but the last entry, or None for the whole batch.
        unpacked: each input is an argument.
        names: the entry of each keyword argument; None: the inputs are passed by position.
        target: the entry of the batch that the loss's target is; None: the model computes its losses.
        step: called with the batch instead of the model: its ``train_step`` or ``predict_step``.
    """

    model: Callable[..., Any]
    part: Any = None
    unpacked: bool = False
    names: dict[str, Any] | None = None
    target: object = None
    step: Callable[[Any], Any] | None = None

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's arguments for a batch, by position and by name."""
        inputs = batch if self.part is None else batch[self.part]
        if self.names is not None:
            return (), {name: part_of(inputs, entry) for name, entry in self.names.items()}
        return tuple(inputs) if self.unpacked else (inputs,), {}

    def __str__(self) -> str:
        part = "" if self.part is None else "[0]" if self.part == 0 else "[:-1]"
        inputs = f"*batch{part}" if self.unpacked else f"batch{part}"
        if self.names is not None:
            inputs = ", ".join(f"{name}={entry}" for name, entry in self.names.items())
        return f"model({inputs})" + (f", loss(output, batch[{self.target!r}])" if self.target is not None else "")


class InputRule:
    """Decides how a model is called with a batch, from the signature of its ``forward``.

    Args:
        inputs: as for :class:`~hookline.engine.modeling.ModelAdapter`, like the following.
        mapping: likewise.
        target: likewise.

    Attributes:
        target_names: names that the target may have in a dict batch.

    Raises:
        ConfigError: the arguments contradict each other.
    """

    def __init__(self, inputs: str, mapping: Mapping[str, str] | None, target: str | None) -> None:
        if inputs not in INPUT_FORMS:
            raise ConfigError(f"MODEL.INPUTS: {inputs!r} is not one of {', '.join(map(repr, INPUT_FORMS))}")
        if mapping and inputs in ("batch", "tuple"):
            raise ConfigError(f'MODEL.INPUT_MAPPING names keyword arguments; MODEL.INPUTS "{inputs}" has none')
        self.inputs = "kwargs" if mapping else inputs
        self.mapping = dict(mapping or {})
        self.target_names = (target,) if target else TARGET_NAMES

    def call(self, model: nn.Module, batch: Any, training: bool, has_loss: bool) -> Call:
        """Return how a model is called with batches like this one.

        Args:
            model: the model, wrapped or not.
            batch: a batch.
            training: whether its losses are wanted, and not predictions. Batches to predict may lack the target.
            has_loss: whether there is a loss that needs the target.

        Raises:
            MismatchError: the batch does not fit the model.
        """
        module, call = unwrap_model(model), Call(model)
        step = getattr(module, "train_step" if training else "predict_step", None)
        if callable(step):
            call.step = _through_forward(model, module, step) if training else step
            return call
        taken = parameters_of(getattr(module, "forward", module)) or Parameters(any_position=True, any_keyword=True)
        required = set(taken.required) & set(taken.positions)
        # A model with train_step(batch) splits the batch there; its forward takes the inputs without the target.
        has_target = has_loss or (not training and callable(getattr(module, "train_step", None)))
        if training and has_target:
            call.target = self.target_entry(batch)
        if has_target and isinstance(batch, tuple | list):
            whole = self.inputs == "batch" or isinstance(batch[0], tuple | list | Mapping)
            if training or whole or not 1 < len(batch) == len(required):  # otherwise the target is not there
                call.part = 0 if len(batch) <= 2 else _ALL_BUT_LAST
        inputs = batch if call.part is None else batch[call.part]
        entries = _entries(inputs)
        if entries is not None and self.inputs in ("auto", "kwargs"):
            call.names = self._by_name(entries, taken, training, has_target=has_target and inputs is batch)
        elif isinstance(inputs, tuple | list) and self.inputs in ("auto", "tuple"):
            names_target = any(name in (*self.target_names, *TARGET_NAMES) for name in taken.positions[1:])
            fits = 0 < len(inputs) <= len(taken.positions) and not isinstance(inputs[0], Mapping)
            call.unpacked = (
                self.inputs == "tuple"
                or call.part == _ALL_BUT_LAST
                or len(required) > 1
                or (names_target and fits and not has_target)
            )
        elif self.inputs == "kwargs" or (self.inputs == "tuple" and (isinstance(inputs, Mapping) or not has_target)):
            raise MismatchError(f'MODEL.INPUTS "{self.inputs}" does not fit the inputs, which are {describe(inputs)}')
        return call

    def _by_name(
        self, inputs: Mapping[Any, Any], taken: Parameters, training: bool, has_target: bool
    ) -> dict[str, Any] | None:
        """Return the entry of each parameter; None if the dict is passed as one argument.

        Args:
            inputs: the dict.
            taken: the parameters of ``forward``.
            training: whether all entries of INPUT_MAPPING must be there.
            has_target: whether the dict may have the loss's target, which is not an input.
        """
        target = self._target_name(inputs, required=training) if has_target else None
        names = [name for name in inputs if name != target and (name != "num_samples" or name in taken.keywords)]
        # A wrapper passes on what it gets: forward(*args, **kwargs).
        takes_any = taken.any_position and taken.any_keyword and not taken.positions
        takes_one = (taken.positions or taken.any_position) and len(taken.required) <= 1 and not takes_any
        if self.inputs == "auto" and target is None and takes_one and not taken.keywords.keys() & set(names):
            return None
        chosen: dict[str, Any] = {}  # from parameter to entry
        for entry, parameter in self.mapping.items():
            if entry in inputs:
                chosen[parameter] = entry
            elif training:
                hint = suggest(entry, map(str, inputs)) or "."
                raise MismatchError(f"MODEL.INPUT_MAPPING: the batch has no '{entry}'{hint} It has: {listed(inputs)}")
        for name in names:
            if _takes(taken, name) and name not in self.mapping:
                chosen.setdefault(name, name)
        missing = [name for name in taken.required if name not in chosen]
        if missing or not chosen:
            unused = [str(name) for name in names if name not in chosen.values()]
            parameter = (missing or ["parameter"])[0]
            raise MismatchError(
                f"the model's forward needs {repr(parameter) if missing else 'an input'}, and the batch has no such "
                f"entry{suggest(parameter, unused) or '.'} The batch has: {listed(inputs)}. forward takes: "
                f"{listed(taken.keywords)}. Rename entries with MODEL.INPUT_MAPPING, such as "
                f'{{{(unused or ["entry"])[0]}: {parameter}}}; to pass the dict itself, set MODEL.INPUTS to "batch"'
            )
        return chosen

    def target_entry(self, batch: object) -> Any:
        """Return the entry of a batch that is its target: -1 or a name.

        Raises:
            MismatchError: the batch has no target, or may have several.
        """
        if entries := _entries(batch):
            return self._target_name(entries)
        if isinstance(batch, tuple | list) and len(batch) >= 2:
            return -1
        raise MismatchError(
            f"expected a batch (x, y), a dict or a dataclass, got {describe(batch)}. MODEL.LOSS and targets need such "
            'batches; otherwise set MODEL.LOSS.NAME to "" and let the model return its losses'
        )

    def _target_name(self, batch: Mapping[Any, Any], required: bool = True) -> str | None:
        """Return the name of the target in a dict batch; None if it has no target and none is required."""
        found = [name for name in self.target_names if name in batch]
        if len(found) == 1 or not (found or required):
            return found[0] if found else None
        problem = f"the batch's target may be {' or '.join(found)}."
        if not found:
            hint = (len(self.target_names) == 1 and suggest(self.target_names[0], map(str, batch))) or "."
            problem = f"the batch has no target: none of its entries is named {', '.join(self.target_names)}{hint}"
        raise MismatchError(
            f"{problem} The batch has: {listed(batch)}. MODEL.LOSS and targets need one: set MODEL.TARGET"
        )


def _entries(batch: object) -> Mapping[Any, Any] | None:
    """Return the entries of a dict, or the fields of a dataclass; None for other batches."""
    return batch if isinstance(batch, Mapping) else fields_of(batch) or None


def part_of(batch: Any, entry: Any) -> Any:
    """Return an entry of a tuple or dict, or a field of a dataclass."""
    return batch[entry] if isinstance(batch, tuple | list | Mapping) else getattr(batch, entry)


def check_names(key: str, label: str, taken: Parameters | None, names: Iterable[Any]) -> None:
    """Check that a callable takes parameters of these names. Any name is accepted if ``taken`` is None.

    Raises:
        ConfigError: a name is unknown.
    """
    for name in names:
        if taken is not None and not _takes(taken, name):
            hint = suggest(name, taken.keywords) or "."
            raise ConfigError(f"{key}: {label} takes no '{name}'{hint} It takes: {listed(taken.keywords)}")


def _takes(taken: Parameters, name: object) -> bool:
    return isinstance(name, str) and (taken.any_keyword or name in taken.keywords)


def listed(names: Iterable[Any]) -> str:
    """Return names for a message."""
    return ", ".join(map(str, names)) or "nothing"


def _through_forward(model: nn.Module, module: nn.Module, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls a model's ``train_step``: in DDP as its ``forward``, which DDP watches."""
    if not isinstance(getattr(model, "_orig_mod", model), nn.parallel.DistributedDataParallel):
        return step

    def run(batch: object) -> Any:
        before = vars(module).get("forward")

        def restore() -> None:
            vars(module).pop("forward", None)
            if before is not None:
                module.forward = before

        def first(*args: Any, **kwargs: Any) -> Any:
            restore()  # the method calls the module itself
            return step(*args, **kwargs)

        module.forward = first
        try:
            return model(batch)
        finally:
            restore()

    return run
