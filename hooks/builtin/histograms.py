"""``Histograms``: the distribution of weights and gradients."""

from ...config import Duration
from ..base import HOOK_REGISTRY, Every, HookBase
from ..common import local_part, plain_name, unwrap_model


@HOOK_REGISTRY.register()
class Histograms(HookBase):
    """Puts a histogram of each weight, and of its gradient, under its name in the model, for TensorBoard.

    Puts ``weights/<name>`` and ``gradients/<name>`` before an update, when gradients are unscaled and clipped. Shows
    rank 0, with FSDP its shards. Waits for the device. Saves nothing.

    Args:
        period: a duration.
    """

    def __init__(self, period: Duration | int | str = "1ep") -> None:
        self._every = Every(period)

    def before_optimizer_step(self) -> None:
        trainer = self.trainer
        if not self._every(trainer) or not trainer.comm.is_main_process():
            return
        for name, weight in unwrap_model(trainer.model).named_parameters():
            trainer.storage.put_histogram(f"weights/{plain_name(name)}", local_part(weight))
            if weight.grad is not None:
                trainer.storage.put_histogram(f"gradients/{plain_name(name)}", local_part(weight.grad))
