"""``Histograms``."""

import torch
from small_runs import config_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def test_tensorboard_has_each_weight_and_its_clipped_gradient(tmp_path):
    clip = ("SOLVER.CLIP_GRADIENTS", {"ENABLED": True, "CLIP_TYPE": "value", "CLIP_VALUE": 1e-3})
    hooks = ("HOOKS", [{"NAME": "Histograms", "ARGS": {"period": 3}}])
    trainer = config_trainer(tmp_path, "LOG.WRITERS", ["TensorboardXWriter"], "SOLVER.MAX_ITER", 7, *hooks, *clip)
    trainer.model.requires_grad_(True)
    first, *_ = trainer.model.parameters()
    first.requires_grad_(False)
    trainer.train()
    events = EventAccumulator(str(tmp_path), {"histograms": 0}).Reload()
    names = dict(trainer.model.named_parameters())
    frozen = next(iter(names))
    assert {*events.Tags()["histograms"]} == {f"weights/{name}" for name in names} | {
        f"gradients/{name}" for name in names if name != frozen
    }
    for tag in events.Tags()["histograms"]:
        assert [event.step for event in events.Histograms(tag)] == [2, 5]
    for name, weight in names.items():
        assert events.Histograms(f"weights/{name}")[-1].histogram_value.num == weight.numel()
        if name != frozen:
            assert events.Histograms(f"gradients/{name}")[-1].histogram_value.max <= 1e-3 + 1e-9
    shown = events.Histograms(f"weights/{frozen}")[-1].histogram_value
    assert (shown.min, shown.max) == (torch.min(first).item(), torch.max(first).item())
