"""A small generative adversarial network, whose two parts have an optimizer each."""

import torch
from torch import nn
from torch.nn.functional import softplus

from hookline.engine.data import ArrayDataset
from hookline.engine.evaluation import MeanMetric
from hookline.engine.modeling import MLP


def ring(size: int = 4096, seed: int = 0) -> ArrayDataset:
    """Points (size, 2) float32 near the unit circle, twice: as inputs and as targets."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * torch.pi * torch.rand(size, generator=generator)
    radius = 1 + 0.05 * torch.randn(size, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return ArrayDataset(points, points)


class GAN(nn.Module):
    """Goodfellow et al., "Generative adversarial nets" (2014), with the loss that does not saturate.

    Args:
        noise: random numbers per sample.
        hidden: width of the hidden layers.
    """

    def __init__(self, noise: int = 4, hidden: int = 64) -> None:
        super().__init__()
        self.noise = noise
        self.generator = MLP(noise, 2, [hidden, hidden])
        self.critic = MLP(2, 1, [hidden, hidden])

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor], optimizer: str | None = None):
        """Return the loss of the part that is trained; in evaluation generated points (N, 2)."""
        real, _ = batch
        fake = self.generator(torch.randn(len(real), self.noise, device=real.device))
        if optimizer == "critic":
            return {"loss": softplus(self.critic(fake.detach())).mean() + softplus(-self.critic(real)).mean()}
        if optimizer == "generator":
            return {"loss": softplus(-self.critic(fake)).mean()}
        return fake


class DistanceToRing(MeanMetric):
    """Mean distance of the generated points from the unit circle."""

    name = "distance"

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.add((preds.norm(dim=1) - 1).abs().sum(), len(preds))


class Coverage(MeanMetric):
    """Fraction of 16 equal sectors of the plane that a batch of generated points reaches."""

    name = "coverage"

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        sector = (torch.atan2(preds[:, 1], preds[:, 0]) / (2 * torch.pi) * 16).floor()
        self.add(torch.tensor(len(sector.unique()) / 16), 1)
