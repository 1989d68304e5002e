"""Runs from a config, stopped and resumed: with any optimizer and schedule they equal a whole run."""

import pytest
import torch
from metric_runs import at
from small_runs import mlp_config
from torch.optim.lr_scheduler import ExponentialLR

from hookline.engine import DefaultTrainer
from hookline.engine.program.inspection import inspect_checkpoint
from hookline.hooks import CallbackHook

CASES = {
    "several optimizers": [
        *("SOLVER.OPTIMIZERS.first", {"PARAMS": "1", "OPTIMIZER": {"NAME": "Adam"}}),
        *("SOLVER.OPTIMIZERS.rest", {"LR_SCHEDULER_NAME": "WarmupStepLR", "LR_SCHEDULER_ARGS": {"step_size": "1ep"}}),
    ],
    "turns": [
        *("MODEL.NAME", "small_runs:Gan", "MODEL.ARGS", {"size": 4}, "MODEL.LOSS.NAME", ""),
        *("SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR"),
        *("SOLVER.OPTIMIZERS.critic", {"PARAMS": "critic"}),
        *("SOLVER.OPTIMIZERS.generator", {"OPTIMIZER": {"NAME": "Adam"}}),
    ],
}


class OwnParts(DefaultTrainer):
    """``build_optimizer`` and ``build_lr_scheduler`` return dicts."""

    @classmethod
    def build_optimizer(cls, cfg, model):
        body, head = torch.optim.Adam(model[1].parameters(), lr=0.01), torch.optim.SGD(model[4].parameters(), lr=0.1)
        return {"body": body, "head": head}

    @classmethod
    def build_lr_scheduler(cls, cfg, optimizer):
        return {"head": ExponentialLR(optimizer["head"], 0.9)}


def make(folder, case, resume=False, cls=DefaultTrainer):
    cfg = mlp_config(folder)
    synthetic = {"NAME": "synthetic", "ARGS": {"size": 60, "shape": [4], "num_classes": 3}}
    cfg.merge_from_list(
        [
            *("MODEL.ARGS", {"in_features": 4, "num_classes": 3, "hidden": [5], "dropout": 0.5}),
            *("MODEL.DEVICE", "cpu", "DATASETS.TRAIN", [synthetic], "DATALOADER.BATCH_SIZE", 10, "SEED", 3),
            *("SOLVER.MAX_ITER", "3ep", "SOLVER.BASE_LR", 0.1, "SOLVER.WARMUP_ITERS", 0, "SOLVER.STEPS", ()),
        ]
    )
    cfg.merge_from_list(CASES.get(case, ["SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR"]))
    trainer = cls(cfg)
    trainer.resume_or_load(resume=resume)
    return trainer


def state(trainer):
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    return [*(parameter.tolist() for parameter in trainer.model.parameters()), rates]


@pytest.mark.parametrize(("case", "cls"), [*((case, DefaultTrainer) for case in CASES), ("plain", OwnParts)])
def test_a_stopped_and_resumed_run_equals_a_whole_one(case, cls, tmp_path):
    whole = make(tmp_path / "whole", case, cls=cls)
    rates = state(whole)[-1]
    latest = whole.train().metrics
    stopped = make(tmp_path / "parts", case, cls=cls)
    stopped.register_hooks([at(8, lambda trainer: trainer.request_stop("enough", exit_code=75))])
    stopped.train()
    resumed = make(tmp_path / "parts", case, resume=True, cls=cls)
    assert resumed.start_iter == 9
    resumed.train()
    assert state(resumed) == state(whole)
    assert state(whole)[-1] != rates
    if cls is OwnParts:
        assert {name for name in latest if name.startswith("lr")} == {"lr/head"}
    if case == "turns":
        assert inspect_checkpoint(str(tmp_path / "whole" / "model_final.pth"))["optimizer"]["tensors"] > 0


class ScheduleFree(torch.optim.SGD):
    """Trains with weights that are not those to evaluate: these are a fourth of them."""

    def step(self, closure=None):
        assert self.param_groups[0].get("train_mode", False)
        super().step(closure)

    def train(self):
        self._change(True, 4.0)

    def eval(self):
        self._change(False, 0.25)

    @torch.no_grad()
    def _change(self, training, factor):
        for group in self.param_groups:
            if group.get("train_mode", False) != training:
                group["train_mode"] = training
                for parameter in group["params"]:
                    parameter.mul_(factor)


def test_an_optimizer_with_eval_mode_is_in_it_for_evaluations_saves_and_at_the_end(tmp_path):
    keys = [
        *("SOLVER.OPTIMIZER.NAME", f"{__name__}:ScheduleFree", "SOLVER.CHECKPOINT_PERIOD", 4, "TEST.EVAL_PERIOD", 4),
        *("DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {"size": 20, "shape": [4], "num_classes": 3}}]),
        *("TEST.METRICS", ["Loss"]),
    ]
    CASES["schedule-free"] = keys
    trainer, norms = make(tmp_path, "schedule-free"), {}

    def norm(trainer):
        return sum(parameter.detach().norm().item() for parameter in trainer.model.parameters())

    trainer.register_hooks([CallbackHook(before_step=lambda t: norms.update({t.iter: norm(t)}))])
    trainer.register_hooks([CallbackHook(before_eval_step=lambda t, batch: norms.update({f"eval {t.iter}": norm(t)}))])
    metrics = trainer.train().metrics
    assert norms["eval 7"] == pytest.approx(norms[8] / 4)
    assert norm(trainer) < norms[17] / 3
    assert trainer.evaluate()["synthetic"]["loss"] == metrics["synthetic/loss"]
    saved = torch.load(tmp_path / "model_final.pth")["model"]
    assert all(torch.equal(saved[name], value) for name, value in trainer.model.state_dict().items())
    trainer.max_iter += 2
    trainer.train()
    assert norm(trainer) < norms[19] / 3
