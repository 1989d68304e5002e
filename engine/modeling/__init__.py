"""Models: building them from a config, calling them with batches, and a few small ones."""

from typing import TYPE_CHECKING

from ...config.rare_names import imported_when_used
from .adapters import ModelAdapter
from .build import (
    LOSS_REGISTRY,
    META_ARCH_REGISTRY,
    MODEL_REGISTRY,
    build_adapter,
    build_loss,
    build_model,
    check_compile,
    check_model,
    model_summary,
    resolve_device,
)
from .gpt import GPT, SampleText, TransformerBlock
from .losses import CrossEntropyLoss, TokenCrossEntropyLoss
from .zoo import MLP, ConvNet, ResNet

if TYPE_CHECKING:
    from .changes import checkpoint_activations

__all__ = [
    "GPT",
    "LOSS_REGISTRY",
    "META_ARCH_REGISTRY",
    "MLP",
    "MODEL_REGISTRY",
    "ConvNet",
    "CrossEntropyLoss",
    "ModelAdapter",
    "ResNet",
    "SampleText",
    "TokenCrossEntropyLoss",
    "TransformerBlock",
    "build_adapter",
    "build_loss",
    "build_model",
    "check_compile",
    "check_model",
    "checkpoint_activations",
    "model_summary",
    "resolve_device",
]

__getattr__ = imported_when_used(__name__, {"checkpoint_activations": ".changes"})
