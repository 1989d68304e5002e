"""The learning rate range test and the search for the largest batch: results, and that nothing is left of them."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer
from hookline.engine.setup.find_batch_size import find_batch_size, parse_memory
from hookline.engine.setup.find_lr import find_lr
from hookline.hooks import CallbackHook
from hookline.hooks.common.rng import capture_rng


class Net(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.steps = nn.Buffer(torch.zeros(()), persistent=False)

    def forward(self, batch):
        x, y = batch
        self.steps = self.steps + 1  # replaced, not changed in place
        hidden = nn.functional.dropout(self.norm(self.fc(x)).relu(), 0.5)
        return {"loss": (self.out(hidden).squeeze(1) - y).square().mean()}


class Line(Dataset):
    def __len__(self):
        return 70

    def __getitem__(self, index):
        x = torch.tensor([index / 70, 1.0])
        return x + 0.01 * torch.randn(2), 3 * x[0] - 1


def make(folder, *options, optimizer="AdamW"):
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("MODEL.NAME", f"{__name__}:Net", "MODEL.DEVICE", "cpu", "DATASETS.TRAIN", [f"{__name__}:Line"]),
            *("DATALOADER.BATCH_SIZE", 10, "SOLVER.OPTIMIZER.NAME", optimizer, "SOLVER.MAX_ITER", 12, "SEED", 1),
            *("SOLVER.BASE_LR", 0.01, "LOG.WRITERS", [], "LOG.PROGRESS_BAR", False, "OUTPUT_DIR", str(folder)),
            *options,
        ]
    )
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=False)
    return trainer


def flat(state, path=""):
    if isinstance(state, dict):
        return {key: value for name, inner in state.items() for key, value in flat(inner, f"{path}/{name}").items()}
    if isinstance(state, list | tuple):
        return flat(dict(enumerate(state)), path)
    return {path: state.tolist() if isinstance(state, torch.Tensor) else state}


def everything(trainer):
    model = {**trainer.model.state_dict(), "steps": trainer.model.steps}
    grads = [parameter.grad for parameter in trainer.model.parameters()]
    parts = {"model": model, "grads": grads, "optimizer": trainer.optimizer.state_dict(), "rng": capture_rng()}
    return flat({**parts, "data": trainer._batches.state_dict()})


TRIALS = {
    "find_lr": lambda trainer: find_lr(trainer, num_iter=9),
    "batch": lambda t: find_batch_size(t, "8GB", most=20),
}


@pytest.mark.parametrize("trial", TRIALS)
def test_nothing_is_left_of_a_trial_and_the_run_is_the_same(trial, tmp_path):
    make(tmp_path / "whole").train()
    trainer = make(tmp_path / "tried")
    before = everything(trainer)
    TRIALS[trial](trainer)
    assert everything(trainer) == before
    assert list((tmp_path / "tried").iterdir()) == []
    trainer.train()
    one, other = (torch.load(tmp_path / f / "model_final.pth", weights_only=True) for f in ("whole", "tried"))
    assert flat(one["model"]) == flat(other["model"])
    assert flat(one["trainer"]["optimizer"]) == flat(other["trainer"]["optimizer"])


def test_a_trial_in_the_middle_of_an_epoch_returns_to_it(tmp_path):
    def trainer(folder):
        made = make(folder, "SOLVER.MAX_ITER", 20)
        made.train()
        made.max_iter = 30  # the second train() continues in the middle of epoch 2
        return made

    whole, tried = trainer(tmp_path / "whole"), trainer(tmp_path / "tried")
    whole.train()
    before = everything(tried)
    find_lr(tried, num_iter=9)
    assert everything(tried) == before
    tried.train()
    assert flat(tried.model.state_dict()) == flat(whole.model.state_dict())


def test_hooks_are_not_called_and_stay(tmp_path):
    calls = []
    trainer = make(tmp_path)
    trainer.register_hooks([CallbackHook(after_step=lambda t: calls.append(t.iter), before_epoch=calls.append)])
    hooks = list(trainer._hooks)
    find_lr(trainer, num_iter=9)
    assert (calls, trainer._hooks) == ([], hooks)


class Quadratic(nn.Module):
    """Its loss falls up to a learning rate of 1, and rises beyond it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, 1.0]))

    def forward(self, x):
        return {"loss": (self.w * x).square().sum() / 2}


def quadratic(groups=None, **args):
    model = Quadratic()
    return SimpleTrainer(
        model, DataLoader([torch.ones(2)] * 4), torch.optim.SGD(groups or model.parameters(), lr=0.1), **args
    )


def test_the_rate_rises_exponentially_and_a_rising_loss_ends_the_sweep():
    sweep = find_lr(quadratic(), 1e-4, 1e4, num_iter=80, smoothing=0.5)
    assert sweep.lrs[:2] == pytest.approx([1e-4, 1e-4 * 10 ** (8 / 79)])
    assert 2.0 < sweep.lrs[-1] < 100  # it diverges from 2.0 on
    assert sweep.losses[0] == 2.5
    assert min(sweep.losses) < 1e-3
    assert 0.01 < sweep.suggestion < 1.0
    flat = find_lr(quadratic(), 1e-9, 1e-8, num_iter=20)
    assert len(flat.lrs) == 20


