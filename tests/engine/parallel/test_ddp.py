import pytest
import torch
from starts import group_of_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookline.engine import comm, create_ddp_model


@pytest.mark.parametrize("compressed", [False, True])
def test_several_processes_get_a_wrapped_model_and_one_the_model_itself(monkeypatch, compressed):
    model = nn.Linear(2, 2)
    assert create_ddp_model(model, broadcast_buffers=False) is model
    with group_of_one():
        monkeypatch.setattr(comm, "get_world_size", lambda: 2)
        model = create_ddp_model(model, fp16_compression=compressed, broadcast_buffers=False)
        assert isinstance(model, DistributedDataParallel)
        assert not model.broadcast_buffers
        model(torch.ones(1, 2)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
