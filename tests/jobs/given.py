"""What a person has before a job begins: data and models, small and random."""

import random
from itertools import repeat
from pathlib import Path

import torch
from torch import nn

seeded = torch.Generator().manual_seed(0)


def sentences(number):
    """Token ids and labels, as a tokenizer and a file give them: dicts of tensors. The second word says the label."""
    rows = torch.randint(8, 100, (number, 12), generator=seeded)
    rows[:, 1] = 5 + torch.arange(number) % 2
    return [{"input_ids": row, "labels": row[1] - 5} for row in rows]


def photos(folder):
    """Write images into a folder for each class."""
    from PIL import Image

    random.seed(0)
    for split, number in (("train", 24), ("val", 12)):
        for name, red in (("cats", 200), ("dogs", 60)):
            (Path(folder) / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(number):
                color = (red, random.randrange(200), 260 - red)
                Image.new("RGB", (40, 40), color).save(Path(folder) / split / name / f"{i}.png")


def scans(number):
    """Images (1, 16, 16) with a bright square, and its mask (16, 16)."""
    images, masks = 0.3 * torch.rand(number, 1, 16, 16, generator=seeded), torch.zeros(number, 16, 16).long()
    for i, (x, y) in enumerate(torch.randint(0, 10, (number, 2), generator=seeded)):
        images[i, :, x : x + 6, y : y + 6] += 0.6
        masks[i, x : x + 6, y : y + 6] = 1
    return images, masks


class UNet(nn.Module):
    """Scores (N, 2, H, W) of two classes."""

    def __init__(self, width=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, stride=2), nn.ReLU(), nn.Upsample(scale_factor=2)
        )
        self.up = nn.Conv2d(2 * width, 2, 3, padding=1)

    def forward(self, x):
        x = self.down(x)
        return self.up(torch.cat((x, self.deep(x)), dim=1))


def table(number):
    """Rows (N, 4) and classes."""
    x = torch.randn(number, 4, generator=seeded)
    return x, x[:, :3].argmax(1)


class Corridor:
    """A walk over 0, ..., 6: the episode ends at either end, and the right one pays 1."""

    def reset(self):
        self.place = 3
        return self._seen()

    def step(self, action):
        self.place += 1 if action else -1
        return self._seen(), float(self.place == 6), self.place in (0, 6)

    def _seen(self):
        return nn.functional.one_hot(torch.tensor(self.place), 7).float()


def corridors():
    """An environment for each step."""
    return repeat(Corridor())
