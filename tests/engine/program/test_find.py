"""The learning rate range test and the search for the largest batch."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, Trainer
from hookline.engine.program import find
from hookline.engine.program.find import find_batch_size, find_lr
from hookline.hooks.common.rng import capture_rng


class Quadratic(nn.Module):
    """Its loss falls up to a learning rate of 1, and rises beyond it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, 1.0]))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return {"loss": (self.w * x).square().sum() / 2 + 0 * self.bias.sum()}


class Ones(Dataset):
    def __len__(self):
        return 70

    def __getitem__(self, index):
        return torch.ones(2)


class Full(Quadratic):
    """Is out of memory from 14 samples on, with an error without a text, as Python's."""

    def forward(self, x):
        if len(x) > 13:
            raise MemoryError
        return super().forward(x)


def quadratic(folder, *options):
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("MODEL.NAME", f"{__name__}:Quadratic", "MODEL.DEVICE", "cpu", "DATASETS.TRAIN", [f"{__name__}:Ones"]),
            *("DATALOADER.BATCH_SIZE", 1, "SOLVER.OPTIMIZER.NAME", "SGD", "SOLVER.BASE_LR", 0.1, "SEED", 1),
            *("SOLVER.WEIGHT_DECAY", 0.0, "SOLVER.MOMENTUM", 0.0, "OUTPUT_DIR", str(folder / "run"), *options),
        ]
    )
    return cfg


def test_nothing_is_left_of_a_search(tmp_path):
    cfg, rng = quadratic(tmp_path, "HOOKS", ["ProgressBar"]), capture_rng()
    before = cfg.dump()
    find_lr(cfg, num_iter=9)
    assert cfg.dump() == before
    assert repr(capture_rng()) == repr(rng)
    assert list(tmp_path.iterdir()) == []


def test_an_object_would_be_changed_so_its_class_is_needed(tmp_path):
    made = Trainer(Quadratic(), Ones(), length=3, output_dir=tmp_path / "run", optimizer="SGD")
    with pytest.raises(ConfigError, match=r"find_lr: the model is an object, .* pass its class"):
        find_lr(made.given)
    with pytest.raises(ConfigError, match=r"find_lr: takes the config of a run, .* not a Trainer"):
        find_lr(made)
    made = Trainer(Quadratic, Ones(), length=3, output_dir=tmp_path / "run", optimizer="SGD")
    assert len(find_lr(made.given, num_iter=9).lrs) > 5


def test_the_rate_rises_exponentially_and_a_rising_loss_ends_the_sweep(tmp_path):
    sweep = find_lr(quadratic(tmp_path), 1e-4, 1e4, num_iter=80, smoothing=0.5)
    assert sweep.lrs[:2] == pytest.approx([1e-4, 1e-4 * 10 ** (8 / 79)])
    assert 2.0 < sweep.lrs[-1] < 100  # it diverges from 2.0 on
    assert sweep.losses[0] == 2.5
    assert min(sweep.losses) < 1e-3
    assert 0.01 < sweep.suggestion < 1.0
    flat = find_lr(quadratic(tmp_path), 1e-9, 1e-8, num_iter=20)
    assert len(flat.lrs) == 20


def test_a_loss_that_is_not_finite_ends_the_sweep(tmp_path):
    sweep = find_lr(quadratic(tmp_path), 1e-4, 1e30, num_iter=40, stop_factor=None)
    assert all(map(torch.isfinite, torch.tensor(sweep.losses)))
    assert len(sweep.lrs) < 40


def test_groups_keep_the_ratio_of_their_rates(tmp_path):
    class Noted(DefaultTrainer):
        def optimizer_step(self):
            seen.append(sorted({group["lr"] for group in self.optimizer.param_groups}))
            super().optimizer_step()

    seen = []
    cfg = quadratic(tmp_path, "SOLVER.BIAS_LR_FACTOR", 10.0)
    find_lr(cfg, 1e-3, 1e-1, num_iter=3, trainer=Noted)
    assert seen == [pytest.approx([rate, 10 * rate]) for rate in (1e-3, 1e-2, 1e-1)]


@pytest.mark.parametrize("args", [{"min_lr": 0}, {"min_lr": 1, "max_lr": 0.1}, {"num_iter": 2}, {"smoothing": 1.0}])
def test_arguments_that_make_no_sense_are_refused(args, tmp_path):
    with pytest.raises(ConfigError, match="find_lr: "):
        find_lr(quadratic(tmp_path), **args)


def test_the_sweep_can_be_drawn(tmp_path, monkeypatch):
    sweep = find_lr(quadratic(tmp_path), num_iter=20)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'hookline\[plot\]'"):
        sweep.plot("lr.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    sweep.plot(str(tmp_path / "lr.png"))
    assert (tmp_path / "lr.png").stat().st_size > 1000


def test_the_largest_batch_fits_into_the_memory_and_a_larger_one_does_not(tmp_path, monkeypatch, log):
    cfg = quadratic(tmp_path, "MODEL.NAME", f"{__name__}:Full", "DATALOADER.BATCH_SIZE", 10)
    with pytest.raises(ConfigError, match="on the CPU, limit the memory of the process first: ulimit"):
        find_batch_size(cfg)
    monkeypatch.setattr(find, "_memory_is_limited", lambda: True)
    assert find_batch_size(cfg, most=40) == 13
    assert "A batch of 20 samples does not fit: MemoryError" in log.text
    assert find_batch_size(cfg, most=12) == 12
    cfg.MODEL.NAME = f"{__name__}:Quadratic"
    assert find_batch_size(cfg, most=1000) == 70  # all samples
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited with ulimit")
def test_on_the_cpu_the_limit_of_the_process_counts(tmp_path):
    options = (
        'MODEL.NAME MLP MODEL.ARGS \'{"in_features": 8, "num_classes": 4, "hidden": [100000]}\' '
        "MODEL.LOSS.NAME CrossEntropyLoss MODEL.DEVICE cpu DATALOADER.BATCH_SIZE 4 "
        'DATASETS.TRAIN \'[{"NAME": "synthetic", "ARGS": {"size": 100000}}]\''
    )
    command = f"ulimit -v 8000000; {sys.executable} -m hookline find-batch-size --max-size 100000 {options}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "does not fit" in done.stdout
    assert 1 <= int(done.stdout.split()[-1]) < 100_000


def test_the_plot_shows_the_part_before_the_losses_explode(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    sweep = find_lr(quadratic(tmp_path), 1e-4, 1e4, num_iter=80, smoothing=0.5, stop_factor=None)
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
