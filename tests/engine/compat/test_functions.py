import json
import os

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hookline.engine import (
    comm,
    create_ddp_model,
    default_writers,
)
from hookline.hooks import CommonMetricPrinter, JSONWriter, TensorboardXWriter


def test_a_single_process_gets_the_model_itself():
    model = nn.Linear(2, 2)
    assert create_ddp_model(model, broadcast_buffers=False) is model


@pytest.mark.parametrize("compressed", [False, True])
def test_several_processes_get_a_wrapped_model(tmp_path, monkeypatch, compressed):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        monkeypatch.setattr(comm, "get_world_size", lambda: 2)
        model = create_ddp_model(nn.Linear(2, 2), fp16_compression=compressed, broadcast_buffers=False)
        assert isinstance(model, DistributedDataParallel)
        assert not model.broadcast_buffers
        model(torch.ones(1, 2)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    finally:
        distributed.destroy_process_group()


def test_the_default_writers_are_console_json_and_tensorboard(tmp_path):
    from hookline.hooks import EventStorage

    writers = default_writers(str(tmp_path), 10)
    assert [type(writer) for writer in writers] == [CommonMetricPrinter, JSONWriter, TensorboardXWriter]
    with EventStorage() as storage:
        storage.put_scalar("loss", 1)
        for writer in writers:
            writer.write()
            writer.close()
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"iteration": 0, "loss": 1.0}
    assert any(name.startswith("events.out") for name in os.listdir(tmp_path))
