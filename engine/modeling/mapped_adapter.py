"""An adapter that changes batches and outputs by functions."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .adapters import ModelAdapter
from .call_plan import CallPlan

__all__ = ["MappedAdapter"]

_Function = Callable[[Any], Any]


class MappedAdapter(ModelAdapter):
    """A :class:`ModelAdapter` behind functions of the batch and of the model's output.

    Args:
        *args, **kwargs: see :class:`ModelAdapter`.
        input_function: returns the batch that the model and the loss use, from the loader's batch.
        output_function: returns the output that the loss and the metrics use, from the model's.
        eval_input_function: the same in evaluation and prediction. Default: ``input_function``.
        eval_output_function: likewise. Default: ``output_function``.
    """

    def __init__(
        self,
        *args: Any,
        input_function: _Function | None = None,
        output_function: _Function | None = None,
        eval_input_function: _Function | None = None,
        eval_output_function: _Function | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._inputs = {True: input_function or _same, False: eval_input_function or input_function or _same}
        self._outputs = {True: output_function, False: eval_output_function or output_function}

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return super().losses(model, self._inputs[True](batch))

    def prepare(self, model: nn.Module, batch: Any) -> None:
        super().prepare(model, self._inputs[True](batch))

    def targets(self, batch: Any, training: bool = False) -> Any:
        return super().targets(self._inputs[training](batch))

    def predictions(self, output: Any, training: bool = False) -> Any:
        function = self._outputs[training]
        return super().predictions(function(output) if training and function else output)

    def _run(self, model: nn.Module, batch: Any) -> tuple[CallPlan, Any]:
        return super()._run(model, self._inputs[False](batch))

    def _new_plan(
        self, model: Any, batch: Any, training: bool, measure: Callable[[Any], Any] | None, form: Any
    ) -> CallPlan:
        plan = super()._new_plan(model, batch, training, measure, form)
        function = self._outputs[training]
        if function is not None:
            run = plan.run
            plan.run, plan.pair = lambda inputs: function(run(inputs)), False
        return plan


def _same(value: Any) -> Any:
    return value
