"""The command line of tools/lazyconfig_train_net.py."""

import json
import logging
import runpy
import sys
from pathlib import Path

import pytest
import torch
from snippets import run_python

pytest.importorskip("omegaconf")

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "lazyconfig_train_net.py"
CONFIG = ROOT / "configs" / "synthetic" / "mlp_lazy.py"
SHORT = ("train.max_iter=20", "train.log_period=5", "train.eval_period=10", "train.checkpointer.period=10")


@pytest.fixture(autouse=True)
def logging_is_put_back():
    loggers = [logging.getLogger(name) for name in ("hookline", "fvcore", "detectron2")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def tool(tmp_path, monkeypatch, capfd):
    """Run the tool in this process; returns its exit code, standard output and standard error."""

    def run(*arguments, config=CONFIG):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(TOOL), "--config-file", str(config), *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            runpy.run_path(str(TOOL), run_name="__main__")
        except SystemExit as end:
            code = end.code
        logging.getLogger("hookline").handlers.clear()
        return code, *capfd.readouterr()

    return run


def weights(path):
    return torch.load(path, weights_only=True)["model"]


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def losses(folder):
    return [row["total_loss"] for row in rows(folder) if "total_loss" in row]


def test_a_lazy_config_trains_resumes_and_evaluates(tool, tmp_path):
    code, out, err = tool(*SHORT, "train.output_dir=run")
    assert (code, err) == (0, "")
    whole = rows(tmp_path / "run")
    assert [row["iteration"] for row in whole] == [4, 9, 14, 19, 20]
    before = losses(tmp_path / "run")
    assert whole[-1]["synthetic/accuracy"] > 0.4
    assert "completed" in out

    # As if it had been killed after its first checkpoint.
    (tmp_path / "run/model_final.pth").rename(tmp_path / "whole.pth")
    (tmp_path / "run/last_checkpoint").write_text("model_0000009.pth")
    code, out, err = tool(*SHORT, "train.output_dir=run", "--resume")
    assert (code, err) == (0, "")
    assert "Starting training from iteration 10" in out
    assert losses(tmp_path / "run") == before
    resumed = weights(tmp_path / "run/model_final.pth")
    assert all(torch.equal(value, resumed[name]) for name, value in weights(tmp_path / "whole.pth").items())

    code, out, err = tool("--eval-only", "train.init_checkpoint=whole.pth", "train.output_dir=look")
    assert (code, err) == (0, "")
    assert f"accuracy  {whole[-1]['synthetic/accuracy']:.5g}" in out


def test_the_saved_config_repeats_the_run(tool, tmp_path):
    for config, folder in ((CONFIG, "first"), (tmp_path / "first/config.yaml", "second")):
        assert tool("train.max_iter=5", "train.seed=-1" if folder == "first" else "train.amp.enabled=false",
                    f"train.output_dir={folder}", config=config)[0] == 0  # fmt: skip
    first, second = (weights(tmp_path / name / "model_final.pth") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


BAD = "from hookline.config import LazyCall as L\nmodel = L(dict)(x=1)\n"


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (None, ["train.max_itr=3"], "error: train.max_itr: there is no such key; did you mean 'train.max_iter'?"),
        (None, ["--eval-only"], "error: --eval-only: needs dataloader.test, dataloader.evaluator, and train.init_ch"),
        ("model = nothing\n", [], "bad.py:1: NameError: name 'nothing' is not defined"),
        ("model = (\n", [], "bad.py:1: '(' was never closed"),
        ("from .other import x\n", [], "bad.py:1: ImportError: "),
        (BAD, [], "bad.py: there is no optimizer"),
        (BAD + "optimizer = lr_multiplier = model\ndataloader = {'train': model}\ntrain = {'max_iter': 3}\n", [],
         "bad.py: there is no train.output_dir"),
    ],
)  # fmt: skip
def test_bad_input_ends_with_its_message(tool, tmp_path, config, arguments, message):
    if config is not None:
        (tmp_path / "bad.py").write_text(config)
    code, out, err = tool(*arguments, config=CONFIG if config is None else tmp_path / "bad.py")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_a_wrong_argument_is_named(tool):
    code, _, err = tool("+model.widht=3", "train.output_dir=run")
    assert code == 2
    assert "takes no argument 'widht'" in err


@pytest.mark.slow
def test_several_ranks_train(tmp_path):
    done = run_python(
        [str(TOOL), "--config-file", str(CONFIG), "--num-gpus", "2", *SHORT, "train.output_dir=run"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [4, 9, 14, 19, 20]
    assert len(list((tmp_path / "run").glob("events.*"))) == 1


@pytest.mark.parametrize("option", ["--predict", "--dry-run"])
def test_options_that_it_does_not_have_are_refused(tool, tmp_path, option):
    code, _, err = tool(option)
    assert (code, err) == (2, f"error: {option}: is for YAML configs and tools/train_net.py\n")
    assert not list(tmp_path.iterdir())
