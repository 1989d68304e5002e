"""How a model is called with a batch, and how losses and predictions are read from its output."""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...config import ConfigError
from ...config.errors import MismatchError, suggest
from ...config.signatures import Parameters, parameters_of
from ...hooks.common import has_shards, local_part, unwrap_model
from .clear_errors import describe, raise_clearer
from .inputs import Call, InputRule, check_names, listed, part_of
from .outputs import (
    Terms,
    counted_twice,
    entries_of,
    losses_of,
    terms_ahead,
    terms_of,
    without_cache,
    without_scalars,
)
from .summary import logs_shapes

logger = logging.getLogger(__name__)


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
        on_count: is called before the model with the number of terms that the loss will be the mean of, if the target
            alone tells it. While it is set, the loss gets its ``num_terms``.

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
        self.loss = loss
        self.inputs = InputRule(inputs, input_mapping, target)
        self.output_mapping = dict(output_mapping or {})
        for key, mapping in (("INPUT_MAPPING", self.inputs.mapping), ("OUTPUT_MAPPING", self.output_mapping)):
            if len(set(map(str, mapping.values()))) < len(mapping):
                raise ConfigError(f"MODEL.{key}: two names are mapped to the same one in {mapping}")
        if loss is None and "loss" in self.output_mapping.values():
            raise ConfigError("MODEL.OUTPUT_MAPPING selects predictions: the model itself must name its loss 'loss'")
        function = getattr(loss, "func", loss)  # of a functools.partial
        self._loss_name = getattr(function, "__name__", type(loss).__name__)
        # A loss of torch, or a subclass, takes one tensor and the target.
        of_torch = getattr(function, "__module__", "") == "torch.nn.functional"
        self._takes_tensor = of_torch or isinstance(loss, nn.modules.loss._Loss)
        self._target_parameter = self._find_target_parameter() if loss is not None and self.output_mapping else ""
        self.on_count: Callable[[Tensor], None] | None = None
        # By whether they are for training, and the form of their batches.
        self._calls: dict[bool, dict[Any, Call]] = {True: {}, False: {}}
        self._logged: set[str] = set()
        self._layers_logged = False

    def __getstate__(self) -> dict[str, object]:
        # Calls hold the model; a copy of the adapter is used with a copy of the model.
        return {**self.__dict__, "_calls": {True: {}, False: {}}}

    def _find_target_parameter(self) -> str:
        """Return the loss's parameter for the target, which is the first that no output is mapped to."""
        taken = parameters_of(getattr(self.loss, "forward", self.loss)) or Parameters()
        check_names("MODEL.OUTPUT_MAPPING", self._loss_name, taken, self.output_mapping.values())
        free = [name for name in taken.keywords if name not in self.output_mapping.values()]
        if not free:
            raise ConfigError(f"MODEL.OUTPUT_MAPPING leaves no parameter of {self._loss_name} for the target")
        return free[0]

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
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
        call = self.call_for(model, batch, training=True)
        counting = Terms() if self.on_count is not None else nullcontext()
        if call.target is None:
            with counting:
                return self._own_losses(call, batch)
        target = batch[-1] if call.target == -1 else part_of(batch, call.target)
        if self.on_count is not None and (count := terms_ahead(self.loss, target)) is not None:
            self.on_count(local_part(count))
        output = self._run(call, batch)
        if type(output) is Tensor and self.loss is not None and not self.output_mapping and self.on_count is None:
            loss = self.loss(output, target)  # the usual case, in few calls
            return {"loss": loss} if type(loss) is Tensor and not loss.dim() else terms_of(loss)
        with counting:
            return terms_of(self._apply_loss(self.predictions(output), target))

    def _own_losses(self, call: Call, batch: object) -> dict[str, Tensor]:
        """Return the losses that the model computes itself."""
        output = self._run(call, batch)
        if output is None and call.step is not None:
            return {}
        losses = losses_of(output)
        if len(losses) > 1 and ("loss" in losses or "total_loss" in losses):
            # A warning only: code written for detectron2 may mean the sum.
            self._log_once(logging.WARNING, counted_twice(losses))
        if getattr(unwrap_model(call.model), "_compiled_call_impl", None) is not None:
            # A CUDA graph of torch.compile overwrites its outputs in the next step, and losses are read later.
            losses = {name: one.clone() if isinstance(one, Tensor) else one for name, one in losses.items()}
        return losses

    def _apply_loss(self, predictions: Any, target: object) -> Any:
        """Call ``loss`` with what :meth:`predictions` returned."""
        assert self.loss is not None
        if self.output_mapping:
            names = list(self.output_mapping.values())
            named = predictions if len(names) > 1 else {names[0]: predictions}
            return self.loss(**named, **{self._target_parameter: target})
        return self.loss(predictions, target)

    def predict(self, model: nn.Module, batch: object) -> Any:
        """Return the model's predictions for a batch, which may lack the target.

        Returns:
            The input of the loss, such as scores (N, C); without a loss, the model's output. With one entry in
            ``output_mapping`` that output; with several a dict of outputs under their new names.

        Raises:
            TypeError: the batch does not fit.
        """
        return self._predict(model, batch)[0]

    def predict_with_losses(self, model: nn.Module, batch: object) -> tuple[Any, dict[str, Tensor]]:
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

    def generate(self, model: nn.Module, batch: object, settings: Mapping[str, Any]) -> Any:
        """Return ``model.generate(inputs, **settings)`` for a batch, which may have a target.

        Args:
            model: has a method ``generate``, as models of transformers.
            batch: its inputs are passed as to ``forward``, and its target is left out.
            settings: further arguments by name, such as ``max_new_tokens``.

        Raises:
            MismatchError: the model has no such method, or its parameters are sharded: ranks that generate different
                numbers of tokens would wait for each other.
        """
        module, call = unwrap_model(model), self.call_for(model, batch, training=False)
        if not callable(getattr(module, "generate", None)) or has_shards(module):
            problem = "parameters are sharded" if has_shards(module) else "class has no method generate()"
            raise MismatchError(f"a metric asks for generated outputs, and the model's {problem}")
        args, named = call.arguments(batch)
        entries = call.names or {}
        chosen = {name: value for name, value in named.items() if entries[name] not in self.inputs.target_names}
        try:
            return module.generate(*args, **chosen, **settings)
        except (TypeError, ValueError) as error:
            raise MismatchError(f"TEST.GENERATE: {type(module).__name__}.generate() with it fails: {error}") from error

    def losses_of_predictions(self, model: nn.Module, batch: object, predictions: object) -> dict[str, Tensor]:
        """Return the losses of a batch from what :meth:`predict` returned for it.

        They are scalar tensors (). Without ``loss`` they are those beside the predictions, or those of a second call;
        see :meth:`predict_with_losses`.

        Raises:
            TypeError: the batch has no target, or the model returns no losses.
        """
        if self.loss is not None:
            return terms_of(self._apply_loss(predictions, self.targets(batch)))
        try:
            return losses_of(predictions)
        except MismatchError:
            return self.predict_with_losses(model, batch)[1]

    def targets(self, batch: object) -> Any:
        """Return the targets of a batch, such as class indices (N,): its last entry, or the target of a dict.

        Raises:
            TypeError: the batch has no target.
        """
        return part_of(batch, self.inputs.target_entry(batch))

    def predictions(self, output: object) -> Any:
        """Return the predictions in what ``forward`` returned, such as scores (N, C): what metrics receive."""
        if self.output_mapping:
            mapped = self._renamed(output)
            return mapped if len(mapped) > 1 else next(iter(mapped.values()))
        if self._takes_tensor:
            return self._only_output(output)
        return without_scalars(output) if self.loss is None else output

    # ------------------------------------------------------------------ the call

    def _predict(self, model: nn.Module, batch: object) -> tuple[Any, Any]:
        """Return the predictions for a batch, and the model's output."""
        call = self.call_for(model, batch, training=False)
        try:
            output = self._run(call, batch)
        except Exception as error:
            raise_clearer(error, batch)
            raise
        if call.step is not None or (type(output) is Tensor and not self.output_mapping):
            return output, output
        return self.predictions(output if self.output_mapping else without_cache(output, unwrap_model(model))), output

    def _run(self, call: Call, batch: Any) -> Any:
        try:
            if call.step is not None:
                return call.step(batch)
            if call.names is None and not call.unpacked:
                output = call.model(batch if call.part is None else batch[call.part])
            else:
                args, named = call.arguments(batch)
                output = call.model(*args, **named)
        except (AttributeError, TypeError) as error:
            if self.loss is None and isinstance(batch, tuple | list):
                error.add_note(
                    "MODEL.LOSS is not set, so the model receives the whole batch and returns its losses. To train on "
                    "loss(model(x), y), set MODEL.LOSS (Trainer: loss=...)"
                )
            elif call.unpacked:
                error.add_note('each input is an argument; to pass them as one, set MODEL.INPUTS to "batch"')
            raise
        if output is None:
            raise MismatchError("the model returned None: its forward() has no return statement, or an empty one")
        return output

    def call_for(self, model: nn.Module, batch: object, training: bool) -> Call:
        """Return how the model is called with batches of this form. It is decided once, from the first of them.

        Raises:
            MismatchError: the batch does not fit the model.
        """
        form: Any = type(batch), None
        if isinstance(batch, tuple | list):
            first: Any = batch[0] if batch else None
            named = type(first) is not Tensor and isinstance(first, Mapping)
            form = type(batch), len(batch), tuple(first) if named else None
        elif isinstance(batch, Mapping):
            form = type(batch), tuple(batch)
        calls = self._calls[training]
        call = calls.get(form)
        if call is None or call.model is not model:
            call = calls[form] = self.inputs.call(model, batch, training, self.loss is not None)
            used = str(call) if call.step is None else f"model.{'train_step' if training else 'predict_step'}(batch)"
            use, level = ("training", logging.INFO) if training else ("evaluation or prediction", logging.DEBUG)
            self._log_once(level, f"A batch of {use} is used as {used}")
            if training and call.step is not None and isinstance(model, nn.DataParallel):
                text = "its model has train_step(), which is called on one device; use DDP (torchrun) for several GPUs"
                self._log_once(logging.WARNING, f"DataParallel is not used: {text}")
            if training and not self._layers_logged and torch.is_grad_enabled():
                self._layers_logged, step = True, call.step and logs_shapes(model, call.step)
                return replace(call, model=logs_shapes(model, call.model), step=step)
        return call

    def _log_once(self, level: int, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.log(level, "%s", text)

    # ------------------------------------------------------------------ outputs

    def _renamed(self, output: object) -> dict[str, Any]:
        """Return the outputs that ``output_mapping`` names, by their new names."""
        entries = entries_of(output)
        if entries is None:
            raise MismatchError(f"MODEL.OUTPUT_MAPPING needs outputs with names; the model returned {describe(output)}")
        for name in self.output_mapping:
            if name not in entries:
                hint = suggest(name, map(str, entries)) or "."
                returned = f"It returned: {listed(entries)}"
                raise MismatchError(f"MODEL.OUTPUT_MAPPING: the model returned no '{name}'{hint} {returned}")
        return {new: entries[name] for name, new in self.output_mapping.items()}

    def _only_output(self, output: object) -> Any:
        """Return the output for a loss that takes one tensor."""
        entries = None if isinstance(output, Tensor) else entries_of(output)
        if entries is None:
            return without_scalars(output)
        if len(entries) == 1:
            return next(iter(entries.values()))
        if "logits" in entries:
            return entries["logits"]
        raise MismatchError(
            f"{self._loss_name} takes one tensor, the model returned: {listed(entries)}. Select one with "
            f"MODEL.OUTPUT_MAPPING, such as {{{next(iter(entries), 'name')}: input}}"
        )
