"""What only a GPU can show; skipped without one."""

import pytest
import torch

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer
from hookline.hooks import CallbackHook

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def cfg(tmp_path):
    cfg = get_cfg()
    cfg.MODEL.NAME = "ConvNet"
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.merge_from_list(["MODEL.ARGS.num_classes", 4])
    cfg.DATASETS.TRAIN = ({"NAME": "synthetic", "ARGS": {"size": 2048, "shape": [1, 8, 8]}},)
    cfg.SOLVER.OPTIMIZER.NAME = "AdamW"
    cfg.SOLVER.MAX_ITER = 300
    cfg.LOG.PERIOD = 200
    cfg.OUTPUT_DIR = str(tmp_path)
    return cfg


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_no_step_between_two_writings_waits_for_the_device(cfg, precision):
    if precision != "float32":
        cfg.merge_from_list(["SOLVER.AMP.ENABLED", True, "SOLVER.AMP.DTYPE", precision])

    def watch(trainer):
        if trainer.iter == 50:
            torch.cuda.set_sync_debug_mode("error")
        if trainer.iter == 150:
            torch.cuda.set_sync_debug_mode("default")

    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([CallbackHook(before_step=watch)])
    try:
        assert trainer.train().reason == "completed"
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_updates_of_losses_that_are_not_finite_are_skipped_on_the_device():
    model = torch.nn.Linear(3, 1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = [torch.full((2, 3), value, device="cuda") for value in (1.0, float("nan"))]
    trainer = SimpleTrainer(model, data, optimizer, nonfinite="skip")
    trainer.adapter.losses = lambda model, batch: {"loss": model(batch).sum()}
    trainer.train(0, 6)
    assert all(p.isfinite().all() for p in model.parameters())
