import pytest
import torch
from small_runs import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookline.engine.modeling import ModelAdapter


class Stepping(nn.Linear):
    """Computes its loss in ``train_step``, over labels that count."""

    def train_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()])
def test_labels_that_do_not_count_are_exact_in_a_train_step_too(loss):
    labels = torch.tensor([0, -100, -100, -100, 1, 2, 0, 1])
    data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), labels)
    weights = []
    for steps in (1, 2):
        torch.manual_seed(0)
        model = Stepping(3, 3)
        options = {"data": DataLoader(data, 8), "adapter": ModelAdapter(loss=loss), "accumulation_steps": steps}
        make_trainer(model=model, lr=1.0, **options).train(0, 2)
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights)
