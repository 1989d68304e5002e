"""The adapter that calls a model with a batch and reads losses or predictions from its output."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, dtype, nn

from ...config import ConfigError
from ...config.errors import MismatchError, suggest
from ...config.signatures import Taken, what_it_takes
from ...hooks.common.models import unwrap_model
from ...hooks.common.tensors import fields_of, is_sharded, local_part
from .call_plan import CallPlan, all_but_last, check_step_name, compose, first, keys, keys_of_first, through_forward
from .explain import check_forward, check_output, check_own_step, raise_clearer
from .inputs import INPUT_FORMS, caller, describe, forward_of, required_positions
from .outputs import entries_of, losses_of, terms_of, without_scalar
from .precision import eval_autocast, in_precision
from .targets import TARGET_NAMES, is_torch_loss, name_of, target_name, target_of, target_parameter

__all__ = ["ModelAdapter"]

# Number of cached plans.
_MAX_PLANS = 64
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class ModelAdapter:
    """Calls a model with a batch, and reads losses or predictions from its output.

    The adapter reads the signature of the model's ``forward`` when it first sees a form of batch, not in every step.
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
        eval_precision: dtype | None = None,
    ) -> None:
        if inputs not in INPUT_FORMS:
            raise ConfigError(f"MODEL.INPUTS: {inputs!r} is not one of {', '.join(map(repr, INPUT_FORMS))}")
        self.loss = loss
        self.input_mapping = dict(input_mapping or {})
        self.output_mapping = dict(output_mapping or {})
        self.target = target or None
        if self.input_mapping and inputs in ("batch", "tuple"):
            raise ConfigError(f'MODEL.INPUT_MAPPING names keyword arguments; MODEL.INPUTS "{inputs}" has none')
        self.inputs = "kwargs" if self.input_mapping else inputs
        self._steps = {True: train_step, False: predict_step}
        self._eval_precision = eval_precision
        self._maps_loss = loss is None and "loss" in self.output_mapping.values()
        self._takes_tensor = is_torch_loss(loss)
        self._target_parameter = target_parameter(loss, self.output_mapping)
        self._training: CallPlan | None = None
        self._predicting: CallPlan | None = None
        self._plans: dict[Any, CallPlan] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Plans hold the model; a copy of the adapter is used with a copy of the model.
        return {**self.__dict__, "_training": None, "_predicting": None, "_plans": {}}

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
        plan = self._training
        if (
            plan is None
            or plan.model is not model
            or plan.kind is not type(batch)
            or (plan.measure is not None and plan.measure(batch) != plan.form)
        ):
            plan = self._training = self._plan(model, batch, training=True)
        if plan.pair:  # fast path
            output, target = model(batch[0]), batch[1]
        else:
            try:
                output = plan.run(batch)
            except (AttributeError, TypeError) as error:
                self._note_missing_loss(error, batch)
                raise
            if plan.target is None:
                return self._own_losses(output) if self._maps_loss else losses_of(output)
            target = plan.target(batch)
        if self.output_mapping or (type(output) is not Tensor and (self._takes_tensor or is_sharded(output))):
            return self._compute_losses(output, target)
        loss = self.loss(output, target)  # type: ignore[misc]
        return terms_of(loss)

    def prepare(self, model: nn.Module, batch: Any) -> None:
        """Decide how to call the model with batches like this one, before a step that is compiled or captured.

        Args:
            model: as for :meth:`losses`.
            batch: as for :meth:`losses`.

        Raises:
            TypeError: the batch does not fit.
        """
        self._training = self._plan(model, batch, training=True)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's predictions for a batch, which may lack the target.

        Returns:
            The input of the loss; without a loss, the model's output. With one entry in ``output_mapping`` that
            output; with several a dict of outputs under their new names.

        Raises:
            TypeError: the batch does not fit.
        """
        plan, output = self._run(model, batch)
        return self._predictions(plan, output)

    def predict_with_losses(self, model: nn.Module, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the model's predictions for a batch, and the losses that it computes itself.

        The losses are those beside the predictions. If there are none, the model is called a second time with
        ``model.training`` set, while its submodules (dropout, batch norm) stay in eval mode.

        Raises:
            TypeError: the batch does not fit, or the model returns no losses in either mode.
        """
        plan, output = self._run(model, batch)
        predictions, module = self._predictions(plan, output), unwrap_model(model)
        try:
            return predictions, self._own_losses(output)
        except TypeError:
            before, module.training = module.training, True
        try:
            with eval_autocast(model, self._eval_precision):
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
        named = predictions if len(self.output_mapping) > 1 else {}
        if len(self.output_mapping) == 1:
            named = {next(iter(self.output_mapping.values())): predictions}
        target = self.targets(batch)
        loss = self.loss(**named, **{self._target_parameter: target}) if named else self.loss(predictions, target)
        return terms_of(loss)

    def _run(self, model: nn.Module, batch: Any) -> tuple[CallPlan, Any]:
        plan = self._predicting
        if plan is None or not plan.fits(model, batch):
            plan = self._predicting = self._plan(model, batch, training=False)
        try:
            return plan, plan.run(batch)
        except Exception as error:
            self._note_missing_loss(error, batch)
            raise_clearer(error, batch)
            raise

    def _note_missing_loss(self, error: Exception, batch: Any) -> None:
        if self.loss is None and isinstance(batch, tuple | list) and isinstance(error, AttributeError | TypeError):
            error.add_note(
                "MODEL.LOSS is not set, so the model receives the whole batch and returns its losses. To train on "
                "loss(model(x), y), set MODEL.LOSS (Trainer: loss=...)"
            )

    def _predictions(self, plan: CallPlan, output: Any) -> Any:
        check_output(output)
        return output if plan.own_step else self.predictions(output)

    def predictions(self, output: Any, training: bool = False) -> Any:
        """Return the predictions in a model's output: what metrics receive.

        Args:
            output: what ``forward`` returned.
            training: whether it returned it in a training step.
        """
        if self.output_mapping:
            mapped = self._rename_outputs(output)
            return mapped if len(mapped) > 1 else next(iter(mapped.values()), output)
        if self._takes_tensor:
            return self._select_output(output)
        return without_scalar(output) if self.loss is None else output

    def targets(self, batch: Any, training: bool = False) -> Any:
        """Return the targets of a batch: its last entry, or the target of a dict.

        Args:
            batch: the batch.
            training: whether it is one of a training step.

        Raises:
            TypeError: the batch has no target.
        """
        return target_of(batch, self.target)(batch)

    # ------------------------------------------------------------------ inputs

    def _plan(self, model: Any, batch: Any, training: bool) -> CallPlan:
        measure: Callable[[Any], Any] | None = None
        if isinstance(batch, Mapping):
            measure = keys
        elif isinstance(batch, tuple | list):
            measure = len
        form = frozenset(batch) if measure is keys else measure(batch) if measure is not None else None
        key = (id(model), training, type(batch), form)
        plan = self._plans.get(key)
        if plan is None or not plan.fits(model, batch):
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(model, batch, training, measure, form)
            if not training and self._eval_precision is not None:
                plan.run = in_precision(plan.run, model, self._eval_precision)
        return plan

    def _new_plan(
        self, model: Any, batch: Any, training: bool, measure: Callable[[Any], Any] | None, form: Any
    ) -> CallPlan:
        if fields_of(batch) is not None:
            return self._new_plan_for_fields(model, batch, training)
        module, name = unwrap_model(model), self._steps[training]
        step = getattr(module, name, None)
        if step is None:
            check_step_name(module, "MODEL.TRAIN_STEP" if training else "MODEL.PREDICT_STEP", name)
        if callable(step):
            check_own_step(step, "MODEL.TRAIN_STEP" if training else "MODEL.PREDICT_STEP")
            if training and isinstance(getattr(model, "_orig_mod", model), _PARALLEL):
                if not isinstance(model, nn.parallel.DistributedDataParallel):
                    raise MismatchError(
                        f"{type(module).__name__}.{name} would bypass {type(model).__name__}, and ranks would not "
                        "exchange gradients; have the model's forward return its losses instead"
                    )
                step = through_forward(model, module, step)
            return CallPlan(model, type(batch), None, None, step, own_step=True)
        check_forward(module)
        taken = what_it_takes(forward_of(module))
        # A model with train_step(batch) splits the batch there; its forward takes the inputs without the target.
        separate = self.loss is not None or (not training and callable(getattr(module, self._steps[True], None)))
        take: Callable[[Any], Any] | None = None
        target: str | None = None
        inputs, several = batch, not separate and (self.inputs == "tuple" or self._takes_target(batch, taken))
        if separate and isinstance(batch, Mapping):
            target = target_name(batch, self.target, required=training)
        elif separate and isinstance(batch, tuple | list):
            if not training and self._lacks_target(batch, taken):
                take = first if len(batch) == 1 else None
            else:
                target_of(batch, self.target)
                take = first if len(batch) == 2 else all_but_last
            inputs = take(batch) if take else batch
            several = inputs is batch or len(batch) > 2
        elif separate and training:
            target_of(batch, self.target)  # raises
        if several and not isinstance(inputs, tuple | list | Mapping):
            raise MismatchError(f'MODEL.INPUTS is "tuple", but the batch is {describe(batch)}')
        call = caller(
            model,
            taken,
            inputs,
            self.inputs,
            self.input_mapping,
            target=target,
            exact=training,
            several=several,
            guess_dict=self.loss is None or target is None,
        )
        if isinstance(inputs, Mapping) and inputs is not batch:
            measure, form = keys_of_first, (len(batch), frozenset(inputs))
        if call is model and take is None and not separate and measure is len:
            measure = form = None  # the batch is passed unchanged, at any length
        read_target = target_of(batch, self.target) if training and self.loss is not None else None
        pair = call is model and take is first and read_target is not None
        run = call if take is None else compose(call, take)
        return CallPlan(model, type(batch), measure, form, run, read_target, pair=pair)

    def _new_plan_for_fields(self, model: Any, batch: Any, training: bool) -> CallPlan:
        """Return the plan for a dataclass: that for a dict, unless the model receives the batch itself."""
        plan = ModelAdapter._new_plan(self, model, fields_of(batch), training, None, None)
        whole = plan.own_step or plan.run is model
        run = plan.run if whole else compose(plan.run, fields_of)
        target = None if plan.target is None else compose(plan.target, fields_of)
        return CallPlan(model, type(batch), None, None, run, target, own_step=plan.own_step)

    def _lacks_target(self, batch: Sequence[Any], taken: Taken | None) -> bool:
        """Return whether the model needs every entry of a tuple or list, so that none is left for a target."""
        if len(batch) == 1:
            return True
        if taken is None or self.inputs not in ("auto", "tuple") or isinstance(batch[0], tuple | list | Mapping):
            return False
        return len(batch) == len(required_positions(taken))

    def _takes_target(self, batch: Any, taken: Taken | None) -> bool:
        """Return whether ``forward`` takes the entries of a batch one by one, the target among them."""
        if taken is None or self.inputs != "auto" or not isinstance(batch, tuple | list):
            return False
        if not 0 < len(batch) <= len(taken.positions) or isinstance(batch[0], Mapping):
            return False
        return any(name in (self.target, *TARGET_NAMES) for name in taken.positions[1:])

    # ------------------------------------------------------------------ outputs

    def _own_losses(self, output: Any) -> dict[str, Any]:
        if not self._maps_loss:
            return losses_of(output)
        return losses_of({"loss": self._rename_outputs(output, only="loss")["loss"]})

    def _compute_losses(self, output: Any, target: Any) -> dict[str, Any]:
        assert self.loss is not None
        if self.output_mapping:
            loss = self.loss(**self._rename_outputs(output), **{self._target_parameter: target})
        else:
            selected = self._select_output(output)
            if self._takes_tensor and not isinstance(selected, Tensor):
                raise MismatchError(f"{name_of(self.loss)} takes one tensor, the model returned {describe(output)}")
            loss = self.loss(selected, target)
        # The loss of scores that are split over ranks is a whole number on each of them.
        return {name: local_part(term) for name, term in terms_of(loss).items()}

    def _rename_outputs(self, output: Any, only: str = "") -> dict[str, Any]:
        entries = entries_of(output)
        if entries is None:
            raise MismatchError(f"MODEL.OUTPUT_MAPPING needs outputs with names; the model returned {describe(output)}")
        mapping = {old: new for old, new in self.output_mapping.items() if not only or new == only}
        if self._maps_loss and not only:
            mapping = {old: new for old, new in mapping.items() if new != "loss"}
        for name in mapping:
            if name not in entries:
                hint = suggest(name, map(str, entries))
                raise MismatchError(
                    f"MODEL.OUTPUT_MAPPING: the model returned no '{name}'{hint or '.'} "
                    f"It returned: {', '.join(map(str, entries)) or 'nothing'}"
                )
        return {new: entries[name] for name, new in mapping.items()}

    def _select_output(self, output: Any) -> Any:
        """Return the output for a loss that takes one tensor."""
        check_output(output)
        entries = None if isinstance(output, Tensor) else entries_of(output)
        if entries is None:
            return without_scalar(output)
        if len(entries) == 1:
            return next(iter(entries.values()))
        if "logits" in entries:
            return entries["logits"]
        raise MismatchError(
            f"{name_of(self.loss)} takes one tensor, the model returned: {', '.join(map(str, entries)) or 'nothing'}. "
            f"Select one with MODEL.OUTPUT_MAPPING, such as {{{next(iter(entries), 'name')}: input}}"
        )
