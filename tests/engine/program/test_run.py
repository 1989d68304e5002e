"""Scripts that end with run(Trainer, args), and scripts that ignore options."""

import json
import os
import re
import sys

import pytest
import torch
from starts import contents
from torch import nn

from hookline.cli import main
from hookline.config import CfgNode, get_cfg
from hookline.engine import DefaultTrainer, default_argument_parser, default_setup, run
from hookline.hooks import CallbackHook, HookBase

CONFIG = """
DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {size: 64}}], TEST: [{NAME: synthetic, ARGS: {size: 32, seed: 1}}]}
DATALOADER: {BATCH_SIZE: 32}
MODEL: {LOSS: {NAME: CrossEntropyLoss}, DEVICE: cpu}
SOLVER: {MAX_ITER: 4, WARMUP_ITERS: 0, STEPS: []}
TEST: {METRICS: [Accuracy]}
LOG: {WRITERS: [JSONWriter]}
OUTPUT_DIR: out
SEED: 1
"""


class Steps(HookBase):
    """Counts the steps of all runs of the test."""

    count = 0

    def after_step(self) -> None:
        Steps.count += 1


class Trainer(DefaultTrainer):
    """Its model has no name in the config, but a key of the project."""

    @classmethod
    def build_model(cls, cfg):
        return nn.Linear(8, cfg.MINE.CLASSES)

    def build_hooks(self):
        return [*super().build_hooks(), Steps()]


def project_config():
    cfg = get_cfg()
    cfg.MINE = CfgNode({"CLASSES": 4})
    return cfg


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Run the script with a command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Steps, "count", 0)
    (tmp_path / "mine.yaml").write_text(CONFIG)

    def start(*words, cfg=None):
        args = default_argument_parser().parse_args(["--config-file", "mine.yaml", *map(str, words)])
        return run(Trainer, args, project_config() if cfg is None else cfg)

    return start


def test_a_trainer_of_ones_own_trains_resumes_evaluates_and_predicts(start, tmp_path, capsys):
    assert start().reason == "completed"
    before = (tmp_path / "out" / "metrics.json").read_bytes()
    weights = torch.load(tmp_path / "out" / "model_final.pth", weights_only=True)["model"]
    assert weights["weight"].shape == (4, 8)
    assert Steps.count == 4

    accuracy = json.loads(before.splitlines()[-1])["synthetic/accuracy"]
    results = start("--eval-only", "--resume")
    assert results["synthetic"]["accuracy"] == pytest.approx(accuracy)
    assert re.search(rf"synthetic +accuracy +{accuracy:.5g}\n", capsys.readouterr().out)
    (path,) = start("--predict", "MODEL.WEIGHTS", "out/model_final.pth")
    assert len((tmp_path / path).read_text().splitlines()) == 32
    assert Steps.count == 4
    assert (tmp_path / "out" / "metrics.json").read_bytes() == before

    assert start("--resume", "SOLVER.MAX_ITER", 6).reason == "completed"
    assert Steps.count == 6


def test_a_dry_run_writes_nothing(start, tmp_path):
    text = start("--dry-run")
    assert "Steps" in text
    assert "MINE.CLASSES" in text
    assert Steps.count == 0
    assert os.listdir(tmp_path) == ["mine.yaml"]


