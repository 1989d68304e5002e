"""Small models for examples, tests and benchmarks. They return class scores (logits)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from .build import MODEL_REGISTRY

__all__ = ["MLP", "ConvNet", "ResNet"]


@MODEL_REGISTRY.register()
class MLP(nn.Sequential):
    """Fully connected layers with ReLU between them. Inputs are flattened.

    Args:
        in_features: numbers per sample.
        num_classes: scores per sample.
        hidden: width of each hidden layer; if empty, the model is linear.
        dropout: probability after each hidden layer.

    Shapes:
        input (N, ...) with ``in_features`` numbers per sample; output (N, num_classes).
    """

    def __init__(self, in_features: int, num_classes: int, hidden: Sequence[int] = (64,), dropout: float = 0.0) -> None:
        _check_sizes(
            in_features=in_features, num_classes=num_classes, **{f"hidden[{i}]": n for i, n in enumerate(hidden)}
        )
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in pairwise((in_features, *hidden)):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(hidden[-1] if hidden else in_features, num_classes))
        super().__init__(*layers)


@MODEL_REGISTRY.register()
class ConvNet(nn.Module):
    """Two pairs of 3x3 convolutions with batch norm, max pooling between them, and global average pooling.

    Args:
        width: channels of the first pair; the second has twice as many.
        num_classes: scores per image.
        in_channels: channels of an image.
        dropout: probability before the classifier.

    Shapes:
        input (N, in_channels, H, W) with H, W >= 2; output (N, num_classes).
    """

    def __init__(self, width: int = 32, num_classes: int = 10, in_channels: int = 1, dropout: float = 0.0) -> None:
        _check_sizes(width=width, num_classes=num_classes, in_channels=in_channels)
        super().__init__()
        self.features = nn.Sequential(
            *_conv_bn(in_channels, width),
            nn.ReLU(inplace=True),
            *_conv_bn(width, width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            *_conv_bn(width, 2 * width),
            nn.ReLU(inplace=True),
            *_conv_bn(2 * width, 2 * width),
            nn.ReLU(inplace=True),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x).mean((2, 3))
        return self.classifier(self.dropout(x))


@MODEL_REGISTRY.register()
class ResNet(nn.Module):
    """The residual network for small images of He et al., "Deep Residual Learning" (arXiv:1512.03385, section 4.2).

    Each of the three stages has twice the channels of the previous one. The last batch norm of each block starts at
    zero, so that the block starts as its shortcut (Goyal et al., arXiv:1706.02677).

    Args:
        width: channels of the first stage.
        depth: number of weighted layers, 6n + 2 for n blocks per stage: 8, 14, 20, ...
        num_classes: scores per image.
        in_channels: channels of an image.
        strides: stride of each stage; (1, 2, 1) keeps more resolution of 8x8 images.

    Shapes:
        input (N, in_channels, H, W) with H, W >= 1; output (N, num_classes).

    Raises:
        ValueError: ``depth`` is not 6n + 2, or there are not three strides.
    """

    def __init__(
        self,
        width: int = 16,
        depth: int = 8,
        num_classes: int = 10,
        in_channels: int = 1,
        strides: Sequence[int] = (1, 2, 2),
    ) -> None:
        _check_sizes(width=width, num_classes=num_classes, in_channels=in_channels)
        super().__init__()
        blocks_per_stage, rest = divmod(depth - 2, 6)
        if rest or blocks_per_stage < 1:
            raise ValueError(f"depth must be 6n + 2 (8, 14, 20, ...), not {depth}")
        if len(strides) != 3:
            raise ValueError(f"strides must be three, one for each stage, not {strides}")
        self.stem = nn.Sequential(*_conv_bn(in_channels, width), nn.ReLU(inplace=True))
        blocks = []
        channels = width
        for stage, stride in enumerate(strides):
            for block in range(blocks_per_stage):
                blocks.append(_BasicBlock(channels, width << stage, 1 if block else stride))
                channels = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_conv_bn(in_channels, out_channels, stride),
            nn.ReLU(inplace=True),
            *_conv_bn(out_channels, out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )
        nn.init.zeros_(self.residual[-1].weight)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.residual(x) + self.shortcut(x), inplace=True)


def _conv_bn(in_channels: int, out_channels: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out_channels)


def _check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1: torch creates such layers, and fails only when they are used."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")
