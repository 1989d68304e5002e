"""Models, data and hooks that are wrong, one way each."""

import torch
from torch import nn

from hookline.engine.data import ArrayDataset
from hookline.hooks import HookBase


class Linear(nn.Module):
    """Not wrong."""

    def __init__(self, features: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class NeedsArgument(Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width)


class FailsToBuild(Linear):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"width must be even, not {width}")


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)


class Frozen(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Detached(Linear):
    def forward(self, x):
        return self.layer(x).detach()


class ReturnsNothing(Linear):
    def forward(self, x):
        self.layer(x)


class NotAModel:
    def __init__(self) -> None:
        self.layer = nn.Linear(8, 4)


def a_string() -> str:
    return "model"


def not_a_scalar(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def rows(size: int = 64, classes: int = 4, features: int = 8) -> ArrayDataset:
    """Labels that a model with less classes does not know."""
    return ArrayDataset(torch.zeros(size, features), torch.arange(size) % classes)


class Items:
    """A map-style data set."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        return torch.zeros(8), index % 4


class Ragged(Items):
    def __getitem__(self, index):
        return torch.zeros(index + 1), 0


class Objects(Items):
    def __getitem__(self, index):
        return object(), 0


class MissingFile(Items):
    def __init__(self, path: str = "no/such/file.csv") -> None:
        open(path)  # noqa: SIM115


class Named(Items):
    """Dict samples without a target of a usual name."""

    def __getitem__(self, index):
        return {"x": torch.zeros(8), "answer": index % 4}


class NoLength:
    def __getitem__(self, index):
        return torch.zeros(8), 0


class Watcher(HookBase):
    """Not wrong."""

    def __init__(self, every: int) -> None:
        self.every = every


class FailsToStart(HookBase):
    def __init__(self) -> None:
        raise RuntimeError("no connection to the server")


class NotAHook:
    def after_step(self) -> None:
        pass


number = 3


class Multi(Linear):
    """Returns two outputs by name, and none of them is "logits"."""

    def forward(self, x):
        return {"scores": self.layer(x), "features": x}


def loss_of_dict(outputs, targets):
    return nn.functional.cross_entropy(outputs["scores"], targets)


class Raises(Items):
    def __init__(self) -> None:
        raise KeyError("no column 'label'")


def one_argument(predictions):
    return 0.5
