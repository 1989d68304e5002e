"""How a model is called with a batch, and how losses and predictions are read from its output."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...config import ConfigError
from ...config.errors import MismatchError, suggest
from ...config.signatures import Taken, what_it_takes
from ...hooks.common.models import unwrap_model
from ...hooks.common.tensors import convert, fields_of
from .outputs import check_output, describe, entries_of, losses_of, raise_clearer, terms_of, without_scalars

__all__ = ["ModelAdapter", "check_names", "check_step_name"]

logger = logging.getLogger(__name__)

INPUT_FORMS = ("auto", "batch", "tuple", "kwargs")
"""Values of MODEL.INPUTS."""

TARGET_NAMES = ("label", "labels", "y", "target", "targets")
"""Default names of the target in a dict batch, and of the parameter of a model that computes its loss."""

_STEP_KEYS = {True: "MODEL.TRAIN_STEP", False: "MODEL.PREDICT_STEP"}
_MAX_CALLS = 64  # forms of batches that are remembered


@dataclass(slots=True)
class _Call:
    """How a model is called with batches of one form: ``run`` returns its output, ``target`` the loss's target.

    Attributes:
        own_step: ``run`` is the model's ``train_step`` or ``predict_step``.
    """

    model: Any
    form: Any
    run: Callable[[Any], Any]
    target: Callable[[Any], Any] | None = None
    own_step: bool = False


class ModelAdapter:
    """Calls a model with a batch, and reads losses or predictions from its output.

    How the model is called is decided once for each form of batch, from the signature of its ``forward``, and logged.
    If the model has a method ``train_step(batch)`` (for predictions, ``predict_step(batch)``), that is called instead,
    with the unchanged batch; in DistributedDataParallel through its ``forward``. A dataclass is used like a dict. The
    adapter is not a module: the names in the model's state dict do not change.

    Args:
        loss: called with the model's output and the batch's target. It returns a scalar tensor, that and the number of
            items it is the mean of, or a dict of scalar tensors, whose sum is minimised. Batches are ``(x, y)``,
            ``(x1, x2, y)``, or dicts with an entry for the target. If None, the model receives the whole batch; it
            returns its losses in training mode, predictions in eval mode.
        inputs: how the inputs are passed. "batch": all in one argument. "tuple": one argument per entry. "kwargs":
            entries of a dict that ``forward`` takes, by name. "auto": entries of a dict by name if parameters of
            ``forward`` have their names; entries of a tuple as arguments if ``forward`` requires several, or without a
            loss if it names a target, such as ``forward(x, targets=None)``; otherwise one argument.
        input_mapping: maps names of entries to names of ``forward``'s parameters. Implies "kwargs".
        output_mapping: maps names of the model's outputs to names of the loss's parameters. By default, a loss of
            torch receives the only output or the one named "logits", any other loss the whole output. Without a loss,
            the output mapped to "loss" is the loss.
        target: name of the target in dict batches. Default: the one of "label", "labels", "y", "target" and "targets"
            that the batch has.
        train_step: name of the method that is called instead of the model in training, if the model has it.
        predict_step: likewise, for predictions.
        eval_precision: dtype for torch.autocast in :meth:`predict`, whose outputs are then float32. None: no autocast.
        input_function: returns the batch that the model and the loss use, from the loader's batch.
        output_function: returns the output that the loss and the metrics use, from the model's.
        eval_input_function: the same in evaluation and prediction. Default: ``input_function``.
        eval_output_function: likewise. Default: ``output_function``.

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
        train_step: str = "train_step",
        predict_step: str = "predict_step",
        eval_precision: torch.dtype | None = None,
        input_function: Callable[[Any], Any] | None = None,
        output_function: Callable[[Any], Any] | None = None,
        eval_input_function: Callable[[Any], Any] | None = None,
        eval_output_function: Callable[[Any], Any] | None = None,
    ) -> None:
        if inputs not in INPUT_FORMS:
            raise ConfigError(f"MODEL.INPUTS: {inputs!r} is not one of {', '.join(map(repr, INPUT_FORMS))}")
        self.loss = loss
        self.input_mapping, self.output_mapping = dict(input_mapping or {}), dict(output_mapping or {})
        self.target = target or None
        if self.input_mapping and inputs in ("batch", "tuple"):
            raise ConfigError(f'MODEL.INPUT_MAPPING names keyword arguments; MODEL.INPUTS "{inputs}" has none')
        self.inputs = "kwargs" if self.input_mapping else inputs
        self._steps = {True: train_step, False: predict_step}
        self._eval_precision = eval_precision
        self._input_functions = {True: input_function, False: eval_input_function or input_function}
        self._output_functions = {True: output_function, False: eval_output_function or output_function}
        # Without a loss, the outputs mapped to it; the others are the predictions.
        self._mapped_losses = {old: new for old, new in self.output_mapping.items() if loss is None and new == "loss"}
        self._mapped_outputs = {old: new for old, new in self.output_mapping.items() if old not in self._mapped_losses}
        function = getattr(loss, "func", loss)  # of a functools.partial
        self._loss_name = getattr(function, "__name__", type(loss).__name__)
        # A loss of torch, or a subclass, takes one tensor and the target.
        of_torch = getattr(function, "__module__", "") == "torch.nn.functional"
        self._takes_tensor = of_torch or isinstance(loss, nn.modules.loss._Loss)
        self._target_parameter = self._find_target_parameter()
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
        taken = what_it_takes(getattr(self.loss, "forward", self.loss))
        if taken is None:
            raise ConfigError(f"MODEL.OUTPUT_MAPPING: the signature of {self._loss_name} cannot be read")
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
            (such as tokens) of its mean, the entry "num_items" is that number, an int or a scalar tensor.

        Raises:
            TypeError: the batch does not fit, or the result is not a loss.
        """
        function = self._input_functions[True]
        if function is not None:
            batch = function(batch)
        call = self._training
        if call is None or call.model is not model or call.form != _form(batch):
            call = self._training = self._call(model, batch, training=True)
        try:
            output = call.run(batch)
        except (AttributeError, TypeError) as error:
            self._note_missing_loss(error, batch)
            raise
        if call.target is None:
            return self._own_losses(output)
        assert self.loss is not None
        target = call.target(batch)
        if self.output_mapping:
            return terms_of(self.loss(**self._renamed(output, self.output_mapping), **{self._target_parameter: target}))
        if type(output) is not Tensor and self._takes_tensor:
            output, whole = self._only_output(output), output
            if not isinstance(output, Tensor):
                raise MismatchError(f"{self._loss_name} takes one tensor, the model returned {describe(whole)}")
        return terms_of(self.loss(output, target))

    def prepare(self, model: nn.Module, batch: Any) -> None:
        """Decide how to call the model with batches like this one, before a step that is compiled or captured.

        Raises:
            TypeError: the batch does not fit.
        """
        function = self._input_functions[True]
        self._training = self._call(model, batch if function is None else function(batch), training=True)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's predictions for a batch, which may lack the target.

        Returns:
            The input of the loss; without a loss, the model's output. With one entry in ``output_mapping`` that
            output; with several a dict of outputs under their new names.

        Raises:
            TypeError: the batch does not fit.
        """
        return self._predict(model, batch)[0]

    def predict_with_losses(self, model: nn.Module, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the model's predictions for a batch, and the losses that it computes itself.

        The losses are those beside the predictions. If there are none, the model is called a second time with
        ``model.training`` set, while its submodules (dropout, batch norm) stay in eval mode.

        Raises:
            TypeError: the batch does not fit, or the model returns no losses in either mode.
        """
        predictions, output = self._predict(model, batch)
        module = unwrap_model(model)
        try:
            return predictions, self._own_losses(output)
        except TypeError:
            before, module.training = module.training, True
        try:
            with self._eval_autocast(model):
                return predictions, self.losses(model, batch)
        except TypeError as error:
            error.add_note(
                "for the loss of a test set: in eval mode the model returned no losses beside its predictions, nor in "
                "a second call with model.training set (and its submodules in eval mode)"
            )
            raise
        finally:
            module.training = before

    def losses_of_predictions(self, model: nn.Module, batch: Any, predictions: Any) -> dict[str, Any]:
        """Return the losses of a batch from what :meth:`predict` returned for it.

        Without ``loss`` they are those beside the predictions, or those of a second call; see
        :meth:`predict_with_losses`.

        Raises:
            TypeError: the batch has no target, or the model returns no losses.
        """
        if self.loss is None:
            try:
                return losses_of(predictions)
            except TypeError:
                return self.predict_with_losses(model, batch)[1]
        target = self.targets(batch)
        if not self.output_mapping:
            return terms_of(self.loss(predictions, target))
        several = len(self.output_mapping) > 1
        named = predictions if several else {next(iter(self.output_mapping.values())): predictions}
        return terms_of(self.loss(**named, **{self._target_parameter: target}))

    def predictions(self, output: Any, training: bool = False) -> Any:
        """Return the predictions in a model's output: what metrics receive.

        Args:
            output: what ``forward`` returned.
            training: whether it returned it in a training step.
        """
        function = self._output_functions[True]
        return self._select(function(output) if training and function is not None else output)

    def targets(self, batch: Any, training: bool = False) -> Any:
        """Return the targets of a batch: its last entry, or the target of a dict.

        Args:
            batch: the batch.
            training: whether it is one of a training step.

        Raises:
            TypeError: the batch has no target.
        """
        function = self._input_functions[training]
        batch = batch if function is None else function(batch)
        return self._target_reader(batch)[0](batch)

    # ------------------------------------------------------------------ the call

    def _predict(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return the predictions for a batch, and the model's output."""
        function = self._input_functions[False]
        batch = batch if function is None else function(batch)
        call = self._call(model, batch, training=False)
        try:
            with self._eval_autocast(model):
                output = call.run(batch)
        except Exception as error:
            self._note_missing_loss(error, batch)
            raise_clearer(error, batch)
            raise
        if self._eval_precision is not None:
            output = convert(output, self._to_float32)
        check_output(output)
        return output if call.own_step else self._select(output), output

    def _eval_autocast(self, model: Any) -> Any:
        if self._eval_precision is None:
            return nullcontext()
        parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        return torch.autocast("cpu" if parameter is None else parameter.device.type, dtype=self._eval_precision)

    def _to_float32(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.dtype is self._eval_precision else value
        return None

    def _note_missing_loss(self, error: Exception, batch: Any) -> None:
        if self.loss is None and isinstance(batch, tuple | list) and isinstance(error, AttributeError | TypeError):
            error.add_note(
                "MODEL.LOSS is not set, so the model receives the whole batch and returns its losses. To train on "
                "loss(model(x), y), set MODEL.LOSS (Trainer: loss=...)"
            )

    def _call(self, model: Any, batch: Any, training: bool) -> _Call:
        key = (model, training, form := _form(batch))
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            call, text = self._decide(model, batch, training, form)
            function = self._output_functions[training]
            if function is not None:
                run = call.run
                call.run = lambda batch: function(run(batch))
            self._calls[key] = call
            text = f"A batch of {'training' if training else 'evaluation or prediction'} is used as {text}"
            if text not in self._logged:
                self._logged.add(text)
                logger.log(logging.INFO if training else logging.DEBUG, "%s", text)
        return call

    def _decide(self, model: Any, batch: Any, training: bool, form: Any) -> tuple[_Call, str]:
        """Return how a model is called with batches of a form, and that as a text."""
        module, name = unwrap_model(model), self._steps[training]
        step = getattr(module, name, None)
        if callable(step):
            needed = _required_positions(what_it_takes(step) or Taken())
            if len(needed) > 1:
                raise MismatchError(
                    f"{_STEP_KEYS[training]}: {name}() needs {', '.join(needed)}, but it is called with the batch "
                    f"alone, as {name}(batch); give a default to {', '.join(needed[1:])}"
                )
            parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
            if training and isinstance(getattr(model, "_orig_mod", model), parallel):
                if not isinstance(model, nn.parallel.DistributedDataParallel):
                    raise MismatchError(
                        f"{type(module).__name__}.{name} would bypass {type(model).__name__}, and ranks would not "
                        "exchange gradients; have the model's forward return its losses instead"
                    )
                step = _through_forward(model, module, step)
            return _Call(model, form, step, own_step=True), f"model.{name}(batch)"
        check_step_name(module, _STEP_KEYS[training], name)
        _check_forward(module)
        taken = what_it_takes(getattr(module, "forward", module))
        fields = fields_of(batch)  # a dataclass is used like a dict
        entries: Any = batch if fields is None else fields
        # A model with train_step(batch) splits the batch there; its forward takes the inputs without the target.
        separate = self.loss is not None or (not training and callable(getattr(module, self._steps[True], None)))
        several = not separate and (self.inputs == "tuple" or self._takes_target(entries, taken))
        inputs, source, target = entries, "batch", None
        read: Callable[[Any], Any] = _same
        if separate and isinstance(entries, Mapping):
            target = self._target_name(entries, required=training)
        elif separate and isinstance(entries, tuple | list):
            if training or not self._lacks_target(entries, taken):
                self._target_reader(entries)  # raises without a target
                inputs, read = entries[:-1], _all_but_last
                source = ", ".join(f"x{number}" for number in range(1, len(entries)))
            several = len(entries) > 1
            if len(inputs) == 1:
                inputs, read, source, several = inputs[0], _first, "x", False
        elif separate and training:
            self._target_reader(entries)
        passed: Any = self._arguments(taken, inputs, target, training, several, separate)
        if passed is None:
            run = model if read is _same else _compose(model, read)
            if read is _first:  # the usual batch, without a call of read()
                run = lambda batch: model(batch[0])  # noqa: E731
            text = f"model(({source}))" if read is _all_but_last else f"model({source})"
        elif passed == ():
            run = lambda batch: model(*read(batch))  # noqa: E731
            text = f"model({source})" if read is _all_but_last else f"model(*{source})"
        else:
            pairs = tuple(passed.items())
            run = lambda batch: model(**{name: batch[entry] for name, entry in pairs})  # noqa: E731
            if fields is not None:
                run = _compose(run, fields_of)
            elif read is _first:
                run = _compose(run, _first)
            text = f"model({', '.join(f'{name}={entry}' for name, entry in pairs)})"
        if not training or self.loss is None:
            return _Call(model, form, run), text
        read_target, target_text = self._target_reader(batch)
        return _Call(model, form, run, read_target), f"{text}, loss(output, {target_text})"

    def _lacks_target(self, batch: Sequence[Any], taken: Taken | None) -> bool:
        """Return whether the model needs every entry of a tuple or list, so that none is left for a target."""
        if len(batch) == 1:
            return True
        if taken is None or self.inputs not in ("auto", "tuple") or isinstance(batch[0], tuple | list | Mapping):
            return False
        return len(batch) == len(_required_positions(taken))

    def _takes_target(self, batch: Any, taken: Taken | None) -> bool:
        """Return whether ``forward`` takes the entries of a batch one by one, the target among them."""
        if taken is None or self.inputs != "auto" or not isinstance(batch, tuple | list):
            return False
        if not 0 < len(batch) <= len(taken.positions) or isinstance(batch[0], Mapping):
            return False
        return any(name in (self.target, *TARGET_NAMES) for name in taken.positions[1:])

    def _arguments(
        self, taken: Taken | None, inputs: Any, target: str | None, training: bool, several: bool, separate: bool
    ) -> Mapping[str, Any] | tuple[()] | None:
        """Return how inputs are passed: None: as one argument; (): by position; or the entry of each parameter."""
        if self.inputs == "batch":
            return None
        is_sequence = isinstance(inputs, tuple | list)
        if self.inputs == "tuple" and (isinstance(inputs, Mapping) or not (is_sequence or separate)):
            raise MismatchError(f'MODEL.INPUTS is "tuple", but the inputs are {describe(inputs)}')
        if isinstance(inputs, Mapping):
            names = [name for name in inputs if name != target]
            whole = self.inputs == "auto" and (self.loss is None or target is None)
            return None if whole and _takes_whole_dict(taken, names) else self._by_name(taken, names, inputs, training)
        if self.inputs == "kwargs":
            raise MismatchError(
                'MODEL.INPUTS "kwargs" and MODEL.INPUT_MAPPING need inputs in a dict, by their names; '
                f"these are {describe(inputs)}"
            )
        required = [] if taken is None else _required_positions(taken)
        if not is_sequence or not (self.inputs == "tuple" or several or len(required) > 1):
            return None
        if taken is not None:
            too_many = len(inputs) > len(taken.positions) and not taken.any_position
            if too_many or len(inputs) < len(required):
                raise MismatchError(
                    f"the batch has {len(inputs)} inputs, but the model's forward takes: {_listed(taken.positions)}. "
                    'To pass them as one argument, set MODEL.INPUTS to "batch"; a model that also takes the target '
                    "must return its losses, without MODEL.LOSS"
                )
        return ()

    def _by_name(
        self, taken: Taken | None, names: Sequence[Any], inputs: Mapping[Any, Any], training: bool
    ) -> dict[str, Any]:
        chosen: dict[str, Any] = {}  # from parameter to entry
        for entry, parameter in self.input_mapping.items():
            if entry in inputs:
                chosen[parameter] = entry
            elif training:
                hint = suggest(entry, map(str, inputs)) or "."
                raise MismatchError(f"MODEL.INPUT_MAPPING: the batch has no '{entry}'{hint} It has: {_listed(inputs)}")
        for name in names:
            taken_by_name = isinstance(name, str) if taken is None else _takes(taken, name)
            if taken_by_name and name not in self.input_mapping and name not in chosen:
                chosen[name] = name
        check_names("MODEL.INPUT_MAPPING", "the model's forward", taken, chosen, MismatchError)
        missing = [] if taken is None else [name for name in taken.required if name not in chosen]
        if taken is not None and (missing or not chosen):
            unused = [str(name) for name in names if name not in chosen.values()]
            hint = suggest(missing[0], unused) if missing else ""
            entry, parameter = (unused or ["entry"])[0], (missing or ["parameter"])[0]
            raise MismatchError(
                f"the model's forward needs {repr(parameter) if missing else 'an input'}, and the batch has no such "
                f"entry{hint or '.'} The batch has: {_listed(inputs)}. forward takes: {_listed(taken.keywords)}. "
                f"Rename entries with MODEL.INPUT_MAPPING, such as {{{entry}: {parameter}}}; to pass the dict itself, "
                'set MODEL.INPUTS to "batch"'
            )
        return chosen

    # ------------------------------------------------------------------ targets and outputs

    def _target_name(self, batch: Mapping[Any, Any], required: bool = True) -> str | None:
        """Return the name of the target in a dict batch; None if it has no target and none is required."""
        names = [self.target] if self.target else TARGET_NAMES
        found = [name for name in names if name in batch]
        if len(found) == 1 or not (found or required):
            return found[0] if found else None
        hint = "" if self.target is None else suggest(self.target, map(str, batch))
        raise MismatchError(
            f"the batch's target may be {' or '.join(found)}: set MODEL.TARGET. The batch has: {_listed(batch)}"
            if found
            else f"{'MODEL.TARGET: ' if self.target else ''}the batch has no target: none of its entries is named "
            f"{', '.join(names)}{hint or '.'} The batch has: {_listed(batch)}. MODEL.LOSS and targets need one: set "
            "MODEL.TARGET"
        )

    def _target_reader(self, batch: Any) -> tuple[Callable[[Any], Any], str]:
        """Return the function that reads the target of batches like this one, and the target's name."""
        if isinstance(batch, tuple | list) and len(batch) >= 2:
            return _last, "y"
        fields = fields_of(batch)
        if fields is not None or isinstance(batch, Mapping):
            name: Any = self._target_name(batch if fields is None else fields)
            return _entry(name) if fields is None else lambda batch: getattr(batch, name), name
        raise MismatchError(
            f"expected a batch (x, y) or a dict, got {describe(batch)}. MODEL.LOSS and targets need such batches; "
            'otherwise set MODEL.LOSS.NAME to "" and let the model return its losses'
        )

    def _own_losses(self, output: Any) -> dict[str, Any]:
        """Return the losses that the model computed."""
        if not self._mapped_losses:
            return losses_of(output)
        return losses_of(self._renamed(output, self._mapped_losses))

    def _select(self, output: Any) -> Any:
        """Return the predictions in an output."""
        if self._mapped_outputs:
            mapped = self._renamed(output, self._mapped_outputs)
            return mapped if len(mapped) > 1 else next(iter(mapped.values()))
        if self._takes_tensor:
            return self._only_output(output)
        return without_scalars(output) if self.loss is None else output

    def _renamed(self, output: Any, mapping: Mapping[str, str]) -> dict[str, Any]:
        """Return the outputs that a mapping names, by their new names."""
        entries = entries_of(output)
        if entries is None:
            raise MismatchError(f"MODEL.OUTPUT_MAPPING needs outputs with names; the model returned {describe(output)}")
        for name in mapping:
            if name not in entries:
                hint = suggest(name, map(str, entries)) or "."
                returned = f"It returned: {_listed(entries)}"
                raise MismatchError(f"MODEL.OUTPUT_MAPPING: the model returned no '{name}'{hint} {returned}")
        return {new: entries[name] for name, new in mapping.items()}

    def _only_output(self, output: Any) -> Any:
        """Return the output for a loss that takes one tensor."""
        check_output(output)
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


# ---------------------------------------------------------------------- functions of a batch
# Not those of the operator module: torch.compile cannot trace them.


def _form(batch: Any) -> Any:
    """Return what distinguishes batches that are called differently: their type, and their length or names."""
    kind = type(batch)
    if kind is tuple or kind is list:  # fast
        first: Any = batch[0] if batch else None
        named = type(first) is not Tensor and isinstance(first, Mapping)
        return (kind, len(batch), tuple(first)) if named else (kind, len(batch))
    if kind is dict or isinstance(batch, Mapping):
        return kind, tuple(batch)
    return (kind, len(batch)) if isinstance(batch, tuple | list) else kind


def _same(batch: Any) -> Any:
    return batch


def _compose(call: Callable[[Any], Any], read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda batch: call(read(batch))


def _entry(key: Any) -> Callable[[Any], Any]:
    return lambda batch: batch[key]


_first, _last, _all_but_last = _entry(0), _entry(-1), _entry(slice(0, -1))


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


# ---------------------------------------------------------------------- parameters of forward


def check_names(
    key: str, label: str, taken: Taken | None, names: Iterable[Any], error: type[Exception] = ConfigError
) -> None:
    """Check that a callable takes parameters of these names. Any name is accepted if ``taken`` is None.

    Raises:
        ConfigError: a name is unknown (or another exception of type ``error``).
    """
    for name in names:
        if taken is not None and not _takes(taken, name):
            hint = suggest(name, taken.keywords) or "."
            raise error(f"{key}: {label} takes no '{name}'{hint} It takes: {_listed(taken.keywords)}")


def _takes(taken: Taken, name: Any) -> bool:
    return isinstance(name, str) and (taken.any_keyword or name in taken.keywords)


def _required_positions(taken: Taken) -> list[str]:
    return [name for name in taken.required if name in taken.positions]


def _takes_whole_dict(taken: Taken | None, names: Sequence[Any]) -> bool:
    """Return whether ``forward`` takes the dict as one argument: no parameter has the name of an entry."""
    if taken is None:
        return True
    if not (taken.positions or taken.any_position) or any(name in taken.keywords for name in names):
        return False
    return len(taken.required) <= 1


def check_step_name(model: nn.Module, key: str, name: str) -> None:
    """Check that the model has the method that ``MODEL.TRAIN_STEP`` or ``MODEL.PREDICT_STEP`` names.

    Raises:
        ConfigError: it has not, and the name is not the key's default.
    """
    if name not in ("train_step", "predict_step") and not callable(getattr(model, name, None)):
        raise ConfigError(f"{key}: {type(model).__name__} has no method {name!r}{suggest(name, dir(model))}")


def _check_forward(model: Any) -> None:
    """Raise MismatchError if a model has no ``forward``, with the key for a method that another library calls."""
    kind = type(model)
    if not isinstance(model, nn.Module) or kind.__call__ is not nn.Module.__call__ or "forward" in vars(model):
        return
    if kind.forward is nn.Module.forward:
        steps = ("training_step", "train_batch", "compute_loss")
        step = next((name for name in steps if callable(getattr(model, name, None))), "")
        hint = f"; to train by {step}(batch), set MODEL.TRAIN_STEP to it" if step else ""
        raise MismatchError(
            f"{kind.__name__} has no forward(){hint}. Evaluation calls forward(), or the method that "
            "MODEL.PREDICT_STEP names"
        )


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"
