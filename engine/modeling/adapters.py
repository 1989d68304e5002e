"""How a model is called with a batch, and how losses and predictions are read from its output."""

import logging
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...config import ConfigError
from ...config.errors import MismatchError, suggest
from ...config.signatures import Parameters, parameters_of
from ...hooks.common import fields_of, has_shards, local_part, unwrap_model
from .loss_terms import Terms, terms_ahead

logger = logging.getLogger(__name__)

INPUT_FORMS = ("auto", "batch", "tuple", "kwargs")
"""Values of MODEL.INPUTS."""

TARGET_NAMES = ("label", "labels", "y", "target", "targets")
"""Default names of the target in a dict batch, and of the parameter of a model that computes its loss."""

_MAX_CALLS = 64  # forms of batches that are remembered

_ALL_BUT_LAST = slice(0, -1)

_STEPS = {True: "train_step", False: "predict_step"}  # a model's own methods, in training and otherwise


@dataclass(slots=True)
class _Call:
    """How a model is called with batches of one form.

    Attributes:
        part: what of the batch the inputs are: 0, all but the last entry, or None for the whole batch.
        unpacked: each input is an argument.
        names: the entry of each keyword argument; None: the inputs are passed by position.
        target: the entry of the batch that the loss's target is; None: the model computes its losses.
        step: called with the batch instead of the model: its ``train_step`` or ``predict_step``.
    """

    model: Any
    form: Any
    part: Any = None
    unpacked: bool = False
    names: dict[str, Any] | None = None
    target: Any = None
    step: Callable[[Any], Any] | None = None
    checked: bool = False  # whether its losses were looked at

    def named(self, inputs: Any) -> dict[str, Any]:
        """Return the keyword arguments, from the entries of a dict or the fields of a dataclass."""
        assert self.names is not None
        entries = inputs if isinstance(inputs, Mapping) else fields_of(inputs)
        return {name: entries[entry] for name, entry in self.names.items()}

    def __str__(self) -> str:
        part = "" if self.part is None else "[0]" if self.part == 0 else "[:-1]"
        inputs = f"*batch{part}" if self.unpacked else f"batch{part}"
        if self.names is not None:
            inputs = ", ".join(f"{name}={entry}" for name, entry in self.names.items())
        return f"model({inputs})" + (f", loss(output, batch[{self.target!r}])" if self.target is not None else "")


