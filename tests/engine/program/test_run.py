"""Scripts that end with run(Trainer, args), and scripts that ignore options."""

import json
import os
import re
import sys

import pytest
import torch
from snippets import run_python
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


def test_a_dry_run_and_a_trial_write_nothing(start, tmp_path):
    text = start("--dry-run")
    assert "Steps" in text
    assert "MINE.CLASSES" in text
    assert Steps.count == 0
    assert start("--fast-dev-run").reason == "completed"
    assert Steps.count == 1
    assert os.listdir(tmp_path) == ["mine.yaml"]


def test_keys_of_the_project_are_set_on_the_command_line(start, tmp_path, capsys):
    base = project_config()
    start("MINE.CLASSES", 5, cfg=base)
    assert base.MINE.CLASSES == 4
    assert torch.load(tmp_path / "out" / "model_final.pth", weights_only=True)["model"]["weight"].shape == (5, 8)
    with pytest.raises(SystemExit) as end:
        start("MINE.CLASES", 5)
    assert end.value.code == 2
    assert "did you mean 'MINE.CLASSES'?" in capsys.readouterr().err


def test_a_frozen_config_is_complete(start):
    cfg = project_config()
    cfg.merge_from_file("mine.yaml")
    cfg.SOLVER.MAX_ITER = 2
    cfg.freeze()
    assert start("SOLVER.MAX_ITER", 3, cfg=cfg).iteration == 2