def test_an_evaluation_of_nothing_or_with_wrong_metrics_changes_nothing(start, tmp_path, capsys):
    for option in ("--eval-only", "--predict"):
        with pytest.raises(SystemExit, match="2"):
            start(option, "--resume", "OUTPUT_DIR", "new/folder")
        assert "there is no complete checkpoint in new/folder" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["mine.yaml"]
    start()
    before = contents(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        start("--eval-only", "--resume", "TEST.METRICS", ["Accuracy", "Accuracy"])
    assert "already a metric named 'accuracy'" in capsys.readouterr().err
    assert contents(tmp_path) == before
    start("--predict", "--resume", "TEST.METRICS", ["Accuracy", "Accuracy"])  # which needs no metrics


def classes(tmp_path):
    return torch.load(tmp_path / "out" / "model_final.pth", weights_only=True)["model"]["weight"].shape[0]


def test_keys_and_options_of_the_project_are_set_on_the_command_line(start, tmp_path):
    base = project_config()
    start("MINE.CLASSES", 5, cfg=base)
    assert base.MINE.CLASSES == 4
    assert classes(tmp_path) == 5
    parser = default_argument_parser()
    parser.add_argument("--classes", type=int)
    args = parser.parse_args(["--config-file", "mine.yaml", "--classes", "6"])
    args.opts += ["MINE.CLASSES", args.classes]
    del args.predict, args.dist_url  # a parser of one's own may lack some
    run(Trainer, args, project_config())
    assert classes(tmp_path) == 6


def test_a_class_that_is_no_trainer_ends_with_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        run(nn.Linear, default_argument_parser().parse_args([]))
    assert re.fullmatch("error: .*is DefaultTrainer or a subclass.*\n", capsys.readouterr().err)


def test_a_step_is_replayed_with_the_scripts_trainer_keys_and_samples(start, tmp_path, capsys):
    start()
    capsys.readouterr()
    for opts in ([], ["SOLVER.BASE_LR=0.5"]):
        start("--config-file", "out/config.yaml", "--replay", 2, *opts)
        report = json.loads((tmp_path / "out" / "replay_2" / "report.json").read_text())
        assert report["compared"]["first_difference"] is None
        assert report["overrides"] == (["SOLVER.BASE_LR", "0.5"] if opts else [])
        assert "replay_2/report.json" in capsys.readouterr().out
    start("--samples", 0)
    start("--samples", 1)
    assert sorted(map(int, capsys.readouterr().out.split())) == list(range(64))  # two steps are an epoch
    for command in ("replay", "samples"):  # which do not know the project's keys
        with pytest.raises(SystemExit, match="2"):
            main([command, "out", "--iter", "2"])
        error = capsys.readouterr().err
        assert "MINE.CLASSES" in error
        assert "python SCRIPT --config-file out/config.yaml with --replay N or --samples N" in error


def test_an_error_names_the_script_that_replays_its_step(start, monkeypatch):
    class Fails(Trainer):
        def build_hooks(self):
            def fail(trainer):
                if trainer.iter == 2:
                    raise RuntimeError("bad")

            return [*super().build_hooks(), CallbackHook(after_step=fail)]

    start()
    monkeypatch.setattr(sys, "argv", ["my_train.py"])
    with pytest.raises(RuntimeError, match="bad") as info:
        run(Fails, default_argument_parser().parse_args(["--config-file", "mine.yaml"]), project_config())
    *_, note = info.value.__notes__
    assert re.fullmatch(r"look at this step: python my_train.py --config-file \S*out/config.yaml --replay 2", note)


def careless(words, resumes=True):
    """A script that parses all options and handles --resume only, or not even that.

    Args:
        words: its command line.
        resumes: whether it handles --resume; None: it loads nothing.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["script.py", "--config-file", "mine.yaml", *words])
        args = default_argument_parser().parse_args()
        cfg = project_config()
        cfg.merge_from_file(args.config_file)
        cfg.merge_from_list(args.opts)
        default_setup(cfg, args)
        trainer = Trainer(cfg)
        if resumes is not None:
            trainer.resume_or_load(resume=args.resume and resumes)
        return trainer.train()


def test_a_script_that_ignores_an_option_does_not_train(start, tmp_path):
    start()
    before, steps = contents(tmp_path), Steps.count
    log = before.pop("out/log.txt")
    for option in ("--eval-only", "--predict", "--replay=0", "--dry-run", "--num-gpus=2", "--num-machines=2"):
        with pytest.raises(ValueError, match=rf"{option.partition('=')[0]}.*run\(Trainer, args\)"):
            careless([option])
        after = contents(tmp_path)
        assert after.pop("out/log.txt").startswith(log)
        assert after == before
    assert Steps.count == steps


def test_a_script_that_ignores_resume_does_not_replace_the_run(start, tmp_path):
    start()
    before = contents(tmp_path)
    for resumes in (False, None):  # None: it loads nothing
        with pytest.raises(ValueError, match=r"--resume: .*resume_or_load\(resume=args.resume\)"):
            careless(["--resume"], resumes)
        assert contents(tmp_path) == before
    assert careless(["--resume", "SOLVER.MAX_ITER", "5"]).iteration == 5
