"""Every item of a checkpoint is needed: a resume without any one of them differs.

Runs are killed in a save, after the new file is complete and before outdated ones are removed, and resumed: from the
unchanged file, then with one item replaced by that of a new run. The files of the runs are compared by name. For each
item :data:`CASES` names the file or value that must differ.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparing import frozen, left_behind
from sweep_parts import Samples
from torch import nn
from torch.utils.data import IterableDataset

from hookline.config import CfgNode, get_cfg
from hookline.engine import DefaultTrainer, seed_all_rng
from hookline.engine.checkpoint.files import write_checkpoint
from hookline.engine.checkpoint.weights import choose_weights
from hookline.engine.data import DATASET_REGISTRY, ShardedIterable
from hookline.engine.modeling import MODEL_REGISTRY
from hookline.hooks import HOOK_REGISTRY, HookBase
from hookline.hooks.functions import FunctionHook

KILLED_AT = 14  # the last iteration that the checkpoint knows of
SIZE = 30  # samples

# ---------------------------------------------------------------------- the runs


@MODEL_REGISTRY.register(name="StateItemsNet")
class Net(nn.Sequential):
    """Dropout before batch norm, so that recomputed statistics differ."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class Source:
    """Numbers in a new order each epoch, with a position that can be saved, and without a length."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(3 * SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.position < 3 * SIZE:
            self.position += 1
            yield order[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@DATASET_REGISTRY.register(name="state_items_stream")
def stream() -> ShardedIterable:
    return ShardedIterable(Source(), Samples().__getitem__)


@DATASET_REGISTRY.register(name="state_items_shares")
class Shares(IterableDataset):
    """A data set without a position, read by one process."""

    shares_itself_out = True

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield from map(Samples().__getitem__, range(200))


class Torchdata:
    """torchdata's loader over samples that draw from the run's generators."""

    def __init__(self) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.loader = StatefulDataLoader([(torch.full((8,), float(n)), n % 4) for n in range(SIZE)], 8, shuffle=True)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return {"torchdata": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["torchdata"])


class TorchdataTrainer(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Torchdata:
        return Torchdata()


SMALL = {
    "MODEL": {"NAME": "StateItemsNet", "LOSS": {"NAME": "CrossEntropyLoss"}, "DEVICE": "cpu"},
    "DATASETS": {"TRAIN": [{"NAME": "sweep_parts:Samples", "ARGS": {"size": SIZE}}]},
    "DATALOADER": {"BATCH_SIZE": 8},
    "SOLVER": {
        "OPTIMIZER": {"NAME": "AdamW", "ARGS": {"weight_decay": 0.01}},
        "BASE_LR": 0.01,
        "LR_SCHEDULER_NAME": "WarmupCosineLR",
        "WARMUP_ITERS": 4,
        "MAX_ITER": 24,
        "CHECKPOINT_PERIOD": 5,
    },
    "TEST": {"METRICS": ["Accuracy", "Loss"]},
    "LOG": {"PERIOD": 6, "WRITERS": ["JSONWriter"]},
    "CHECKPOINT": {"MAX_TO_KEEP": 2},
    "SEED": 3,
}
TESTED = {"TEST": [{"NAME": "synthetic", "ARGS": {"size": 16, "seed": 1}}]}


def averaging(name: str, **args: Any) -> dict[str, Any]:
    return {"NAME": name, "ARGS": {"start": 0.3, **args}}


# Changes to SMALL by name of the run. All but the last are killed at the same iteration.
SCENARIOS: dict[str, dict[str, Any]] = {
    "everything": {
        "DATASETS": TESTED,
        "SOLVER": {"MAX_ITER": "6ep", "AMP": {"ENABLED": True, "DTYPE": "float16"}},
        "TEST": {"EVAL_PERIOD": 3},
        "LOG": {"WRITERS": ["CommonMetricPrinter", "JSONWriter", "CSVWriter", "TensorboardXWriter"]},
        "CHECKPOINT": {"BEST": {"METRIC": "score", "KEEP": 2}},
        "HOOKS": [
            averaging("EMA", decay=0.9),
            {"NAME": "EarlyStopping", "ARGS": {"metric": "synthetic/accuracy", "patience": 6, "min_delta": 10.0}},
            # Every loss is a spike: the limit is far below the median.
            {"NAME": "LossSpike", "ARGS": {"window": 15, "factor": -1000.0}},
            {"NAME": "Throughput"},
            {"NAME": "FlopsCounter"},
        ],
    },
    "endless": {"DATALOADER": {"SAMPLER_TRAIN": "TrainingSampler", "ITERS_PER_EPOCH": 4}},
    "stream": {
        "DATASETS": {"TRAIN": ["state_items_stream"]},
        "DATALOADER": {"ITERS_PER_EPOCH": 7},
    },
    "torchdata": {"DATALOADER": {"ITERS_PER_EPOCH": 3}},
    "shares": {
        "DATASETS": {"TRAIN": ["state_items_shares"]},
        "HOOKS": [averaging("EMA", evaluate=False)],
    },
    "swa": {
        "DATASETS": TESTED,
        "SOLVER": {"MAX_ITER": "6ep"},
        "TEST": {"EVAL_PERIOD": 2},
        "HOOKS": [averaging("SWA", every=6)],
    },
    "swa, completed": {"HOOKS": [averaging("SWA", every=6)]},
}


class Killed(BaseException):
    """Simulates the kill of a process."""


def only_once(trainer: Any) -> None:
    trainer.find_hook(Watch).calls.append(trainer.iter)


class Watch(HookBase):
    """Draws random numbers, changes batches and settings during the run, and records values.

    What it does depends on the iteration alone: it has no state.
    """

    def __init__(self) -> None:
        self.batches: dict[int, Any] = {}
        self.draws: dict[int, Any] = {}
        self.rates: dict[int, Any] = {}
        self.epochs: dict[int, Any] = {}
        self.scales: dict[int, Any] = {}
        self.calls: list[int] = []

    def before_step(self) -> None:
        groups = self.trainer.optimizer.param_groups
        for group in groups if self.trainer.iter > 4 else ():  # a resume starts with the config's
            group["weight_decay"] = 0.1
        self.rates[self.trainer.iter] = [(group["lr"], group["weight_decay"]) for group in groups]

    def after_fetch(self, batch: Any) -> None:
        iteration = self.trainer.iter
        self.batches[iteration] = frozen(batch)
        draws = self.draws[iteration] = random.random(), float(np.random.rand()), float(torch.rand(()))
        batch[0].mul_(1 + 0.1 * sum(draws))

    def after_backward(self) -> None:
        if self.trainer.grad_scaler is not None and self.trainer.iter == 18:
            next(self.trainer.model.parameters()).grad.fill_(torch.inf)  # float16 could not hold it

    def after_step(self) -> None:
        trainer = self.trainer
        self.epochs[trainer.iter] = trainer.epoch, trainer.epoch_ended
        if trainer.iter % 2 == 0:
            trainer.storage.put_scalar("tick", trainer.iter, smoothing_hint=False)
        if trainer.grad_scaler is not None:
            self.scales[trainer.iter] = trainer.grad_scaler.get_scale()
        if trainer.iter == 4:
            self.change_settings()

    def change_settings(self) -> None:
        trainer = self.trainer
        trainer.scheduler.base_lrs = [lr / 2 for lr in trainer.scheduler.base_lrs]
        if trainer.grad_scaler is not None:
            trainer.grad_scaler.update(256.0)
            trainer.grad_scaler.set_growth_factor(4.0)
            trainer.grad_scaler.set_backoff_factor(0.25)
            trainer.grad_scaler.set_growth_interval(9)  # the scale has grown once when the run is killed

    def before_eval(self) -> None:
        # The first is the best.
        self.trainer.storage.put_scalar("score", 1 / (1 + self.trainer.iter), smoothing_hint=False)


def make(scenario: str, folder: Path, overrides: Iterable[Any] = ()) -> DefaultTrainer:
    """Build a trainer as a new process would."""
    cfg = get_cfg()
    for part in (SMALL, SCENARIOS[scenario], {"OUTPUT_DIR": str(folder)}):
        cfg.merge_from_other_cfg(CfgNode(part))
    cfg.merge_from_list(list(overrides))
    seed_all_rng(cfg.SEED)
    trainer = (TorchdataTrainer if scenario == "torchdata" else DefaultTrainer)(cfg)
    trainer.register_hooks([Watch(), FunctionHook(only_once, "after_step", once=True)])
    return trainer


def kill_in_save(trainer: DefaultTrainer) -> None:
    """Kill the run after it wrote a checkpoint and before it removes the outdated one."""
    remove = trainer.checkpointer.remove

    def remove_or_die(path: str) -> None:
        if os.path.basename(path) == "model_0000004.pth":
            raise Killed
        remove(path)

    trainer.checkpointer.remove = remove_or_die


# ---------------------------------------------------------------------- what a run did and left


def ending(trainer: DefaultTrainer, folder: Path, reason: str) -> dict[str, Any]:
    """Return everything that a run left, by name, and what it did after the kill."""
    watch, since = trainer.find_hook(Watch), partial(since_kill, trainer.start_iter)
    # A resumed run is in a copy of the killed run's folder: it keeps config.yaml, which names that folder, as .old.
    left = left_behind(folder, kept=r"config\.yaml\.old")
    state = left.pop("state")
    hooks = state["hooks"]
    return {
        **left,
        "error": None,
        "end": (reason, state["iteration"]),
        "rates": since(watch.rates),
        "batches": since(watch.batches),
        "draws": since(watch.draws),
        "epochs": since(watch.epochs),
        "scales": since(watch.scales),
        "calls": [iteration for iteration in watch.calls if iteration > KILLED_AT],
        "scaler": frozen(state.get("grad_scaler")),
        "position": frozen(state["data"]),
        "early stopping": hooks.get("EarlyStopping"),
        "spikes": hooks.get("LossSpike"),
        "best": hooks.get("BestCheckpointer"),
        "kept": hooks["PeriodicCheckpointer"],
    }


def since_kill(start: int, notes: dict[int, Any]) -> dict[int, Any]:
    """Return the part of a run from the start that the resumed run repeats; of a resumed run, all."""
    return {iteration: note for iteration, note in notes.items() if start or iteration > KILLED_AT}


# ---------------------------------------------------------------------- running, killing and resuming them


class Runs:
    """Runs that several tests use, each trained once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self._killed: dict[str, Path] = {}
        self._resumed: dict[tuple[Any, ...], dict[str, Any]] = {}

    def new(self) -> Path:
        self.number += 1
        return self.folder / str(self.number)

    def whole(self, scenario: str) -> dict[str, Any]:
        folder = self.new()
        trainer = make(scenario, folder)
        reason = trainer.train().reason
        return ending(trainer, folder, reason)

    def killed(self, scenario: str) -> Path:
        """Return the folder of a killed run, or of a complete one to be extended."""
        if scenario not in self._killed:
            folder = self._killed[scenario] = self.new()
            trainer = make(scenario, folder)
            if "completed" in scenario:
                trainer.train()
            else:
                kill_in_save(trainer)
                with pytest.raises(Killed):
                    trainer.train()
        return self._killed[scenario]

    def file(self, scenario: str) -> Path:
        """Return the checkpoint that the resume loads."""
        folder = self.killed(scenario)
        return folder / (folder / "last_checkpoint").read_text()

    def checkpoint(self, scenario: str) -> dict[str, Any]:
        return torch.load(self.file(scenario), weights_only=True)

    def resumed(self, scenario: str, overrides: tuple[Any, ...] = ()) -> dict[str, Any]:
        key = (scenario, overrides)
        if key not in self._resumed:
            self._resumed[key] = self.resume(scenario, overrides, lambda checkpoint, fresh: None)
        return self._resumed[key]

    def resume(self, scenario: str, overrides: tuple[Any, ...], edit: Callable[[Any, Any], None]) -> dict[str, Any]:
        """Resume a copy of a killed run after ``edit(checkpoint, state of a new run)``."""
        folder = self.new()
        shutil.copytree(self.killed(scenario), folder, symlinks=True)
        trainer = make(scenario, folder, overrides)
        checkpoint = self.checkpoint(scenario)
        edit(checkpoint, {"model": trainer.model.state_dict(), "trainer": trainer.state_dict()})
        with open(folder / self.file(scenario).name, "w+b") as file:
            write_checkpoint(file, checkpoint)
        taken = choose_weights(checkpoint, "auto")[1]
        try:
            trainer.resume_or_load(resume=True)
            reason = trainer.train().reason
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "taken": taken}
        return {**ending(trainer, folder, reason), "taken": taken}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


