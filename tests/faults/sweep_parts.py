"""What the fault sweep trains with, beside what hookline has: pictures, and numbers drawn at random."""

import torch

from hookline.hooks import HookBase


class Pictures(HookBase):
    """Puts an image each third iteration, and what it draws at random each second one."""

    def after_step(self) -> None:
        storage = self.trainer.storage
        if self.trainer.iter % 3 == 1:
            storage.put_image("picture", torch.full((3, 4, 4), self.trainer.iter, dtype=torch.uint8))
            storage.put_histogram("weights", next(self.trainer.model.parameters()))
        if self.trainer.iter % 2:
            storage.put_scalar("drawn", float(torch.rand(())), smoothing_hint=False)
