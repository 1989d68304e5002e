"""How a model is called with batches of one form."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...config.errors import ConfigError, suggest

__all__ = [
    "CallPlan",
    "all_but_last",
    "check_step_name",
    "compose",
    "entry",
    "first",
    "keys",
    "keys_of_first",
    "through_forward",
]


@dataclass(slots=True)
class CallPlan:
    """How a model is called with batches of one form.

    Attributes:
        model: the model.
        kind: the type of the batches.
        measure: a function that distinguishes batches of one type, if they must be called differently.
        form: the result of ``measure`` for these batches.
        run: from a batch to the output.
        target: from a batch to the target of the loss; None without a loss.
        own_step: ``run`` is the model's ``train_step`` or ``predict_step``.
        pair: batches are ``(x, y)``: ``run`` is ``model(x)`` and ``target`` returns ``y``.
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
        """Return whether the plan is for this model and this form of batch."""
        return (
            self.model is model
            and self.kind is type(batch)
            and (self.measure is None or self.measure(batch) == self.form)
        )


def through_forward(model: Any, module: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
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


def check_step_name(model: nn.Module, key: str, name: str) -> None:
    """Check that the model has the method that ``MODEL.TRAIN_STEP`` or ``MODEL.PREDICT_STEP`` names.

    Raises:
        ConfigError: it has not, and the name is not the key's default.
    """
    if name not in ("train_step", "predict_step") and not callable(getattr(model, name, None)):
        raise ConfigError(f"{key}: {type(model).__name__} has no method {name!r}{suggest(name, dir(model))}")


# ---------------------------------------------------------------------- functions of a batch
# Not those of the operator module: torch.compile cannot trace them.


def keys(batch: Any) -> Any:
    """Return the names of a dict's entries."""
    return batch.keys()


def keys_of_first(batch: Any) -> tuple[int, Any]:
    """Return the length of a tuple, and the names of the entries of the dict that comes first in it."""
    return len(batch), batch[0].keys()


def entry(key: Any) -> Callable[[Any], Any]:
    """Return a function that reads an entry of a batch."""
    return lambda batch: batch[key]


first, all_but_last = entry(0), entry(slice(0, -1))


def compose(call: Callable[[Any], Any], take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls ``call`` with what ``take`` reads of a batch."""
    return lambda batch: call(take(batch))
