"""Train a variational autoencoder, which computes its two losses itself."""

import torch
from given import scans
from torch import nn

from hookline import Trainer


class VAE(nn.Module):
    def __init__(self, size=256, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, size), nn.Sigmoid())

    def forward(self, batch):
        x, _ = batch
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        decoded = self.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp()).view_as(x)
        reconstruction = (decoded - x).square().sum() / len(x)
        kl = (mean.square() + log_var.exp() - log_var - 1).sum() / (2 * len(x))
        return {"reconstruction": reconstruction, "kl": kl} if self.training else decoded


trainer = Trainer(
    VAE, scans(256), scans(32), optimizer="Adam", lr=3e-3, length="10ep", batch_size=32, seed=1, output_dir="output/vae"
)
trainer.train()