def test_options_of_the_script_and_missing_ones(tmp_path, start):
    parser = default_argument_parser()
    parser.add_argument("--classes", type=int)
    args = parser.parse_args(["--config-file", "mine.yaml", "--classes", "6"])
    args.opts += ["MINE.CLASSES", args.classes]
    del args.predict, args.dist_url
    run(Trainer, args, project_config())
    assert torch.load(tmp_path / "out" / "model_final.pth", weights_only=True)["model"]["weight"].shape == (6, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--eval-only", "--predict"], "--eval-only and --predict: choose one"),
        (["--eval-only"], "MODEL.WEIGHTS: is not set; give the weights to evaluate"),
        (["--predict", "--resume"], "there is no checkpoint in out"),
        (["--eval-only", "--resume", "DATASETS.TEST", "()"], "DATASETS.TEST: is empty"),
        (["DATASETS.TRAIN", "()"], "DATASETS.TRAIN: is not set"),
        (["--num-gpus", "0"], "--num-gpus 0"),
        (["--num-gpus", "2", "--num-machines", "2", "--machine-rank", "2"], "--machine-rank 2"),
    ],
)
def test_wrong_options_end_with_one_line(start, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as end:
        start(*words)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == ["mine.yaml"]


@pytest.mark.parametrize("words", [(), ("--eval-only", "MODEL.WEIGHTS", "x"), ("--predict", "MODEL.WEIGHTS", "x")])
def test_an_unknown_name_is_one_line(start, capsys, words):
    with pytest.raises(SystemExit):
        start(*words, "SOLVER.OPTIMIZER.NAME", "Foo")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: SOLVER.OPTIMIZER.NAME: unknown optimizer 'Foo'. Known: ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("wrong", [object(), nn.Linear, "Trainer"])
def test_something_else_than_a_trainer_class_is_refused(start, capsys, wrong):
    with pytest.raises(SystemExit):
        run(wrong, default_argument_parser().parse_args([]))
    assert "trainer is DefaultTrainer or a subclass" in capsys.readouterr().err


# ---------------------------------------------------------------------------- a step of the run again


def test_a_step_is_replayed_with_the_scripts_trainer_and_keys(start, tmp_path, capsys):
    start()
    before = contents(tmp_path / "out")
    capsys.readouterr()
    for opts in ([], ["SOLVER.BASE_LR=0.5"]):
        start("--config-file", "out/config.yaml", "--replay", 2, *opts)
        report = json.loads((tmp_path / "out" / "replay_2" / "report.json").read_text())
        assert report["compared"]["first_difference"] is None
        assert report["overrides"] == (["SOLVER.BASE_LR", "0.5"] if opts else [])
        assert "replay_2/report.json" in capsys.readouterr().out
    after = contents(tmp_path / "out")
    assert {name: after[name] for name in before if "hookline" not in name} == {
        name: content for name, content in before.items() if "hookline" not in name
    }


def test_the_samples_of_a_step_are_those_of_the_scripts_loader(start, capsys):
    start()
    capsys.readouterr()
    start("--samples", 0)
    start("--samples", 1)
    assert sorted(map(int, capsys.readouterr().out.split())) == list(range(64))  # two steps are an epoch


@pytest.mark.parametrize("command", [["replay", "out", "--iter", "2"], ["samples", "out", "--iter", "2"]])
def test_the_command_for_a_run_with_keys_of_its_own_names_the_way(start, capsys, command):
    start()
    with pytest.raises(SystemExit, match="2"):
        main(command)
    error = capsys.readouterr().err
    assert "unknown key 'MINE.CLASSES'" in error
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


SCRIPT = """
from hookline.engine import DefaultTrainer, comm, default_argument_parser, run
from torch import nn

class Trainer(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg):
        print("rank", comm.get_rank(), "of", comm.get_world_size(), flush=True)
        return nn.Linear(8, 4)

if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    run(Trainer, args)
"""


@pytest.mark.slow
def test_a_script_of_two_lines_starts_ranks(tmp_path):
    (tmp_path / "mine.yaml").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    for option in ((), ("--eval-only", "--resume")):
        done = run_python(["script.py", "--config-file", "mine.yaml", "--num-gpus", "2", *option], tmp_path)
        assert done.returncode == 0, done.stderr
        assert {"rank 0 of 2", "rank 1 of 2"} <= set(done.stdout.splitlines())
    assert "accuracy" in done.stdout


# ---------------------------------------------------------------------------- scripts in detectron2's style


def careless(words, sets_up=True, resumes=True, own=()):
    """A script that parses all options and handles --resume only, or not even that.

    Args:
        words: its command line.
        sets_up, resumes: what it does.
        own: names of options that it adds itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["script.py", "--config-file", "mine.yaml", *words])
        parser = default_argument_parser()
        for name in own:
            parser.add_argument(name, nargs="?", const=1)
        args = parser.parse_args()
        cfg = project_config()
        cfg.merge_from_file(args.config_file)
        cfg.merge_from_list(args.opts)
        if sets_up:
            default_setup(cfg, args)
        trainer = Trainer(cfg)
        if resumes is not None:
            trainer.resume_or_load(resume=args.resume and resumes)
        return trainer.train()


@pytest.mark.parametrize("sets_up", [True, False])
@pytest.mark.parametrize(
    "option", ["--eval-only", "--predict", "--replay=0", "--dry-run", "--num-gpus=2", "--num-machines=2"]
)
def test_a_script_that_ignores_an_option_does_not_train(start, tmp_path, option, sets_up):
    start()
    before = contents(tmp_path)
    steps = Steps.count
    with pytest.raises(ValueError, match=rf"{option.partition('=')[0]}.*run\(Trainer, args\)"):
        careless([option], sets_up)
    after = contents(tmp_path)
    assert after.pop("out/log.txt", b"").startswith(before.pop("out/log.txt"))
    assert after == before
    assert Steps.count == steps


def test_a_script_without_default_setup_does_not_ignore_a_trial(start):
    with pytest.raises(ValueError, match="--fast-dev-run: "):
        careless(["--fast-dev-run"], sets_up=False)
    assert careless([], sets_up=False).iteration == 4


@pytest.mark.parametrize("resumes", [False, None])  # None: it loads nothing
@pytest.mark.parametrize("sets_up", [True, False])
def test_a_script_that_ignores_resume_does_not_replace_the_run(start, tmp_path, sets_up, resumes):
    start()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"--resume: .*resume_or_load\(resume=args.resume\)"):
        careless(["--resume"], sets_up, resumes)
    assert contents(tmp_path) == before
    assert careless(["--resume", "SOLVER.MAX_ITER", "5"], sets_up).iteration == 5


@pytest.mark.parametrize("option", ["--eval-only", "--predict", "--dry-run", "--fast-dev-run", "--resume", "--mfu"])
def test_an_option_that_the_script_adds_itself_is_the_scripts(start, option):
    start()
    assert careless([option], sets_up=False, resumes=None, own=[option]).iteration == 4


def test_a_command_line_is_that_of_its_own_run_only(start):
    start()
    with pytest.raises(ValueError, match="--resume: ") as earlier:  # keeps the arguments alive
        careless(["--resume"], sets_up=False, resumes=None)
    cfg = project_config()
    cfg.merge_from_file("mine.yaml")
    assert Trainer(cfg).train().iteration == 4
    assert earlier.tb
