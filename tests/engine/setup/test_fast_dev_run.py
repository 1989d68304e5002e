"""A run of one step and one evaluation, which leaves no files."""

import pytest

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, default_argument_parser, default_setup
from hookline.hooks import CallbackHook


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("MODEL.NAME", "MLP", "MODEL.DEVICE", "cpu", "MODEL.LOSS.NAME", "CrossEntropyLoss"),
            *("MODEL.ARGS", {"in_features": 8, "num_classes": 4}, "OUTPUT_DIR", "run", "SEED", 1),
            *("DATASETS.TRAIN", ["synthetic"], "DATASETS.TEST", ["synthetic"], "TEST.METRICS", ["Accuracy"]),
            *("SOLVER.MAX_ITER", "9ep", "SOLVER.WARMUP_ITERS", "1ep", "SOLVER.STEPS", ("3ep",)),
            *("TEST.EVAL_PERIOD", "1ep", "CHECKPOINT.BEST.METRIC", "synthetic/accuracy"),
            *("TEST.EXPECTED_RESULTS", [["synthetic", "accuracy", 0.99, 0.01]]),
            *("HOOKS", [{"NAME": "EarlyStopping", "ARGS": {"metric": "synthetic/accuracy"}}]),
        ]
    )
    return cfg


@pytest.mark.parametrize("steps", [1, 3])
def test_it_takes_so_many_steps_and_batches_and_writes_nothing(cfg, tmp_path, steps):
    seen = []

    class Trainer(DefaultTrainer):
        def build_hooks(self):
            events = ("after_step", "after_epoch", "after_eval_step", "after_save")
            record = {event: lambda *_, event=event: seen.append(event) for event in events}
            return [*super().build_hooks(), CallbackHook(**record)]

    cfg.FAST_DEV_RUN = steps
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    result = trainer.train()
    assert (result.reason, result.iteration) == ("completed", steps)
    assert "synthetic/accuracy" in result.metrics
    assert seen == ["after_step"] * steps + ["after_epoch"] + ["after_eval_step"] * steps
    assert not list(tmp_path.iterdir())


def test_the_option_sets_the_key(cfg, tmp_path):
    cfg.freeze()
    default_setup(cfg, default_argument_parser().parse_args(["--fast-dev-run"]))
    assert cfg.FAST_DEV_RUN == 1
    assert DefaultTrainer(cfg).train().iteration == 1
    assert not list(tmp_path.iterdir())


def test_it_is_no_resumed_run(cfg):
    with pytest.raises(ConfigError, match="FAST_DEV_RUN: tries a new run, so leave out --resume"):
        default_setup(cfg, default_argument_parser().parse_args(["--fast-dev-run", "--resume"]))


def test_the_config_is_checked_as_that_of_a_run(cfg):
    cfg.FAST_DEV_RUN = 1
    cfg.CHECKPOINT.BEST.METRIC = "synthetic/acuracy"
    with pytest.raises(ConfigError, match="did you mean 'synthetic/accuracy'"):
        DefaultTrainer(cfg)
