"""Describing and comparing checkpoints."""

import json

import pytest
import torch
from small_runs import seeded_net

from hookline.config import get_cfg
from hookline.engine.program.inspection import hash_weights, inspect_checkpoint


def save(path, **hooks):
    model = seeded_net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    cfg = get_cfg()
    cfg.SOLVER.BASE_LR, cfg.SOLVER.OPTIMIZER.NAME = 0.5, "AdamW"
    run = {"optimizer": optimizer.state_dict(), "hooks": hooks, "run": {"config": cfg.dump()}}
    trainer = {"iteration": 9, "data": {"epoch": 2}, **run}
    torch.save({"model": seeded_net().state_dict(), "trainer": trainer, "iteration": 9}, path)
    return str(path)


def test_the_hash_covers_names_dtypes_shapes_and_bits():
    weights = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor(3)}
    assert hash_weights(weights) == hash_weights(dict(reversed(weights.items())))
    others = [
        {"a": weights["a"], "c": weights["b"]},
        {"a": weights["a"][None], "b": weights["b"]},
        {"a": weights["a"], "b": weights["b"].int()},
        {"a": torch.tensor([1.0, -0.0]), "b": weights["b"]},
        {"a": weights["a"]},
    ]
    assert len({hash_weights(one) for one in (weights, *others)}) == 6
    # It does not depend on the layout in memory.
    for tensor in (torch.arange(6.0).reshape(2, 3).t(), torch.arange(4, dtype=torch.bfloat16)[::2], torch.zeros(0, 3)):
        assert hash_weights({"a": tensor}) == hash_weights({"a": tensor.contiguous()})


def test_the_content_of_a_checkpoint_is_described(tmp_path):
    path = save(tmp_path / "run.pth", LRScheduler={"last_epoch": 9})
    report = inspect_checkpoint(path)
    ema = {"averaged_model": seeded_net(5).state_dict(), "evaluate": True}
    averaged = inspect_checkpoint(save(tmp_path / "averaged.pth", EMA=ema))["averaged"]
    assert averaged["sha256"] == hash_weights(seeded_net(5).state_dict())
    assert report["file"] == path
    assert (report["iteration"], report["epoch"]) == (9, 2)
    weights = report["weights"]
    assert (weights["count"], weights["elements"]) == (7, 6 + 3 + 4 * 3 + 1)
    assert weights["megabytes"] == pytest.approx((21 * 4 + 8) / 1e6)
    assert weights["dtypes"] == ["float32", "int64"]
    assert weights["sha256"] == hash_weights(seeded_net().state_dict())
    assert report["averaged"] is None
    assert report["optimizer"]["tensors"] == 12
    assert report["hooks"] == ["LRScheduler"]
    assert report["config"] == {"SOLVER.OPTIMIZER.NAME": ["SGD", "AdamW"], "SOLVER.BASE_LR": [0.001, 0.5]}
    json.dumps(report)
    torch.save(seeded_net().state_dict(), tmp_path / "plain.pth")
    plain = inspect_checkpoint(str(tmp_path / "plain.pth"))
    assert {name for name, value in plain.items() if value} == {"file", "megabytes", "weights"}
