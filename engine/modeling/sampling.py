"""Text that the language model writes at each evaluation."""

import logging
from typing import Any

import torch

from ...hooks.base import HOOK_REGISTRY, HookBase
from ...hooks.common.models import unwrap_model

__all__ = ["SampleText"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class SampleText(HookBase):
    """Lets a :class:`GPT` on bytes continue a prompt after each evaluation.

    Logs the text, and puts it into the storage as "sample".

    Args:
        prompt: the beginning.
        length: bytes to add.
        temperature: below 1, likelier bytes are preferred.
        seed: of the drawing; other random numbers do not change.
    """

    def __init__(self, prompt: str, length: int = 120, temperature: float = 0.7, seed: int = 0) -> None:
        self._prompt, self._length, self._temperature, self._seed = prompt, length, temperature, seed

    @torch.no_grad()
    def after_eval(self, results: Any) -> None:
        model: Any = unwrap_model(self.trainer.model)
        device, training = next(model.parameters()).device, model.training
        generator = torch.Generator(device).manual_seed(self._seed)
        tokens = torch.tensor([list(self._prompt.encode())], device=device)
        model.eval()
        for _ in range(self._length):
            scores = model(tokens[:, -model.block_size :])[0, :, -1] / self._temperature
            drawn = torch.multinomial(scores.softmax(0), 1, generator=generator)
            tokens = torch.cat([tokens, drawn[None]], dim=1)
        model.train(training)
        text = bytes(tokens[0].tolist()).decode(errors="replace")
        logger.info("Sample: %s", text)
        self.trainer.storage.put_text("sample", text)
