"""What a model is given of a batch, and what its answer means: losses while training, predictions otherwise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from ...config import ConfigError
from ...config.errors import suggest
from ...config.signatures import Taken, what_it_takes
from ..checkpoint import unwrap_model
from .inputs import INPUT_FORMS, caller, describe, forward_of, required_positions

__all__ = ["ModelAdapter"]

# Where the target of a dict batch is looked for.
_TARGET_NAMES = ("label", "labels", "y", "target", "targets")
# Ways to call models that are remembered.
_MAX_PLANS = 64


# Plain functions, not those of the operator module, so that steps can be traced.
def _keys(batch: Any) -> Any:
    return batch.keys()


def _entry(key: Any) -> Callable[[Any], Any]:
    return lambda batch: batch[key]


_first, _all_but_last = _entry(0), _entry(slice(0, -1))


@dataclass(slots=True)
class _Plan:
    """How a model is run on batches of one form.

    Attributes:
        model: it.
        kind: the batches' type.
        measure: tells batches of one type apart, where they may have to be treated differently; compared with ``form``.
        form: the measure of these batches.
        run: from a batch to the output.
        target: from a batch to what the loss compares the output with; None if there is no loss.
        own_step: whether the model has a method for this, and ``run`` is it.
        pair: whether ``run`` gives the model ``x`` of ``(x, y)`` as it is, and ``target`` is ``y``.
    """

    model: Any
    kind: type
    measure: Callable[[Any], Any] | None
    form: Any
    run: Callable[[Any], Any]
    target: Callable[[Any], Any] | None = None
    own_step: bool = False
    pair: bool = False

    def fits(self, model: Any, batch: Any) -> bool:
        """Whether the batch, for this model, is of this form."""
        return (
            self.model is model
            and self.kind is type(batch)
            and (self.measure is None or self.measure(batch) == self.form)
        )


class ModelAdapter:
    """Stands between the trainer and a model, so that the model keeps its own signature.

    It is not a module: the names in the model's state dict stay the user's. How a model is called is decided from its
    ``forward``'s signature when a form of batch is first seen, not in every step. A model with a method
    ``train_step(batch)`` (or, for predictions, ``predict_step(batch)``) is asked through that, with the batch as it is.

    Args:
        loss: called with the model's output and the batch's target; returns a scalar tensor, or that and the number
            of items it is the mean of. Batches are ``(x, y)``, several inputs and a target ``(x1, x2, y)``, or dicts
            with an entry for the target. None: the model is given all of the batch; while training it returns its
            losses, in eval mode its predictions.
        inputs: what the model is given of the inputs. "batch": all in one argument. "tuple": one argument each.
            "kwargs": from a dict, those entries that ``forward`` takes, by their names. "auto": of a dict, entries by
            name if ``forward``'s parameters are named as entries are; of a tuple, one argument each if ``forward``
            requires several; otherwise one argument.
        input_mapping: names of entries to names of ``forward``'s parameters, for those that differ; implies "kwargs".
        output_mapping: names of the model's outputs to names of the loss's parameters. Without it, one of torch's
            losses is given the only output or the one named "logits", any other loss all that the model returned.
        target: name of the target in dict batches; by default "label", "labels", "y", "target" or "targets", whichever
            there is.

    Raises:
        ConfigError: the arguments contradict each other, or the loss takes no parameter of a name.
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
        self.input_mapping = dict(input_mapping or {})
        self.output_mapping = dict(output_mapping or {})
        self.target = target or None
        if self.input_mapping and inputs in ("batch", "tuple"):
            raise ConfigError(f'MODEL.INPUT_MAPPING names keyword arguments; MODEL.INPUTS "{inputs}" has none')
        self.inputs = "kwargs" if self.input_mapping else inputs
        self._takes_one = _is_torchs(loss)
        self._target_parameter = _target_parameter(loss, self.output_mapping)
        self._training: _Plan | None = None
        self._predicting: _Plan | None = None
        self._plans: dict[Any, _Plan] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy is for a copy of the model.
        return {**self.__dict__, "_training": None, "_predicting": None, "_plans": {}}

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Run the model on a batch and name what is to be minimised.

        Args:
            model: in training mode.
            batch: of a form that fits the model, and the loss if there is one.

        Returns:
            Scalar tensors by name; training minimises their sum. Where the model or the loss says how many items
            (tokens, say) its mean is over, that number, an int or a scalar tensor, is the entry "num_items".

        Raises:
            TypeError: the batch does not fit, or what came back is not a loss.
        """
        plan = self._training
        if (
            plan is None
            or plan.model is not model
            or plan.kind is not type(batch)
            or (plan.measure is not None and plan.measure(batch) != plan.form)
        ):
            plan = self._training = self._plan(model, batch, training=True)
        if plan.pair:  # the usual form, without further calls
            output, target = model(batch[0]), batch[1]
        else:
            output = plan.run(batch)
            if plan.target is None:
                return _named_losses(output)
            target = plan.target(batch)
        if self.output_mapping or (self._takes_one and type(output) is not Tensor):
            loss = self._loss_of(output, target)
        else:
            loss = self.loss(output, target)  # type: ignore[misc]
        if isinstance(loss, Tensor) and not loss.dim():
            return {"loss": loss}
        if isinstance(loss, tuple) and len(loss) == 2 and _is_scalar(loss[0]):
            return _counted({"loss": loss[0]}, loss[1])
        raise TypeError(
            "MODEL.LOSS must return a scalar tensor, or that and the number of items it is the mean of, not "
            f"{describe(loss)}; use reduction='mean'"
        )

    def prepare(self, model: nn.Module, batch: Any) -> None:
        """Find out how the model is run on batches like this one, for a step that cannot stop to do so.

        Args:
            model: as for :meth:`losses`.
            batch: likewise.

        Raises:
            TypeError: the batch does not fit.
        """
        self._training = self._plan(model, batch, training=True)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """The model's outputs for a batch, which may lack the target.

        Returns:
            What the loss is given; without a loss, what the model returns. With ``output_mapping`` the output it
            names, or, if there are several, a dict of them under their new names.

        Raises:
            TypeError: the batch does not fit.
        """
        plan = self._predicting
        if plan is None or not plan.fits(model, batch):
            plan = self._predicting = self._plan(model, batch, training=False)
        output = plan.run(batch)
        if plan.own_step:
            return output
        if self.output_mapping:
            mapped = self._mapped(output)
            return mapped if len(mapped) > 1 else next(iter(mapped.values()))
        return self._one_of(output) if self._takes_one else output

    def targets(self, batch: Any) -> Any:
        """What the predictions of a batch are compared with: its last entry, or of a dict the target's.

        Raises:
            TypeError: the batch has no target.
        """
        return self._target_of(batch)(batch)

    # ------------------------------------------------------------------ what goes in

    def _plan(self, model: Any, batch: Any, training: bool) -> _Plan:
        measure: Callable[[Any], Any] | None = None
        if isinstance(batch, Mapping):
            measure = _keys
        elif isinstance(batch, tuple | list):
            measure = len
        form = frozenset(batch) if measure is _keys else measure(batch) if measure is not None else None
        key = (id(model), training, type(batch), form)
        plan = self._plans.get(key)
        if plan is None or not plan.fits(model, batch):
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(model, batch, training, measure, form)
        return plan

    def _new_plan(
        self, model: Any, batch: Any, training: bool, measure: Callable[[Any], Any] | None, form: Any
    ) -> _Plan:
        module = unwrap_model(model)
        step = getattr(module, "train_step" if training else "predict_step", None)
        if callable(step):
            if training and isinstance(getattr(model, "_orig_mod", model), _PARALLEL):
                raise TypeError(
                    f"{type(module).__name__}.train_step would bypass {type(model).__name__}, and ranks would not "
                    "exchange gradients; have the model's forward return its losses instead"
                )
            return _Plan(model, type(batch), None, None, step, own_step=True)
        taken = what_it_takes(forward_of(module))
        # A model with train_step(batch) keeps the batch's parts apart there; its forward is for the inputs.
        apart = self.loss is not None or (not training and callable(getattr(module, "train_step", None)))
        take: Callable[[Any], Any] | None = None
        target: str | None = None
        inputs, several = batch, self.inputs == "tuple" and not apart
        if apart and isinstance(batch, Mapping):
            target = self._target_name(batch, required=training)
        elif apart and isinstance(batch, tuple | list):
            if not training and self._lacks_target(batch, taken):
                take = _first if len(batch) == 1 else None
            else:
                self._target_of(batch)
                take = _first if len(batch) == 2 else _all_but_last
            inputs = take(batch) if take else batch
            several = inputs is batch or len(batch) > 2
        elif apart and training:
            self._target_of(batch)  # raises
        if several and not isinstance(inputs, tuple | list | Mapping):
            raise TypeError(f'MODEL.INPUTS is "tuple", but the batch is {describe(batch)}')
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
            measure, form = _keys_of_first, (len(batch), frozenset(inputs))
        if call is model and take is None and not apart and measure is len:
            measure = form = None  # given as it is, whatever its length
        read_target = self._target_of(batch) if training and self.loss is not None else None
        pair = call is model and take is _first and read_target is not None
        run = call if take is None else _chained(call, take)
        return _Plan(model, type(batch), measure, form, run, read_target, pair=pair)

    def _lacks_target(self, batch: Sequence[Any], taken: Taken | None) -> bool:
        """Whether a tuple, or list, has as many entries as the model needs: none is left for a target."""
        if len(batch) == 1:
            return True
        if taken is None or self.inputs not in ("auto", "tuple") or isinstance(batch[0], tuple | list | Mapping):
            return False
        return len(batch) == len(required_positions(taken))

    def _target_name(self, batch: Mapping[Any, Any], required: bool = True) -> str | None:
        names = [self.target] if self.target else _TARGET_NAMES
        found = [name for name in names if name in batch]
        if len(found) == 1:
            return found[0]
        there = ", ".join(map(str, batch)) or "nothing"
        if found:
            raise TypeError(f"the batch's target may be {' or '.join(found)}: set MODEL.TARGET. The batch has: {there}")
        if not required:
            return None
        if self.target:
            hint = suggest(self.target, map(str, batch))
            raise TypeError(f"MODEL.TARGET: the batch has no '{self.target}'{hint or '.'} The batch has: {there}")
        raise TypeError(
            f"the batch has no target: none of its entries is named {', '.join(names)}. The batch has: {there}. "
            "MODEL.LOSS and targets need one: set MODEL.TARGET"
        )

    def _target_of(self, batch: Any) -> Callable[[Any], Any]:
        """How targets are read from batches like this one."""
        if isinstance(batch, Mapping):
            return _entry(self._target_name(batch))
        if isinstance(batch, tuple | list) and len(batch) >= 2:
            return _entry(-1)
        raise TypeError(
            f"expected a batch (x, y) or a dict, got {describe(batch)}. MODEL.LOSS and targets need such batches; "
            'for others set MODEL.LOSS.NAME to "" and let the model return its losses'
        )

    # ------------------------------------------------------------------ what comes out

    def _loss_of(self, output: Any, target: Any) -> Any:
        assert self.loss is not None
        if self.output_mapping:
            return self.loss(**self._mapped(output), **{self._target_parameter: target})
        return self.loss(self._one_of(output), target)

    def _mapped(self, output: Any) -> dict[str, Any]:
        entries = _entries(output)
        if entries is None:
            raise TypeError(f"MODEL.OUTPUT_MAPPING needs outputs with names; the model returned {describe(output)}")
        for name in self.output_mapping:
            if name not in entries:
                hint = suggest(name, map(str, entries))
                raise TypeError(
                    f"MODEL.OUTPUT_MAPPING: the model returned no '{name}'{hint or '.'} "
                    f"It returned: {', '.join(map(str, entries)) or 'nothing'}"
                )
        return {new: entries[name] for name, new in self.output_mapping.items()}

    def _one_of(self, output: Any) -> Any:
        """The output for a loss that takes one tensor."""
        entries = None if isinstance(output, Tensor) else _entries(output)
        if entries is None:
            return output
        if len(entries) == 1:
            return next(iter(entries.values()))
        if "logits" in entries:
            return entries["logits"]
        raise TypeError(
            f"{_name_of(self.loss)} takes one tensor, the model returned: {', '.join(map(str, entries)) or 'nothing'}. "
            f"Say which one with MODEL.OUTPUT_MAPPING, such as {{{next(iter(entries), 'name')}: input}}"
        )


_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def _chained(call: Callable[[Any], Any], take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda batch: call(take(batch))


def _keys_of_first(batch: Any) -> tuple[int, Any]:
    return len(batch), batch[0].keys()


def _is_torchs(loss: Any) -> bool:
    """Whether it is one of torch's losses, which take one tensor and the target, or a subclass."""
    return isinstance(loss, nn.modules.loss._Loss) or getattr(loss, "__module__", "") == "torch.nn.functional"