def test_a_loss_that_is_not_finite_ends_the_sweep():
    sweep = find_lr(quadratic(), 1e-4, 1e30, num_iter=40, stop_factor=None)
    assert all(map(torch.isfinite, torch.tensor(sweep.losses)))
    assert len(sweep.lrs) < 40


def test_groups_keep_the_ratio_of_their_rates():
    model, seen = Quadratic(), []
    head = nn.Parameter(torch.zeros(1))
    groups = [{"params": [model.w]}, {"params": [head], "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    trainer = SimpleTrainer(model, [torch.ones(2)], optimizer)
    model.register_forward_hook(lambda *_: seen.append([group["lr"] for group in optimizer.param_groups]))
    find_lr(trainer, 1e-3, 1e-1, num_iter=3)
    assert seen == [pytest.approx([rate, 10 * rate]) for rate in (1e-3, 1e-2, 1e-1)]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0]


@pytest.mark.parametrize("args", [{"min_lr": 0}, {"min_lr": 1, "max_lr": 0.1}, {"num_iter": 2}, {"smoothing": 1.0}])
def test_arguments_that_make_no_sense_are_refused(args):
    with pytest.raises(ConfigError, match="find_lr: "):
        find_lr(quadratic(), **args)


def test_the_sweep_can_be_drawn(tmp_path, monkeypatch):
    sweep = find_lr(quadratic(), num_iter=20)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'hookline\[plot\]'"):
        sweep.plot("lr.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    sweep.plot(str(tmp_path / "lr.png"))
    assert (tmp_path / "lr.png").stat().st_size > 1000


class Wide(nn.Module):
    """A sample needs about 8 MB."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, batch):
        x, _ = batch
        return {"loss": self.fc(x).mean(1, keepdim=True).expand(-1, 1_000_000).exp().mean()}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited with RLIMIT_AS")
def test_the_largest_batch_fits_into_the_memory_and_a_larger_one_does_not(tmp_path):
    trainer = make(tmp_path, "MODEL.NAME", f"{__name__}:Wide")
    status = Path("/proc/self/status").read_text().split()
    resident = int(status[status.index("VmRSS:") + 1]) * 1024
    before = copy.deepcopy(trainer.model.state_dict())
    size = find_batch_size(trainer, resident + 200 * 2**20)
    assert 10 <= size <= 60
    assert flat(trainer.model.state_dict()) == flat(before)
    torch.empty(2**29, dtype=torch.uint8)  # the limit is gone
    with pytest.raises(ConfigError, match=r"uses \d+ MB already"):
        find_batch_size(trainer, "10MB")


class NoRoom(Wide):
    """Raises an error without a text, as Python does, from 14 samples on."""

    def forward(self, batch):
        if len(batch[0]) > 13:
            raise MemoryError
        return {"loss": self.fc(batch[0]).sum()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited with RLIMIT_AS")
def test_a_memory_error_without_a_text_is_one(tmp_path, log):
    assert find_batch_size(make(tmp_path, "MODEL.NAME", f"{__name__}:NoRoom"), "8GB", most=40) == 13
    assert "A batch of 20 samples does not fit: MemoryError" in log.text


def test_amounts_of_memory():
    assert [parse_memory(x) for x in (5, "5", "2KB", "1.5MiB", "4G")] == [5, 5, 2048, 1.5 * 2**20, 4 * 2**30]
    for bad in ("4 gigs", 0, -1, "GB", "0MB", True):
        with pytest.raises(ConfigError, match="not an amount of memory"):
            parse_memory(bad)


def test_memory_must_be_given_on_the_cpu(tmp_path):
    with pytest.raises(ConfigError, match="--memory 4GB"):
        find_batch_size(make(tmp_path))


def test_a_trainer_without_a_config_is_refused():
    with pytest.raises(ConfigError, match="has no config"):
        find_batch_size(quadratic())


def test_the_plot_shows_the_part_before_the_losses_explode(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    sweep = find_lr(quadratic(), 1e-4, 1e4, num_iter=80, smoothing=0.5, stop_factor=None)
    limits, save = [], Figure.savefig

    def saved(figure, path):
        limits.append(figure.axes[0].get_ylim())
        save(figure, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", saved)
        sweep.plot(str(tmp_path / "lr.png"))
    assert (tmp_path / "lr.png").stat().st_size > 1000
    assert limits[0][0] < min(sweep.smoothed) < sweep.smoothed[0] < limits[0][1] < 2 * sweep.smoothed[0]
    for name in ("lr.xyz", "missing/lr.png"):
        with pytest.raises(ConfigError, match=f"{name} cannot be written"):
            sweep.plot(str(tmp_path / name))