# ---------------------------------------------------------------------- the items


@dataclass(frozen=True)
class Case:
    """How a missing item is detected.

    Attributes:
        shows: the name of what is then different, see :func:`ending`.
        fresh: makes what a new run has in its place, of the checkpoint; by default the new run's own state is asked.
        scenario: the run.
        overrides: what is changed in the config of the run that resumes, where the item is there for that.
    """

    shows: str
    fresh: Callable[[dict[str, Any]], Any] | None = None
    scenario: str = "everything"
    overrides: tuple[Any, ...] = ()


def absent(checkpoint: dict[str, Any]) -> Any:
    """A value that a new run does not have."""
    return absent


def always(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda checkpoint: value


def models(checkpoint: dict[str, Any]) -> Any:
    """The average of a new run: the model's weights."""
    return checkpoint["model"]


CASES: dict[str, Case] = {
    "model": Case("weights"),
    "trainer/iteration": Case("rates"),
    "trainer/optimizer/state": Case("weights"),
    "trainer/grad_scaler/scale": Case("scales"),
    "trainer/grad_scaler/growth_factor": Case("scales"),
    "trainer/grad_scaler/backoff_factor": Case("scales"),
    "trainer/grad_scaler/growth_interval": Case("scales"),
    "trainer/grad_scaler/_growth_tracker": Case("scales"),
    "trainer/rng/python": Case("draws"),
    "trainer/rng/numpy": Case("draws"),
    "trainer/rng/torch": Case("draws"),
    # Position in the data
    "trainer/data/epoch": Case("batches"),
    "trainer/data/samples": Case("batches"),
    "trainer/data/position": Case("epochs", scenario="endless"),
    "trainer/data/batch_size": Case("epochs", absent, "endless", ("DATALOADER.BATCH_SIZE", 16)),
    "trainer/data/pass": Case("batches", scenario="stream"),
    "trainer/data/loader/epoch": Case("batches", scenario="stream"),
    "trainer/data/loader/samples": Case("batches", scenario="shares"),
    "trainer/data/loader/source": Case("batches", always({"position": 0}), "stream"),  # None: read again
    "trainer/data/loader/torchdata": Case("batches", scenario="torchdata"),
    "trainer/data/skipped": Case("batches", scenario="torchdata"),
    # Metrics
    "trainer/storage/histories": Case("rows", always({})),
    "trainer/storage/smoothing_hints": Case("error", always({})),
    "trainer/storage/number": Case("rows", always(0)),
    "trainer/hooks/PeriodicWriter/seen": Case("rows"),
    "trainer/hooks/PeriodicWriter/last_write": Case("rows"),
    "trainer/hooks/FlopsCounter/total": Case("rows", always(0.0)),
    "trainer/hooks/FlopsCounter/flops": Case("rows", always(None)),
    "trainer/hooks/FlopsCounter/counted_for": Case("rows", absent),
    # Hooks
    "trainer/hooks/LRScheduler/base_lrs": Case("rates"),
    "trainer/hooks/LRScheduler/last_epoch": Case("rates"),
    "trainer/hooks/PeriodicCheckpointer/recent_checkpoints": Case("files"),
    "trainer/hooks/BestCheckpointer/best": Case("best"),
    "trainer/hooks/EarlyStopping/best": Case("early stopping"),
    "trainer/hooks/EarlyStopping/count": Case("end"),
    "trainer/hooks/LossSpike/values": Case("spikes"),
    "trainer/hooks/LossSpike/limit": Case("spikes"),
    "trainer/hooks/LossSpike/age": Case("spikes"),
    "trainer/hooks/LossSpike/count": Case("spikes"),
    "trainer/hooks/@on(after_step) only_once/done": Case("calls"),
    "trainer/hooks/EMA/averaged_model": Case("averages", models),
    "trainer/hooks/EMA/updates": Case("averages", always(0)),
    "trainer/hooks/EMA/evaluate": Case("taken", absent, "shares"),
    "trainer/hooks/SWA/averaged_model": Case("averages", models, "swa"),
    "trainer/hooks/SWA/updates": Case("averages", always(0), "swa"),
    "trainer/hooks/SWA/statistics_of": Case("rows", absent, "swa"),
    "trainer/hooks/SWA/final": Case("error", absent, "swa, completed", ("SOLVER.MAX_ITER", 30)),
    # What the run was built from, for a resume with other parts
    "trainer/run/config": Case("rates", overrides=("SOLVER.BASE_LR", 0.1)),
    "trainer/run/kinds": Case("error", overrides=("SOLVER.OPTIMIZER.NAME", "SGD")),
    "trainer/run/epochs": Case("end", None, "swa", ("DATALOADER.BATCH_SIZE", 4)),
}
"""What shows that an item is missing, by the item: its keys in the checkpoint, with slashes between."""

COPIES = {
    "iteration": "trainer/iteration",
    "trainer/hooks/BestCheckpointer/best_metric": "trainer/hooks/BestCheckpointer/best/0/0",
    "trainer/hooks/BestCheckpointer/best_iter": "trainer/hooks/BestCheckpointer/best/0/1",
}
"""Copies of other items, where detectron2 looks for them."""

ELSEWHERE = {
    *("trainer/hooks/RollingCheckpointer", "trainer/hooks/BestCheckpointer/written"),  # tests/hooks/builtin
    "trainer/hooks/BestCheckpointer/metric",
    "trainer/hooks/LRScheduler/last_lr",  # tests/hooks/builtin/test_lr_scheduler.py: rates that a hook sets
    # tests/hooks/writers/test_tensorboard.py
    *("trainer/storage/images", "trainer/storage/histograms", "trainer/storage/texts", "trainer/storage/evaluated"),
    "trainer/rng_of_ranks",  # tests/distributed/test_training.py
    "trainer/nonfinite",  # tests/engine/step/test_nonfinite.py
    # tests/engine/checkpoint/test_differences.py: with a schedule of torch; ours sets the rates again
    "trainer/optimizer/param_groups",
    # tests/engine/checkpoint/test_differences.py
    *("trainer/complete", "trainer/run/length", "trainer/run/results", "trainer/run/world_size", "trainer/run/samples"),
}
"""Items that matter only with several processes, loader workers or another config, and where they are tested."""


def items(state: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the items of a checkpoint: those listed above, and all leaves."""
    for key, value in state.items():
        here = f"{path}/{key}" if path else key
        if here not in CASES and here not in ELSEWHERE and isinstance(value, dict):
            yield from items(value, here)
        else:
            yield here


def look_up(state: Any, path: str) -> Any:
    for key in path.split("/"):
        state = state[key] if isinstance(state, dict) else state[int(key)]
    return state


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if "completed" not in name])
def test_a_killed_and_resumed_run_leaves_the_same_files_as_an_uninterrupted_one(runs, scenario):
    whole, resumed = runs.whole(scenario), runs.resumed(scenario)
    for name in whole:
        assert resumed[name] == whole[name], name


# Every third item, and the slow ones the others.
ITEMS = [pytest.param(item, marks=pytest.mark.slow if number % 3 else ()) for number, item in enumerate(CASES)]


@pytest.mark.parametrize("item", ITEMS)
def test_a_resume_without_any_one_item_differs(runs, item):
    case = CASES[item]

    def leave_out(checkpoint: dict[str, Any], new: dict[str, Any]) -> None:
        value = look_up(new, item) if case.fresh is None else case.fresh(checkpoint)
        *above, key = item.split("/")
        owner = look_up(checkpoint, "/".join(above)) if above else checkpoint
        assert frozen(owner[key]) != frozen(value), "there is nothing to be left out"
        if value is absent:
            del owner[key]
        else:
            owner[key] = value

    complete = runs.resumed(case.scenario, case.overrides)
    lacking = runs.resume(case.scenario, case.overrides, leave_out)
    assert lacking["error"] is None or case.shows == "error", lacking["error"]
    assert lacking[case.shows] != complete[case.shows]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_there_is_a_case_for_every_item_of_a_checkpoint(runs, scenario):
    known = CASES.keys() | COPIES.keys() | ELSEWHERE
    assert set(items(runs.checkpoint(scenario))) <= known


def test_copies_of_items_equal_them(runs):
    checkpoint = runs.checkpoint("everything")
    for item, original in COPIES.items():
        assert look_up(checkpoint, item) == look_up(checkpoint, original), item


def test_every_registered_hook_with_state_is_covered(runs):
    states = [runs.checkpoint(scenario)["trainer"]["hooks"] for scenario in SCENARIOS]
    saved = {key for hooks in states for key in hooks}
    ours = {
        entry.__name__
        for _, entry in HOOK_REGISTRY  # other tests register classes too
        if entry.__module__.startswith("hookline.") and entry.state_dict is not HookBase.state_dict
    }
    saved |= {item.split("/")[-1] for item in ELSEWHERE if item.startswith("trainer/hooks/")}
    assert {name for name in ours if not name.startswith("_")} <= saved