def _name_of(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _target_parameter(loss: Any, output_mapping: Mapping[str, str]) -> str:
    """The loss's parameter for the target: the first that no output is mapped to."""
    if loss is None or not output_mapping:
        return ""
    taken = what_it_takes(forward_of(loss))
    if taken is None:
        raise ConfigError(f"MODEL.OUTPUT_MAPPING: {_name_of(loss)} does not tell the names of its parameters")
    for name in output_mapping.values():
        if name not in taken.keywords and not taken.any_keyword:
            hint = suggest(name, taken.keywords)
            raise ConfigError(
                f"MODEL.OUTPUT_MAPPING: {_name_of(loss)} takes no '{name}'{hint or '.'} "
                f"It takes: {', '.join(taken.keywords)}"
            )
    for name in taken.keywords:
        if name not in output_mapping.values():
            return name
    raise ConfigError(f"MODEL.OUTPUT_MAPPING leaves no parameter of {_name_of(loss)} for the target")


def _entries(output: Any) -> Mapping[Any, Any] | None:
    """An output's parts by name; None if they have no names."""
    if isinstance(output, Mapping):
        return output
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        return output._asdict()
    return None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim()


def _named_losses(output: Any) -> dict[str, Any]:
    if isinstance(output, Tensor):
        if not output.dim():
            return {"total_loss": output}
    elif type(output) is dict:
        count = output.get("num_items")
        for name, value in output.items():
            if (not isinstance(value, Tensor) or value.dim()) and name != "num_items":
                break
        else:
            if count is not None and len(output) > 1:
                return _counted(output, count)
            if count is None and output:
                return output
    return _losses_in(output)


def _losses_in(output: Any) -> dict[str, Any]:
    """Losses among other things: in an object with ``.loss``, or a dict."""
    count = None
    losses: dict[str, Any] = {}
    if _is_scalar(loss := getattr(output, "loss", None)):  # before dict: ModelOutput is one too
        losses, count = {"loss": loss}, getattr(output, "num_items", None)
    elif isinstance(output, Mapping):
        losses = {name: value for name, value in output.items() if name != "num_items"}
        count = output.get("num_items")
        if not all(map(_is_scalar, losses.values())):
            # Predictions beside their loss: {"loss": ..., "logits": ...}.
            losses = {"loss": output["loss"]} if _is_scalar(output.get("loss")) else {}
    if losses:
        return losses if count is None else _counted(losses, count)
    raise TypeError(
        "without MODEL.LOSS the model must return its losses while training: a dict of scalar tensors, one scalar "
        "tensor, or an object whose .loss is one, or a dict with one named 'loss' beside other things. It returned "
        f"{describe(output)}. If these are predictions, set MODEL.LOSS.NAME"
    )


def _counted(losses: dict[str, Any], count: Any) -> dict[str, Any]:
    if not (isinstance(count, int) or _is_scalar(count)):
        raise TypeError(f"num_items must be an int or a scalar tensor, not {describe(count)}")
    return {**losses, "num_items": count}
