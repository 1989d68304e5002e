"""Models: building them from a config, calling them with batches, and a few small ones."""

from .adapters import ModelAdapter
from .build import LOSS_REGISTRY, META_ARCH_REGISTRY, MODEL_REGISTRY, build_adapter, build_model, resolve_device
from .gpt import GPT, TransformerBlock
from .zoo import MLP, ConvNet, CrossEntropyLoss, ResNet

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
    "TransformerBlock",
    "build_adapter",
    "build_model",
    "resolve_device",
]
