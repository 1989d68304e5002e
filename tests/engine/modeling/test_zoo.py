import pytest
import torch
from torch import nn

from hookline.engine.modeling import MLP, ConvNet, ResNet


@pytest.mark.parametrize(
    "model",
    [
        MLP(64, 5),
        MLP(64, 5, [8, 4], 0.1),
        ConvNet(4, 5),
        ResNet(4, 8, 5, strides=[1, 2, 1]),
    ],
)
def test_models_return_one_score_per_class(model):
    scores = model(torch.randn(3, 1, 8, 8))
    assert scores.shape == (3, 5)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("depth", [8, 14])
def test_resnet_depth_counts_weighted_layers(depth):
    layers = [m for m in ResNet(4, depth).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    shortcuts = [m for m in layers if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
    assert len(layers) - len(shortcuts) == depth
    with pytest.raises(ValueError, match="6n"):
        ResNet(depth=depth + 1)
