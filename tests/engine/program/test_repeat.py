"""A replayed step equals the run's to the bit, names its samples, and leaves the run's files as they were."""

import random
import re

import pytest
from ranks import rows
from small_runs import config_trainer
from starts import contents

from hookline.config import ConfigError
from hookline.engine.program import replay
from hookline.engine.program.repeat import report_text
from hookline.engine.program.samples import samples_at
from hookline.hooks import CallbackHook

from .test_diverge import Images

RUN = (
    *("LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 1, "LOG.PROGRESS_BAR", False, "SOLVER.MAX_ITER", 11),
    *("TEST.EVAL_PERIOD", 5, "CHECKPOINT.BEST.METRIC", "synthetic/accuracy", "SOLVER.CHECKPOINT_PERIOD", 4),
)


class Jittered(Images):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + random.random(), label


JITTERED = ("DATASETS.TRAIN", [f"{__name__}:Jittered"])
ENDLESS = ("DATALOADER.SAMPLER_TRAIN", "TrainingSampler", "DATALOADER.LIMIT_TRAIN_BATCHES")


def slow(*options):
    return pytest.param(options, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "options",
    [
        JITTERED,
        ("SOLVER.ACCUMULATION_STEPS", 2, "HOOKS", [{"NAME": "EMA", "ARGS": {"decay": 0.9}}]),
        slow("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.DTYPE", "bfloat16", "CHECKPOINT.MAX_TO_KEEP", 1),
        slow(*ENDLESS, 0),
        slow(*ENDLESS, 3),
    ],
    ids=["augmentation", "accumulation-ema", "bfloat16", "endless", "endless-limited"],
)
def test_a_replay_equals_the_run_to_the_bit_and_changes_none_of_its_files(tmp_path, options):
    config_trainer(tmp_path, *RUN, *options).train()
    before, row = (
        contents(tmp_path, ".hookline", "replay_"),
        next(row for row in rows(tmp_path) if row["iteration"] == 10),
    )
    report = replay(str(tmp_path), 10)
    assert report["checkpoint"] == "model_0000007.pth"
    assert report["compared"]["first_difference"] is None
    assert "SOLVER.ACCUMULATION_STEPS" in options or report["losses"]["loss"] == [row["loss"]]
    assert report["modules"]
    assert report["compared"]["values"] > 8
    assert [sample["index"] for sample in report["samples"]] == samples_at(str(tmp_path), 10)
    assert contents(tmp_path, ".hookline", "replay_") == before
    assert [path.name for path in (tmp_path / "replay_10").iterdir()] == ["report.json"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose files no test changes."""
    folder = tmp_path_factory.mktemp("run")
    config_trainer(folder, *RUN, *JITTERED).train()
    (folder / "log.txt.rank1").touch()
    return folder


def test_a_changed_config_is_found_in_the_metrics_of_a_replay(run):
    report = replay(str(run), 2)
    assert (report["checkpoint"], report["compared"]["first_difference"]) == ("", None)
    report = replay(str(run), 2, overrides=["SOLVER.BASE_LR", 0.2])
    difference = report["compared"]["first_difference"]
    assert (difference["iteration"], difference["metric"]) == (0, "lr")
    assert "config: SOLVER.BASE_LR 0.2" in report_text(report)
    assert re.search(r"the run: torch .*, ranks: 2\n  now: torch .*, ranks: 1", report_text(report))


def test_a_hook_takes_part_in_the_replay_only(run):
    steps = []
    replay(str(run), 9, extra_hooks=[CallbackHook(after_step=lambda trainer: steps.append(trainer.iter))])
    assert steps == [8, 9]


def test_files_of_the_user_stay(run):
    (run / "replay_5").mkdir()
    (run / "replay_5" / "notes.txt").write_text("mine")
    (run / "replay_4").write_text("mine")
    for iteration in (4, 5):
        with pytest.raises(ConfigError, match=f"replay_{iteration}: has files"):
            replay(str(run), iteration)
