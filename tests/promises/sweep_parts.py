"""A hook for the fault sweep that writes images and random numbers."""

import torch

from hookline.hooks import HookBase


class Pictures(HookBase):
    """Puts an image every third iteration and a random number every second."""

    def after_step(self) -> None:
        storage = self.trainer.storage
        if self.trainer.iter % 3 == 1:
            storage.put_image("picture", torch.full((3, 4, 4), self.trainer.iter, dtype=torch.uint8))
            storage.put_histogram("weights", next(self.trainer.model.parameters()))
        if self.trainer.iter % 2:
            storage.put_scalar("drawn", float(torch.rand(())), smoothing_hint=False)