class ModelAdapter:
    """Calls a model with a batch, and reads losses or predictions from its output.

    How the model is called is decided once for each form of batch, from the signature of its ``forward``, and logged.
    If the model has a method ``train_step(batch)`` (for predictions, ``predict_step(batch)``), that is called instead,
    with the unchanged batch; in DistributedDataParallel through its ``forward``. The adapter is not a module: the names
    in the model's state dict do not change.

    Args:
        loss: called with the model's output and the batch's target. It returns a scalar tensor, that and the number of
            items it is the mean of, or a dict of scalar tensors, whose sum is minimised. Batches are ``(x, y)``,
            ``(x1, x2, y)``, or dicts or dataclasses with an entry for the target, of tensors (N, ...). If None, the
            model receives the whole batch; it returns its losses in training mode, predictions in eval mode.
        inputs: how the inputs are passed. "batch": all in one argument. "tuple": one argument per entry. "kwargs":
            entries of a dict or dataclass that ``forward`` takes, by name. "auto": these by name if parameters of
            ``forward`` have their names, or if it is ``forward(*args, **kwargs)``; entries of a tuple as arguments if
            ``forward`` requires several, or without a loss if it names a target, such as ``forward(x, targets=None)``;
            otherwise one argument.
        input_mapping: maps names of entries to names of ``forward``'s parameters. Implies "kwargs".
        output_mapping: maps names of the model's outputs to names of the loss's parameters. By default, a loss of
            torch receives the only output or the one named "logits", any other loss the whole output. Without a loss,
            the outputs that are the predictions.
        target: name of the target in dict batches. Default: the one of "label", "labels", "y", "target" and "targets"
            that the batch has.

    Attributes:
        counts_terms: whether :meth:`losses` returns ``num_terms``, the number of terms that the loss is the mean of, or
            "sum", if torch has computed it.
        on_count: is called before the model with that number, if the target alone tells it.

    Raises:
        ConfigError: the arguments contradict each other, or the loss has no parameter of a name.
    """

    def __init__(
        self,
        loss: Callable[..., Any] | None = None,
        *,
        inputs: str = "auto",
        input_mapping: Mapping[str, str] | None = None,
        output_mapping: Mapping[str, str] | None = None,
        target: str | None = None,
    ) -> None:
        if inputs not in INPUT_FORMS:
            raise ConfigError(f"MODEL.INPUTS: {inputs!r} is not one of {', '.join(map(repr, INPUT_FORMS))}")
        self.loss = loss
        self.input_mapping, self.output_mapping = dict(input_mapping or {}), dict(output_mapping or {})
        self.target = target or None
        if self.input_mapping and inputs in ("batch", "tuple"):
            raise ConfigError(f'MODEL.INPUT_MAPPING names keyword arguments; MODEL.INPUTS "{inputs}" has none')
        self.inputs = "kwargs" if self.input_mapping else inputs
        if loss is None and "loss" in self.output_mapping.values():
            raise ConfigError("MODEL.OUTPUT_MAPPING selects predictions: the model itself must name its loss 'loss'")
        function = getattr(loss, "func", loss)  # of a functools.partial
        self._loss_name = getattr(function, "__name__", type(loss).__name__)
        # A loss of torch, or a subclass, takes one tensor and the target.
        of_torch = getattr(function, "__module__", "") == "torch.nn.functional"
        self._takes_tensor = of_torch or isinstance(loss, nn.modules.loss._Loss)
        self._target_parameter = self._find_target_parameter()
        self.counts_terms = False
        self.on_count: Callable[[Tensor], None] | None = None
        self._training: _Call | None = None
        self._calls: dict[Any, _Call] = {}
        self._logged: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Calls hold the model; a copy of the adapter is used with a copy of the model.
        return {**self.__dict__, "_training": None, "_calls": {}}

    def _find_target_parameter(self) -> str:
        """Return the loss's parameter for the target, which is the first that no output is mapped to."""
        if self.loss is None or not self.output_mapping:
            return ""
        taken = parameters_of(getattr(self.loss, "forward", self.loss)) or Parameters()
        check_names("MODEL.OUTPUT_MAPPING", self._loss_name, taken, self.output_mapping.values())
        free = [name for name in taken.keywords if name not in self.output_mapping.values()]
        if not free:
            raise ConfigError(f"MODEL.OUTPUT_MAPPING leaves no parameter of {self._loss_name} for the target")
        return free[0]

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Run the model on a batch and return its losses.

        Args:
            model: in training mode.
            batch: in a form that fits the model and the loss.

        Returns:
            Scalar tensors by name; training minimises their sum. If the model or the loss returns the number of items
            (such as tokens) of its mean, the entry "num_items" is that number, an int or a scalar tensor. Empty if the
            model's ``train_step`` returns None, which skips the batch.

        Raises:
            TypeError: the batch does not fit, or the result is not a loss.
        """
        call = self._training
        if call is None or call.model is not model or call.form != _form(batch):
            call = self._training = self._call(model, batch, training=True)
        if self.on_count is not None and call.target is not None:
            count = terms_ahead(self.loss, _entry(batch, call.target))
            if count is not None:
                self.on_count(local_part(count))
        terms = None
        if self.counts_terms and call.target is None:
            with Terms() as terms:
                output = self._run(call, batch)
        else:
            output = self._run(call, batch)
        if call.target is not None:
            return self._terms(output, _entry(batch, call.target))
        if output is None and call.step is not None:
            return {}
        losses = losses_of(output)
        # A warning only: code written for detectron2 may mean the sum. torch.compile cannot log.
        if not call.checked and not torch.compiler.is_compiling():
            call.checked = True
            if problem := _counts_twice(losses):
                logger.warning("Losses: %s", problem)
        return losses if terms is None else terms.added_to(losses)

    def _terms(self, output: Any, target: Any) -> dict[str, Any]:
        """Return the losses of an output of the model, by ``loss``."""
        assert self.loss is not None
        args: tuple[Any, ...] = (output, target)
        kwargs: dict[str, Any] = {}
        if self.output_mapping:
            args, kwargs = (), {**self._renamed(output), self._target_parameter: target}
        elif type(output) is not Tensor and self._takes_tensor:
            args = self._only_output(output), target
            if not isinstance(args[0], Tensor):
                raise MismatchError(f"{self._loss_name} takes one tensor, the model returned {describe(output)}")
        if not self.counts_terms:
            return terms_of(self.loss(*args, **kwargs))
        with Terms() as terms:
            value = self.loss(*args, **kwargs)
        return terms.added_to(terms_of(value), value, self.loss)

    def prepare(self, model: nn.Module, batch: Any) -> None:
        """Decide how to call the model with batches like this one, before a step that is compiled or captured.

        Raises:
            TypeError: the batch does not fit.
        """
        self._training = self._call(model, batch, training=True)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's predictions for a batch, which may lack the target.

        Returns:
            The input of the loss, such as scores (N, C); without a loss, the model's output. With one entry in
            ``output_mapping`` that output; with several a dict of outputs under their new names.

        Raises:
            TypeError: the batch does not fit.
        """
        return self._predict(model, batch)[0]

    def predict_with_losses(self, model: nn.Module, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the model's predictions for a batch, and the losses that it computes itself.

        The losses are scalar tensors () beside the predictions. If there are none, the model is called a second time
        with ``model.training`` set, while its submodules (dropout, batch norm) stay in eval mode.

        Raises:
            TypeError: the batch does not fit, or the model returns no losses in either mode.
        """
        predictions, output = self._predict(model, batch)
        module = unwrap_model(model)
        before = module.training
        try:
            return predictions, losses_of(output)
        except MismatchError:
            module.training = True
            return predictions, self.losses(model, batch)
        finally:
            module.training = before

    def generate(self, model: nn.Module, batch: Any, settings: Mapping[str, Any]) -> Any:
        """Return ``model.generate(inputs, **settings)`` for a batch, which may have a target.

        Args:
            model: has a method ``generate``, as models of transformers.
            batch: its inputs are passed as to ``forward``, and its target is left out.
            settings: further arguments by name, such as ``max_new_tokens``.

        Raises:
            MismatchError: the model has no such method, or its parameters are sharded: ranks that generate different
                numbers of tokens would wait for each other.
        """
        module, call = unwrap_model(model), self._call(model, batch, training=False)
        if not callable(getattr(module, "generate", None)) or has_shards(module):
            problem = "parameters are sharded" if has_shards(module) else "class has no method generate()"
            raise MismatchError(f"a metric asks for generated outputs, and the model's {problem}")
        inputs = batch if call.part is None else batch[call.part]
        targets = {self.target} if self.target else set(TARGET_NAMES)
        try:
            if call.names is not None:
                chosen = {name: value for name, value in call.named(inputs).items() if call.names[name] not in targets}
                return module.generate(**chosen, **settings)
            return module.generate(*(inputs if call.unpacked else (inputs,)), **settings)
        except (TypeError, ValueError) as error:
            raise MismatchError(f"TEST.GENERATE: {type(module).__name__}.generate() with it fails: {error}") from error

    def losses_of_predictions(self, model: nn.Module, batch: Any, predictions: Any) -> dict[str, Any]:
        """Return the losses of a batch from what :meth:`predict` returned for it.

        They are scalar tensors (). Without ``loss`` they are those beside the predictions, or those of a second call;
        see :meth:`predict_with_losses`.

        Raises:
            TypeError: the batch has no target, or the model returns no losses.
        """
        if self.loss is None:
            try:
                return losses_of(predictions)
            except MismatchError:
                return self.predict_with_losses(model, batch)[1]
        target = self.targets(batch)
        if not self.output_mapping:
            return terms_of(self.loss(predictions, target))
        several = len(self.output_mapping) > 1
        named = predictions if several else {next(iter(self.output_mapping.values())): predictions}
        return terms_of(self.loss(**named, **{self._target_parameter: target}))

    def targets(self, batch: Any) -> Any:
        """Return the targets of a batch, such as class indices (N,): its last entry, or the target of a dict.

        Raises:
            TypeError: the batch has no target.
        """
        return _entry(batch, self._target_entry(batch))

    def predictions(self, output: Any) -> Any:
        """Return the predictions in what ``forward`` returned, such as scores (N, C): what metrics receive."""
        if self.output_mapping:
            mapped = self._renamed(output)
            return mapped if len(mapped) > 1 else next(iter(mapped.values()))
        if self._takes_tensor:
            return self._only_output(output)
        return without_scalars(output) if self.loss is None else output

    # ------------------------------------------------------------------ the call

    def _predict(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return the predictions for a batch, and the model's output."""
        call = self._call(model, batch, training=False)
        try:
            output = self._run(call, batch)
        except Exception as error:
            raise_clearer(error, batch)
            raise
        _check_output(output)
        if call.step is not None:
            return output, output
        return self.predictions(output if self.output_mapping else _without_cache(output, unwrap_model(model))), output

    def _run(self, call: _Call, batch: Any) -> Any:
        try:
            if call.step is not None:
                return call.step(batch)
            inputs = batch if call.part is None else batch[call.part]
            if call.names is not None:
                return call.model(**call.named(inputs))
            return call.model(*inputs) if call.unpacked else call.model(inputs)
        except (AttributeError, TypeError) as error:
            if self.loss is None and isinstance(batch, tuple | list):
                error.add_note(
                    "MODEL.LOSS is not set, so the model receives the whole batch and returns its losses. To train on "
                    "loss(model(x), y), set MODEL.LOSS (Trainer: loss=...)"
                )
            elif call.unpacked:
                error.add_note('each input is an argument; to pass them as one, set MODEL.INPUTS to "batch"')
            raise

    def _call(self, model: Any, batch: Any, training: bool) -> _Call:
        key = (model, training, _form(batch))
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            call = self._calls[key] = self._decide(model, batch, training)
            how = call if call.step is None else f"model.{_STEPS[training]}(batch)"
            text = f"A batch of {'training' if training else 'evaluation or prediction'} is used as {how}"
            if text not in self._logged:
                self._logged.add(text)
                logger.log(logging.INFO if training else logging.DEBUG, "%s", text)
        return call

    def _decide(self, model: Any, batch: Any, training: bool) -> _Call:
        """Decide how a model is called with batches like this one."""
        module, call = unwrap_model(model), _Call(model, _form(batch))
        if callable(getattr(module, _STEPS[training], None)):
            call.step = _own_step(model, module, _STEPS[training], through_forward=training)
            return call
        taken = parameters_of(getattr(module, "forward", module)) or Parameters(any_position=True, any_keyword=True)
        # A model with train_step(batch) splits the batch there; its forward takes the inputs without the target.
        has_target = self.loss is not None or (not training and callable(getattr(module, _STEPS[True], None)))
        if training and has_target:
            call.target = self._target_entry(batch)
        if has_target and isinstance(batch, tuple | list):
            call.part = self._inputs_part(batch, taken, training)
        inputs = batch if call.part is None else batch[call.part]
        entries = inputs if isinstance(inputs, Mapping) else fields_of(inputs)
        if (entries or isinstance(inputs, Mapping)) and self.inputs in ("auto", "kwargs"):
            call.names = self._by_name(entries, taken, training, is_batch=has_target and inputs is batch)
        elif isinstance(inputs, tuple | list) and self.inputs in ("auto", "tuple"):
            call.unpacked = self.inputs == "tuple" or self._is_unpacked(inputs, taken, call.part, has_target)
        elif self.inputs == "kwargs" or (self.inputs == "tuple" and (isinstance(inputs, Mapping) or not has_target)):
            raise MismatchError(f'MODEL.INPUTS "{self.inputs}" does not fit the inputs, which are {describe(inputs)}')
        return call

    def _inputs_part(self, batch: Any, taken: Parameters, training: bool) -> Any:
        """Return what of a tuple with a target the inputs are. Batches to predict may lack the target."""
        whole = self.inputs == "batch" or isinstance(batch[0], tuple | list | Mapping)
        if not (training or whole) and 1 < len(batch) == len(_required_positions(taken)):
            return None
        return 0 if len(batch) <= 2 else _ALL_BUT_LAST

    def _is_unpacked(self, inputs: Any, taken: Parameters, part: Any, has_target: bool) -> bool:
        """Return whether the entries of the inputs are arguments, where MODEL.INPUTS is "auto"."""
        if part == _ALL_BUT_LAST or len(_required_positions(taken)) > 1:
            return True
        names_target = any(name in (self.target, *TARGET_NAMES) for name in taken.positions[1:])
        fits = 0 < len(inputs) <= len(taken.positions) and not isinstance(inputs[0], Mapping)
        return names_target and fits and not has_target

    def _by_name(
        self, inputs: Mapping[Any, Any], taken: Parameters, training: bool, is_batch: bool
    ) -> dict[str, Any] | None:
        """Return the entry of each parameter; None if the dict is passed as one argument.

        Args:
            inputs: the dict.
            taken: the parameters of ``forward``.
            training: whether all entries of INPUT_MAPPING must be there.
            is_batch: whether the dict may have the loss's target, which is not an input.
        """
        target = self._target_name(inputs, required=training) if is_batch else None
        names = [name for name in inputs if name != target and (name != "num_samples" or name in taken.keywords)]
        # A wrapper passes on what it gets: forward(*args, **kwargs).
        takes_any = taken.any_position and taken.any_keyword and not taken.positions
        takes_one = (taken.positions or taken.any_position) and len(taken.required) <= 1 and not takes_any
        if self.inputs == "auto" and target is None and takes_one and not taken.keywords.keys() & set(names):
            return None
        chosen: dict[str, Any] = {}  # from parameter to entry
        for entry, parameter in self.input_mapping.items():
            if entry in inputs:
                chosen[parameter] = entry
            elif training:
                hint = suggest(entry, map(str, inputs)) or "."
                raise MismatchError(f"MODEL.INPUT_MAPPING: the batch has no '{entry}'{hint} It has: {_listed(inputs)}")
        for name in names:
            if _takes(taken, name) and name not in self.input_mapping:
                chosen.setdefault(name, name)
        check_names("MODEL.INPUT_MAPPING", "the model's forward", taken, chosen)
        missing = [name for name in taken.required if name not in chosen]
        if missing or not chosen:
            unused = [str(name) for name in names if name not in chosen.values()]
            parameter = (missing or ["parameter"])[0]
            raise MismatchError(
                f"the model's forward needs {repr(parameter) if missing else 'an input'}, and the batch has no such "
                f"entry{suggest(parameter, unused) or '.'} The batch has: {_listed(inputs)}. forward takes: "
                f"{_listed(taken.keywords)}. Rename entries with MODEL.INPUT_MAPPING, such as "
                f'{{{(unused or ["entry"])[0]}: {parameter}}}; to pass the dict itself, set MODEL.INPUTS to "batch"'
            )
        return chosen

    # ------------------------------------------------------------------ targets and outputs

    def _target_name(self, batch: Mapping[Any, Any], required: bool = True) -> str | None:
        """Return the name of the target in a dict batch; None if it has no target and none is required."""
        names = [self.target] if self.target else TARGET_NAMES
        found = [name for name in names if name in batch]
        if len(found) == 1 or not (found or required):
            return found[0] if found else None
        problem = f"the batch's target may be {' or '.join(found)}."
        if not found:
            hint = (self.target and suggest(self.target, map(str, batch))) or "."
            problem = f"the batch has no target: none of its entries is named {', '.join(names)}{hint}"
        raise MismatchError(
            f"{problem} The batch has: {_listed(batch)}. MODEL.LOSS and targets need one: set MODEL.TARGET"
        )

    def _target_entry(self, batch: Any) -> Any:
        """Return the entry of a batch that is its target: -1 or a name."""
        if entries := batch if isinstance(batch, Mapping) else fields_of(batch):
            return self._target_name(entries)
        if isinstance(batch, tuple | list) and len(batch) >= 2:
            return -1
        raise MismatchError(
            f"expected a batch (x, y), a dict or a dataclass, got {describe(batch)}. MODEL.LOSS and targets need such "
            'batches; otherwise set MODEL.LOSS.NAME to "" and let the model return its losses'
        )

    def _renamed(self, output: Any) -> dict[str, Any]:
        """Return the outputs that ``output_mapping`` names, by their new names."""
        entries = entries_of(output)
        if entries is None:
            raise MismatchError(f"MODEL.OUTPUT_MAPPING needs outputs with names; the model returned {describe(output)}")
        for name in self.output_mapping:
            if name not in entries:
                hint = suggest(name, map(str, entries)) or "."
                returned = f"It returned: {_listed(entries)}"
                raise MismatchError(f"MODEL.OUTPUT_MAPPING: the model returned no '{name}'{hint} {returned}")
        return {new: entries[name] for name, new in self.output_mapping.items()}

    def _only_output(self, output: Any) -> Any:
        """Return the output for a loss that takes one tensor."""
        _check_output(output)
        entries = None if isinstance(output, Tensor) else entries_of(output)
        if entries is None:
            return without_scalars(output)
        if len(entries) == 1:
            return next(iter(entries.values()))
        if "logits" in entries:
            return entries["logits"]
        raise MismatchError(
            f"{self._loss_name} takes one tensor, the model returned: {_listed(entries)}. Select one with "
            f"MODEL.OUTPUT_MAPPING, such as {{{next(iter(entries), 'name')}: input}}"
        )


def _entry(batch: Any, entry: Any) -> Any:
    """Return an entry of a tuple or dict, or a field of a dataclass."""
    return batch[entry] if isinstance(batch, tuple | list | Mapping) else getattr(batch, entry)


def _form(batch: Any) -> Any:
    """Return what distinguishes batches that are called differently: their type, and their length or names."""
    if isinstance(batch, tuple | list):
        first: Any = batch[0] if batch else None
        named = type(first) is not Tensor and isinstance(first, Mapping)
        return type(batch), len(batch), tuple(first) if named else None
    return (type(batch), tuple(batch)) if isinstance(batch, Mapping) else type(batch)


# ---------------------------------------------------------------------- what a model can be called with


def check_names(key: str, label: str, taken: Parameters | None, names: Iterable[Any]) -> None:
    """Check that a callable takes parameters of these names. Any name is accepted if ``taken`` is None.

    Raises:
        ConfigError: a name is unknown.
    """
    for name in names:
        if taken is not None and not _takes(taken, name):
            hint = suggest(name, taken.keywords) or "."
            raise ConfigError(f"{key}: {label} takes no '{name}'{hint} It takes: {_listed(taken.keywords)}")


def _takes(taken: Parameters, name: Any) -> bool:
    return isinstance(name, str) and (taken.any_keyword or name in taken.keywords)


def _required_positions(taken: Parameters) -> list[str]:
    return [name for name in taken.required if name in taken.positions]


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"


def _own_step(model: Any, module: Any, name: str, through_forward: bool) -> Callable[[Any], Any]:
    """Return the function that calls the model's ``train_step`` or ``predict_step``."""
    step: Callable[[Any], Any] = getattr(module, name)
    wrapper = getattr(model, "_orig_mod", model)
    if through_forward and isinstance(wrapper, nn.DataParallel):
        raise MismatchError(f"{type(module).__name__}.{name} would bypass DataParallel; use DistributedDataParallel")
    if through_forward and isinstance(wrapper, nn.parallel.DistributedDataParallel):
        return _through_forward(model, module, step)
    return step


def _through_forward(model: Any, module: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls a method of a module as if it were its ``forward``, which the wrapper watches."""

    def run(batch: Any) -> Any:
        own = vars(module).pop("forward", None)

        def restore() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own

        def first(*args: Any, **kwargs: Any) -> Any:
            restore()  # the method calls the module itself
            return step(*args, **kwargs)

        module.forward = first
        try:
            return model(batch)
        finally:
            restore()

    return run


# ---------------------------------------------------------------------- what a model or a loss returns


def entries_of(output: Any) -> Mapping[Any, Any] | None:
    """Return an output's parts by name; None if they have no names."""
    if isinstance(output, Mapping):
        return output
    if found := fields_of(output):
        return found
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        return output._asdict()
    return None


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a tensor without dimensions."""
    return isinstance(value, Tensor) and not value.dim()


def losses_of(output: Any) -> dict[str, Any]:
    """Return the losses, scalar tensors () by name, in the output of a model without ``MODEL.LOSS``."""
    count: Any = None
    losses: dict[str, Any] = {}
    if isinstance(output, Tensor):
        losses = {"total_loss": output}
    elif type(output) is tuple:  # (logits, loss)
        scalars = [part for part in output if _is_scalar(part) or isinstance(part, int | float)]
        losses = {"loss": scalars[0]} if len(scalars) == 1 else {}
    elif type(output) is not dict and _is_scalar(loss := getattr(output, "loss", None)):
        losses, count = {"loss": loss}, getattr(output, "num_items", None)
    elif isinstance(output, Mapping):
        losses = dict(output)
        count = losses.pop("num_items", None)
        if not all(map(_is_scalar, losses.values())):  # not only losses: {"loss": ..., "logits": ...}
            losses = {"loss": losses.get("loss")}
    if losses and all(map(_is_scalar, losses.values())):
        return _with_count(losses, count)
    raise MismatchError(
        "without MODEL.LOSS the model must return its losses in training mode: a dict of scalar tensors, one scalar "
        "tensor, a tuple with one, an object whose .loss is one, or a dict with one named 'loss'. It returned "
        f"{describe(output)}. If these are predictions, set MODEL.LOSS.NAME"
    )


def terms_of(loss: Any) -> dict[str, Any]:
    """Return what ``MODEL.LOSS`` returned as scalar tensors () by name, with ``num_items`` if it counts its items."""
    if type(loss) is Tensor and not loss.dim():
        return {"loss": loss}
    value, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    terms = dict(value) if isinstance(value, Mapping) else {"loss": value}
    count = terms.pop("num_items", count)
    if len(terms) > 1 and (problem := _counts_twice(terms)):
        raise MismatchError(f"MODEL.LOSS: {problem}")
    if terms and all(map(_is_scalar, terms.values())):
        # The loss of scores that are split over ranks is a whole number on each of them.
        return _with_count({name: local_part(term) for name, term in terms.items()}, local_part(count))
    raise MismatchError(
        "MODEL.LOSS must return a scalar tensor, that and the number of items of its mean, or scalar tensors by name, "
        f"not {describe(loss)}; use reduction='mean'"
    )


def _counts_twice(losses: Mapping[str, Any]) -> str:
    """Return a warning if one of several losses seems to be the total of the others."""
    total = next((name for name in ("loss", "total_loss") if name in losses), "")
    others = ", ".join(name for name in losses if name not in (total, "num_items"))
    return (total and others) and (
        f"{total!r} is returned beside {others}, and training minimises the sum of all. If {total!r} is the total, "
        "return it alone, and log the others by get_event_storage().put_scalar(); if not, rename it"
    )


def _with_count(losses: dict[str, Any], count: Any) -> dict[str, Any]:
    """Add the number of items that the losses are means of, as ``num_items``."""
    if count is None:
        return losses
    if not (isinstance(count, int) or _is_scalar(count)):
        raise MismatchError(f"num_items must be an int or a scalar tensor, not {describe(count)}")
    return {**losses, "num_items": count}


def without_scalars(output: Any) -> Any:
    """Return a tuple such as (logits, loss) without scalars and None, or the only other part; others unchanged."""
    if type(output) is not tuple:
        return output
    rest = tuple(part for part in output if part is not None and not _is_scalar(part))
    return rest[0] if len(rest) == 1 < len(output) else rest or output


def without_loss(output: Any) -> Any:
    """Return the named parts of an output as a dict without ``loss``, if that is a scalar or None; others unchanged."""
    entries = entries_of(output)
    if entries is None or not ("loss" in entries or hasattr(output, "loss")):
        return output
    loss = entries.get("loss")
    if loss is not None and not _is_scalar(loss):  # a loss for each sample
        return output
    return {name: value for name, value in entries.items() if name != "loss" and value is not None} or output


def _without_cache(output: Any, module: Any) -> Any:
    """Return a named output without the cache of a Hugging Face model, as its Trainer does; others unchanged."""
    entries = entries_of(output)
    if entries is None:
        return output
    names = getattr(getattr(module, "config", None), "keys_to_ignore_at_inference", None) or ()
    kept = {name: v for name, v in entries.items() if name not in names and not type(v).__name__.endswith("Cache")}
    return output if len(kept) == len(entries) else type(output)(**kept)


def predictions_of(output: Any, ignore: Container[str] = ()) -> Any:
    """Return what metrics and callers receive of an output: its parts without the loss, or the only part by itself.

    Args:
        output: a model's output.
        ignore: names of further parts to leave out.
    """
    rest = without_loss(output)
    if ignore and (entries := entries_of(rest)) is not None:
        rest = {name: value for name, value in entries.items() if name not in ignore}
    return next(iter(rest.values())) if rest is not output and len(rest) == 1 else rest


def _check_output(output: Any) -> None:
    """Raise MismatchError if a model returned nothing."""
    if output is None:
        raise MismatchError("the model returned None: its forward() has no return statement, or an empty one")


def _is_text(part: Any) -> bool:
    return isinstance(part, list | tuple) and bool(part) and isinstance(part[0], str)


def raise_clearer(error: Exception, batch: Any = None, clear: Exception | None = None) -> None:
    """Raise a clearer error for one of a model, its loss or its backward pass. Without one, add a note and return.

    Args:
        error: the error.
        batch: what the model was called with, for the note; None: there is no note.
        clear: the clearer error, if it is known already.
    """
    message = str(error)
    if match := re.fullmatch(r"Target (-?\d+) is out of bounds\.", message):
        clear = MismatchError(
            f"the target {match[1]} is not a class: the model's output has fewer classes (its num_classes, or the size "
            "of its last layer), or the labels do not count from 0"
        )
    elif message.startswith("Expected target size"):
        clear = MismatchError(
            f"torch's loss takes scores (N, classes, ...) for targets (N, ...): {message}. For scores (N, ..., "
            'classes) name the loss: MODEL.LOSS.NAME "CrossEntropyLoss" (Trainer: loss="CrossEntropyLoss")'
        )
    elif "does not require grad and does not have a grad_fn" in message:
        clear = MismatchError(
            "the loss does not depend on the model's parameters: an output or the loss was detached (by detach(), "
            "no_grad(), item() or numpy()), or the parameters in use do not require a gradient"
        )
    elif "must be Tensor, not" in message and isinstance(batch, list | tuple) and any(map(_is_text, batch)):
        clear = MismatchError("the labels are strings: number them, such as by label = class_names.index(label)")
    elif "got mixed torch.Tensor and DTensor" in message:
        clear = ConfigError(
            "PARALLEL.NAME: a parameter that is sharded over ranks was used outside of forward() of its unit, where it "
            "is not whole, as in a penalty on weights. Use SOLVER.WEIGHT_DECAY; or raise PARALLEL.ARGS.min_params, so "
            "that the module that uses it and its submodules are one unit; or set PARALLEL.NAME to ddp"
        )
    elif 'missing the required "forward"' in message:  # in torch's words
        clear = MismatchError(message)
    if clear is not None:
        raise clear from error
    if batch is None or isinstance(error, ConfigError):
        return
    if not any(note.endswith(" as batch") for note in getattr(error, "__notes__", ())):
        error.add_note(f"with {describe(batch)} as batch")


def describe(value: Any) -> str:
    """Describe a value's type and shapes for error messages."""
    return f"a {_described(value, 0)}"


def _described(value: Any, depth: int) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    entries = value if isinstance(value, Mapping) else fields_of(value)
    if entries and depth < 3:
        parts = ", ".join(f"{name}: {_described(part, depth + 1)}" for name, part in entries.items())
        return f"{type(value).__name__} {{{parts}}}"
    if isinstance(value, tuple | list) and depth < 3 and len(value) <= 8:
        return f"{type(value).__name__} ({', '.join(_described(part, depth + 1) for part in value)})"
    return type(value).__name__
