"""A hook: called at events of the training loop."""

import torch

from hookline.hooks import Every, HookBase


class WeightNorm(HookBase):
    """Logs the norm of all weights every ``period``: 20, "100it", "1ep", "5min"."""

    def __init__(self, period: int | str = 20) -> None:
        self.every = Every(period)

    def after_step(self) -> None:
        if self.every(self.trainer):
            norm = torch.nn.utils.get_total_norm(p.detach() for p in self.trainer.model.parameters())
            self.trainer.storage.put_scalar("weight_norm", norm)
