import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer
from hookline.hooks import CallbackHook, TimeBudget


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x):
        return {"loss": self.fc(x).square().mean()}


class Clock:
    """A step takes a tenth of a second."""

    def clock(self):
        return (self.iter + 1 - self.start_iter) / 10


class Timed(Clock, SimpleTrainer):
    pass


class TimedDefault(Clock, DefaultTrainer):
    pass


def test_the_step_that_reaches_the_budget_is_the_last_one():
    model, lengths = Net(), []
    trainer = Timed(model, [torch.ones(1, 2)], torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([TimeBudget("3s"), CallbackHook(after_step=lambda t: lengths.append(t.max_iter))])
    result = trainer.train(0, 10**9)
    assert (result.reason, result.iteration) == ("completed", 30)
    assert lengths[:4] == [10**9] * 4
    assert lengths[4:] == [30] * 26  # the estimate


def test_slow_first_steps_do_not_end_the_run_early():
    class SlowStart(SimpleTrainer):
        def clock(self):
            return 1 + (self.iter + 1) / 100

    model, ends = Net(), []
    trainer = SlowStart(model, [torch.ones(1, 2)], torch.optim.SGD(model.parameters(), lr=0.1))
    judged = CallbackHook(after_step=lambda t: ends.append(t.iter + 1 >= t.max_iter))
    trainer.register_hooks([TimeBudget("3s"), judged])
    assert trainer.train(0, 10**9).iteration == 200
    assert ends.index(True) == 199  # no other step seemed to be the last one


def test_other_budgets_are_refused():
    for budget in (0, "2ep", 100, "x"):
        with pytest.raises(ConfigError):
            TimeBudget(budget)


def make(folder, budget="3s", resume=False, schedule="WarmupCosineLR"):
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("MODEL.NAME", "MLP", "MODEL.DEVICE", "cpu", "MODEL.LOSS.NAME", "CrossEntropyLoss"),
            *("MODEL.ARGS", {"in_features": 8, "num_classes": 4}, "DATASETS.TRAIN", ["synthetic"], "SEED", 1),
            *("DATALOADER.BATCH_SIZE", 64, "SOLVER.MAX_ITER", budget, "SOLVER.WARMUP_ITERS", 4, "SOLVER.BASE_LR", 0.1),
            *("SOLVER.LR_SCHEDULER_NAME", schedule, "LOG.WRITERS", [], "LOG.PROGRESS_BAR", False),
            *("OUTPUT_DIR", str(folder)),
        ]
    )
    trainer = TimedDefault(cfg)
    trainer.resume_or_load(resume=resume)
    return trainer


def weights(trainer):
    return [parameter.tolist() for parameter in trainer.model.parameters()]


def rates_of(trainer):
    rates = []
    trainer.register_hooks([CallbackHook(before_step=lambda t: rates.append(t.optimizer.param_groups[0]["lr"]))])
    trainer.train()
    return rates


def test_the_schedule_of_a_config_follows_the_estimated_length(tmp_path):
    timed, counted = rates_of(make(tmp_path / "timed")), rates_of(make(tmp_path / "counted", 30))
    assert len(timed) == len(counted) == 30
    assert timed[5:] == counted[5:]  # after the first estimate


def test_a_stopped_and_resumed_run_equals_a_whole_one(tmp_path, caplog):
    whole = make(tmp_path / "whole")
    whole.train()
    stopped = make(tmp_path / "parts")
    stopped.register_hooks([CallbackHook(after_step=lambda t: t.iter == 11 and t.request_stop("enough", exit_code=75))])
    stopped.train()
    caplog.clear()
    resumed = make(tmp_path / "parts", resume=True)
    result = resumed.train()
    assert (resumed.start_iter, result.iteration, result.reason) == (12, 30, "completed")
    assert weights(resumed) == weights(whole)
    assert "MAX_ITER" not in caplog.text

    again = make(tmp_path / "parts", resume=True)
    assert again.train().iteration == 30
    longer = make(tmp_path / "parts", "4s", resume=True)
    assert longer.train().iteration == 40


def test_a_schedule_that_needs_the_number_of_steps_is_refused(tmp_path):
    cfg = make(tmp_path).cfg.clone()
    cfg.defrost()
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.WARMUP_ITERS = "3s", 0
    cfg.SOLVER.LR_SCHEDULER_NAME = "torch.optim.lr_scheduler:CosineAnnealingLR"
    cfg.SOLVER.LR_SCHEDULER_ARGS.T_max = "end"
    with pytest.raises(ConfigError, match=r"LR_SCHEDULER_ARGS\.T_max: 'end' is not known"):
        DefaultTrainer(cfg)
