import json
import os
import pathlib
import pickle
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from forker import forker
from run_tools import run_tool
from torch.distributed import checkpoint

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "train_net.py"
DIGITS = ROOT / "configs" / "digits" / "convnet.yaml"
SYNTHETIC = ROOT / "configs" / "synthetic" / "mlp.yaml"
TIMES = ("time", "data_time", "eta_seconds")

# A hook that ends its process in the middle of a run.
SIGNALS = """
import os, signal
from hookline.hooks import HookBase

class SendSignal(HookBase):
    def __init__(self, at: int, name: str):
        self.at, self.number = at, getattr(signal, name)

    def before_step(self):
        if self.trainer.iter == self.at:
            os.kill(os.getpid(), self.number)
"""


@pytest.fixture
def tool(tmp_path, monkeypatch, capfd):
    """Run the tool in this process; returns its exit code, standard output and standard error."""

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield lambda *arguments: run_tool("train_net.py", arguments, capfd)
    for number, handler in before.items():
        signal.signal(number, handler)


def environment_in(folder):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}


def start(folder, *arguments):
    """Start the tool in a process of its own."""
    return forker.start([TOOL, *arguments], folder, environment_in(folder), apart=True)


def finish(process):
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def rows(folder):
    lines = (folder / "metrics.json").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]


def tiny(folder, *overrides):
    return (
        *("--config-file", DIGITS, "OUTPUT_DIR", folder, "MODEL.DEVICE", "cpu"),
        *("MODEL.ARGS.width", 2, "MODEL.ARGS.dropout", 0.3, "SOLVER.MAX_ITER", "3ep", "SOLVER.BASE_LR", 0.02),
        *("LOG.WRITERS", '["JSONWriter"]', "LOG.PERIOD", 1, *overrides),
    )


# ---------------------------------------------------------------------------- training and evaluating


def test_eval_only_prints_the_accuracy_of_the_runs_best(tool, tmp_path):
    folder = tmp_path / "run"
    code, out, err = tool(*tiny(folder))
    assert (code, err) == (0, "")
    best = max(row["digits_test/accuracy"] for row in rows(folder) if "digits_test/accuracy" in row)
    assert best > 0.15

    before = (folder / "metrics.json").read_bytes()
    code, out, err = tool(*tiny(folder, "MODEL.WEIGHTS", folder / "model_best.pth"), "--eval-only")
    assert (code, err) == (0, "")
    assert re.search(rf"digits_test +accuracy +{best:.5g}\n", out)
    assert (folder / "metrics.json").read_bytes() == before
    assert not (folder / "previous_001").exists()


def test_eval_only_with_resume_evaluates_the_last_checkpoint(tool, tmp_path):
    folder = tmp_path / "run"
    tool(*tiny(folder, "SOLVER.MAX_ITER", "1ep"))
    last = rows(folder)[-1]["digits_test/accuracy"]
    code, out, _ = tool(*tiny(folder), "--eval-only", "--resume")
    assert code == 0
    assert re.search(rf"digits_test +accuracy +{last:.5g}\n", out)


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.made_by = os.mkdir, (str(folder),)

    def __reduce__(self):
        return self.made_by


class OfWindows:
    """A path that torch cannot unpickle here: it falls back to __0.metadata."""

    def __reduce__(self):
        return pathlib.WindowsPath, ("x",)


@pytest.mark.parametrize("option", ["--eval-only", "--dry-run"])
def test_a_downloaded_folder_of_weights_executes_nothing(tool, tmp_path, option):
    weights = {"0.weight": torch.zeros(1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save({"model": weights}, checkpoint_id=str(tmp_path / "downloaded"))
    metadata = tmp_path / "downloaded" / ".metadata"
    content = pickle.loads(metadata.read_bytes())
    content.storage_meta.checkpoint_id = OfWindows()
    metadata.write_bytes(pickle.dumps(content))
    (tmp_path / "downloaded" / "__0.metadata").write_bytes(pickle.dumps(Attack(tmp_path / "attacked")))
    arguments = ("--config-file", SYNTHETIC, "OUTPUT_DIR", "run", "MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "downloaded")
    _, out, err = tool(*arguments, option)
    assert "downloaded" in out + err
    assert not (tmp_path / "attacked").exists()


JUNK_STATES = {
    "no dict": 3,
    "iteration -5": {"iteration": -5},
    "hooks": {"hooks": 3},
    "optimizer": {"optimizer": {"state": 3, "param_groups": "x"}},
    "metrics": {"storage": {"histories": 3}},
}


@pytest.mark.parametrize("name", JUNK_STATES)
def test_a_resume_from_an_invalid_trainer_state_exits_with_2(tool, tmp_path, name):
    arguments = ("--config-file", SYNTHETIC, "OUTPUT_DIR", "run", "MODEL.DEVICE", "cpu", "LOG.WRITERS", "[]")
    assert tool(*arguments, "SOLVER.MAX_ITER", 3)[0] == 0
    for path in (tmp_path / "run").glob("*.pth"):
        content, junk = torch.load(path, weights_only=True), JUNK_STATES[name]
        content["trainer"] = {**content["trainer"], **junk} if isinstance(junk, dict) else junk
        torch.save(content, path)
    code, _, err = tool(*arguments, "SOLVER.MAX_ITER", 5, "--resume")
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_eval_only_with_nothing_to_resume_is_an_error(tool, tmp_path):
    code, out, err = tool(*tiny(tmp_path / "run"), "--eval-only", "--resume")
    assert code == 2
    assert err.startswith("error: ")
    assert "accuracy" not in out


def test_eval_only_with_resume_falls_back_to_the_newest_checkpoint(tool, tmp_path):
    folder = tmp_path / "run"
    tool(*tiny(folder, "SOLVER.MAX_ITER", "1ep"))
    last = rows(folder)[-1]["digits_test/accuracy"]
    (folder / "last_checkpoint").unlink()
    code, out, _ = tool(*tiny(folder), "--eval-only", "--resume")
    assert code == 0
    assert f"Resuming from {folder / 'model_final.pth'}, the newest undamaged checkpoint" in out
    assert re.search(rf"digits_test +accuracy +{last:.5g}\n", out)


@pytest.mark.parametrize("weights", ["--resume", "run", "run/model_final.pth"])
def test_eval_only_evaluates_the_averaged_weights_if_the_run_did(tool, tmp_path, weights):
    ema = '[{"NAME": "EMA", "ARGS": {"decay": 0.9, "warmup": False}}]'
    assert tool(*tiny(tmp_path / "run", "SOLVER.MAX_ITER", "2ep", "HOOKS", ema))[0] == 0
    last = rows(tmp_path / "run")[-1]
    chosen = ["--resume"] if weights == "--resume" else ["MODEL.WEIGHTS", tmp_path / weights]
    code, out, _ = tool(*tiny(tmp_path / "run"), "--eval-only", *chosen)
    assert code == 0
    assert "averaged by EMA" in out
    assert re.search(rf"digits_test +loss +{last['digits_test/loss']:.5g}\n", out)
    code, out, _ = tool(*tiny(tmp_path / "run", "MODEL.WEIGHTS_FROM", "model"), "--eval-only", *chosen)
    assert code == 0
    assert "averaged" not in out.partition("Loaded")[2]
    assert not re.search(rf"digits_test +loss +{last['digits_test/loss']:.5g}\n", out)


SAYS = """
from hookline.hooks import HookBase

class Says(HookBase):
    def before_eval(self):
        print("SAY before_eval")
    def after_eval(self, results):
        print("SAY after_eval", sorted(results))
    def before_predict(self):
        print("SAY before_predict")
    def after_predict(self, results):
        print("SAY after_predict", sorted(results))
"""


def test_eval_only_and_predict_emit_their_events_and_read_no_training_data(tool, tmp_path):
    folder = tmp_path / "run"
    assert tool(*tiny(folder, "SOLVER.MAX_ITER", 2))[0] == 0
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "broken_data.py").write_text("def data():\n    raise RuntimeError('no training data here')\n")
    options = [*("HOOKS", '["says:Says"]'), *("DATASETS.TRAIN", '["broken_data:data"]')]
    options += ["MODEL.WEIGHTS", folder, "TEST.PREDICTIONS_COLUMNS", '["target", "class"]']
    for option, events in (
        ("--eval-only", ["SAY before_eval", "SAY after_eval ['digits_test']"]),
        ("--predict", ["SAY before_predict", "SAY after_predict ['batches']"]),
    ):
        code, out, _ = tool(*tiny(tmp_path / "look", *options), option)
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("SAY")] == events
    written = tmp_path / "look" / "inference" / "digits_test" / "predictions.jsonl"
    assert json.loads(written.read_text().splitlines()[0]).keys() == {"index", "target", "class"}


def test_a_run_starts_from_another_runs_folder(tool, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert tool(*tiny(first, "SOLVER.MAX_ITER", 5))[0] == 0
    code, out, _ = tool(*tiny(second, "SOLVER.MAX_ITER", 1, "SOLVER.BASE_LR", 0.0, "MODEL.WEIGHTS", first))
    assert code == 0
    assert f"Loaded 26 of the model's 26 weights from {first}\n" in out
    expected, model = (torch.load(run / "model_final.pth", weights_only=True)["model"] for run in (first, second))
    assert torch.equal(expected["classifier.weight"], model["classifier.weight"])


def test_a_run_starts_from_the_weights_of_the_run_that_it_moves(tool, tmp_path):
    folder = tmp_path / "run"
    assert tool(*tiny(folder, "SOLVER.MAX_ITER", 5))[0] == 0
    code, out, _ = tool(*tiny(folder, "SOLVER.MAX_ITER", 1, "MODEL.WEIGHTS", folder))
    assert code == 0
    assert f"Loaded 26 of the model's 26 weights from {folder}\n" in out
    assert (folder / "previous_001" / "model_final.pth").exists()


def test_with_weights_strict_any_difference_is_an_error(tool, tmp_path):
    folder = tmp_path / "run"
    assert tool(*tiny(folder, "SOLVER.MAX_ITER", 5))[0] == 0
    other = tiny(tmp_path / "other", "SOLVER.MAX_ITER", 5, "MODEL.WEIGHTS", folder, "MODEL.ARGS.num_classes", 12)
    assert_error(tool(*other, "MODEL.WEIGHTS_STRICT", True), "does not fit the model exactly", "classifier.weight")
    code, out, _ = tool(*other)
    assert code == 0
    assert "classifier.weight: (10, 4) in the file, (12, 4) in the model" in out


@pytest.mark.parametrize(("expected", "code"), [(0.5, 0), (3.0, 1)])
def test_a_missed_expectation_exits_with_1(tool, tmp_path, expected, code):
    overrides = [
        "TEST.EXPECTED_RESULTS",
        f'[["synthetic", "accuracy", {expected}, 0.5]]',
        "OUTPUT_DIR",
        tmp_path / "run",
    ]
    arguments = ["--config-file", SYNTHETIC, *overrides, "SOLVER.MAX_ITER", 5, "LOG.WRITERS", '["JSONWriter"]']
    assert tool(*arguments)[0] == code
    weights = ["MODEL.WEIGHTS", tmp_path / "run" / "model_final.pth"]
    assert tool(*arguments, *weights, "--eval-only")[0] == code


def test_a_second_run_in_the_same_folder_moves_the_first(tool, tmp_path):
    folder = tmp_path / "run"
    arguments = [
        "--config-file",
        SYNTHETIC,
        "OUTPUT_DIR",
        folder,
        "SOLVER.MAX_ITER",
        5,
        "LOG.WRITERS",
        '["JSONWriter"]',
    ]
    tool(*arguments)
    first = (folder / "metrics.json").read_bytes()
    assert tool(*arguments)[0] == 0
    assert (folder / "previous_001" / "metrics.json").read_bytes() == first
    assert (folder / "metrics.json").exists()


def test_the_saved_config_repeats_the_run(tool, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    tool(
        "--config-file",
        SYNTHETIC,
        "OUTPUT_DIR",
        first,
        "SEED",
        -1,
        "SOLVER.MAX_ITER",
        10,
        "LOG.WRITERS",
        '["JSONWriter"]',
    )
    assert tool("--config-file", first / "config.yaml", "OUTPUT_DIR", second)[0] == 0
    assert rows(first) == rows(second)


# ---------------------------------------------------------------------------- real processes, signals


def test_a_killed_and_interrupted_run_resumes_to_the_uninterrupted_one(tmp_path):
    (tmp_path / "send_signal.py").write_text(SIGNALS)

    def at(iteration, name):
        args = {"at": iteration, "name": name}
        return "HOOKS", json.dumps([{"NAME": "send_signal:SendSignal", "ARGS": args}])

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    uninterrupted = start(tmp_path, *tiny(whole))
    period = "SOLVER.CHECKPOINT_PERIOD", 10

    code, out, err = finish(start(tmp_path, *tiny(broken, *period, *at(13, "SIGKILL"))))
    assert code == -9
    code, out, err = finish(start(tmp_path, *tiny(broken, *period, *at(34, "SIGINT")), "--resume"))
    assert code == 130, err
    assert "interrupted by SIGINT" in out
    assert "Starting training from iteration 10\n" in out
    code, out, err = finish(start(tmp_path, *tiny(broken, *period), "--resume"))
    assert code == 0, err
    assert "Starting training from iteration 35\n" in out
    assert finish(uninterrupted)[0] == 0

    iterations = [row["iteration"] for row in rows(broken)]
    assert iterations == list(range(70))
    assert rows(broken) == rows(whole)
    expected, model = (torch.load(run / "model_final.pth", weights_only=True)["model"] for run in (whole, broken))
    assert expected.keys() == model.keys()
    for name, value in expected.items():
        assert torch.equal(value, model[name]), name


# ---------------------------------------------------------------------------- refused in the folder of a run

REFUSED = {
    "another optimizer": (
        ["--resume", "SOLVER.OPTIMIZER.NAME", "SGD", "SOLVER.OPTIMIZER.ARGS", "{}"],
        ["SOLVER.OPTIMIZER.NAME", "change it back to AdamW"],
    ),
    "another model": (["--resume", "MODEL.ARGS.hidden", "[5]"], ["MODEL: ", "do not fit"]),
    "weights that do not fit": (
        ["MODEL.WEIGHTS", "weights.pth", "MODEL.WEIGHTS_STRICT", True, "MODEL.ARGS.hidden", "[5]"],
        ["weights.pth does not fit the model exactly"],
    ),
    "weights of something else": (["MODEL.WEIGHTS", "other.pth"], ["other.pth"]),
    "an evaluation of another model": (["--eval-only", "--resume", "MODEL.ARGS.hidden", "[5]"], ["another model"]),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run's folder."""
    folder = tmp_path_factory.mktemp("finished")
    code, _, err = finish(
        start(folder, "--config-file", SYNTHETIC, "OUTPUT_DIR", "run", "SOLVER.MAX_ITER", 20, "SEED", -1)
    )
    assert code == 0, err
    torch.save({"something": torch.ones(3)}, folder / "other.pth")
    shutil.copy(folder / "run" / "model_final.pth", folder / "weights.pth")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_does_not_fit_the_run_is_refused_and_changes_nothing(tool, tmp_path, finished, name):
    arguments, words = REFUSED[name]
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)
    options = "--config-file", SYNTHETIC, "OUTPUT_DIR", "run", "SOLVER.MAX_ITER", 40, "SEED", -1
    assert_error(tool(*options, *arguments), *words)
    assert contents(tmp_path) == before
    assert tool(*options, "--resume")[0] == 0


def test_no_run_changes_files_of_the_user(tool, tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    names = ["notes.txt.old.1", "photos.old.2019/a.jpg", "thesis.old.3", "model.pth.tmp.7", "inference.py", "mine.pth"]
    for name in names:
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text(name)
    options = "--config-file", SYNTHETIC, "OUTPUT_DIR", "run", "SOLVER.MAX_ITER", 22
    before = contents(tmp_path)
    assert tool(*options, "--resume", "--dry-run")[0] == 0
    assert contents(tmp_path) == before
    for arguments in (["--resume"], []):
        assert tool(*options, *arguments)[0] == 0
        assert all((tmp_path / "run" / name).read_text() == name for name in names)


@pytest.mark.parametrize("arguments", [[], ["--resume"]])
def test_a_config_file_in_the_runs_folder_is_kept(tool, tmp_path, arguments):
    mine = tmp_path / "run" / "config.yaml"
    mine.parent.mkdir()
    mine.write_text(f"_BASE_: {SYNTHETIC}\nOUTPUT_DIR: run\nSOLVER: {{MAX_ITER: 1}}\n")
    text = mine.read_text()
    for _ in range(2):
        assert tool("--config-file", "run/config.yaml", *arguments)[0] == 0
        assert (tmp_path / "run" / "config.yaml.old").read_text() == text


@pytest.mark.parametrize("name", ["another optimizer", "another model", "weights that do not fit"])
def test_a_dry_run_refuses_the_same_input_and_writes_nothing(tool, tmp_path, finished, name):
    arguments, words = REFUSED[name]
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)
    assert_error(tool("--config-file", SYNTHETIC, "OUTPUT_DIR", "run", "--dry-run", *arguments), *words)
    assert contents(tmp_path) == before


def test_a_dry_run_of_a_resume_prints_changes_and_writes_nothing(tool, tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)
    options = "--config-file", SYNTHETIC, "OUTPUT_DIR", "run", "SEED", -1, "SOLVER.MAX_ITER", 40
    code, out, _ = tool(*options, "--dry-run", "--resume")
    assert code == 0
    assert "Resuming with SOLVER.MAX_ITER = 40 instead of 20" in out
    assert "another SEED" not in out
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_refused_ranks_do_not_change_the_folder(tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)
    options = "--config-file", SYNTHETIC, "OUTPUT_DIR", "run", "MODEL.DEVICE", "cpu", "--num-gpus", 2
    result = finish(start(tmp_path, *options, *REFUSED["weights that do not fit"][0]))
    assert_error(result, "weights.pth does not fit")
    after = {name: content for name, content in contents(tmp_path).items() if not name.startswith("log.txt")}
    assert after == {name: content for name, content in before.items() if not name.startswith("log.txt")}


@pytest.mark.slow
def test_an_error_of_one_rank_in_the_first_step_does_not_change_the_folder(tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "fails.py").write_text(
        "from hookline.hooks import HOOK_REGISTRY, HookBase\n"
        "@HOOK_REGISTRY.register()\nclass Fails(HookBase):\n"
        "    def after_forward(self, batch, outputs):\n"
        "        if self.trainer.comm.get_rank() == 1: raise ZeroDivisionError('of rank 1')\n"
    )
    before = {name: content for name, content in contents(tmp_path).items() if name != "fails.py"}
    options = "--config-file", SYNTHETIC, "OUTPUT_DIR", "run", "MODEL.DEVICE", "cpu", "--num-gpus", 2
    process = start(tmp_path, *options, "HOOKS", '[{"NAME": "fails:Fails"}]')
    code, _, err = finish(process)
    assert code != 0
    assert "of rank 1" in err
    after = {name: content for name, content in contents(tmp_path).items() if name != "fails.py"}
    assert {name: content for name, content in after.items() if not name.endswith(".pyc")} == before


def test_another_batch_size_keeps_the_number_of_epochs(tool, tmp_path):
    options = "--config-file", SYNTHETIC, "OUTPUT_DIR", tmp_path / "run"
    assert tool(*options, "SOLVER.MAX_ITER", "2ep")[0] == 0
    code, out, _ = tool(*options, "SOLVER.MAX_ITER", "4ep", "DATALOADER.BATCH_SIZE", 128, "--resume")
    assert code == 0
    assert "Training for 48 iterations (4 epochs), 128 samples each" in out


# ---------------------------------------------------------------------------- errors

ERRORS = {
    "misspelt key": (["SOLVER.BASE_LRR", "0.1"], ["SOLVER.BASE_LRR", "did you mean 'SOLVER.BASE_LR'"]),
    "wrong type": (["SOLVER.BASE_LR", "fast"], ["SOLVER.BASE_LR", "float", "'fast'"]),
    "not a duration": (["SOLVER.MAX_ITER", "3 weeks"], ["SOLVER.MAX_ITER", "'3 weeks'", "ep"]),
    "key without value": (["SOLVER.BASE_LR"], ["SOLVER.BASE_LR"]),
    "missing weights": (["MODEL.WEIGHTS", "model_finl.pth"], ["MODEL.WEIGHTS", "model_finl.pth"]),
    "weights that are none": (["MODEL.WEIGHTS", "file"], ["MODEL.WEIGHTS", "file is damaged, or is not a checkpoint"]),
    "a device for weights": (["MODEL.WEIGHTS", "/dev/null"], ["/dev/null is neither a file nor a folder"]),
    "a text for weights": (["MODEL.WEIGHTS", __file__], ["does not start like files of torch.save()"]),
    "a folder without weights": (["MODEL.WEIGHTS", "."], ["MODEL.WEIGHTS", ". is a folder without last_checkpoint"]),
    "weights of an unknown kind": (["MODEL.WEIGHTS_FROM", "ema"], ["MODEL.WEIGHTS_FROM", "'averaged'"]),
    "unknown model": (["MODEL.NAME", "ConvNett"], ["MODEL.NAME", "did you mean 'ConvNet'"]),
    "unknown argument": (["MODEL.ARGS.hiden", "[3]"], ["MODEL.ARGS.hiden", "did you mean 'hidden'"]),
    "unknown hook": (["HOOKS", '[{"NAME": "EvalHok"}]'], ["HOOKS[0]", "did you mean 'EvalHook'"]),
    "a default hook once more": (["HOOKS", '[{"NAME": "SignalHandler"}]'], ["HOOKS[0]", "SignalHandler"]),
    "unknown argument of a hook": (
        ["HOOKS", '[{"NAME": "EvalHook", "ARGS": {"period": 3}}]'],
        ["HOOKS[0].ARGS.period", "eval_period"],
    ),
    "no process at all": (["--num-gpus", "0"], ["--num-gpus 0", "at least 1"]),
    "the best of no metric": (
        ["CHECKPOINT.LOAD_BEST_AT_END", "True", "CHECKPOINT.BEST.METRIC", ""],
        ["CHECKPOINT.LOAD_BEST_AT_END", "CHECKPOINT.BEST.METRIC"],
    ),
    "losses never": (["LOG.GATHER_METRIC_PERIOD", "0"], ["LOG.GATHER_METRIC_PERIOD", "at least 1"]),
    "none of the best": (["CHECKPOINT.BEST.KEEP", "0"], ["CHECKPOINT.BEST.KEEP", "at least 1"]),
    "a time limit in epochs": (["SOLVER.TIME_LIMIT", "2ep"], ["SOLVER.TIME_LIMIT", "'2h'"]),
    "two time limits": (
        ["SOLVER.TIME_LIMIT", "1h", "HOOKS", '[{"NAME": "TimeLimit", "ARGS": {"limit": "2h"}}]'],
        ["HOOKS[0]", "SOLVER.TIME_LIMIT"],
    ),
    "empty folder": (["OUTPUT_DIR", ""], ["OUTPUT_DIR"]),
    "a file for a folder": (["OUTPUT_DIR", "file"], ["OUTPUT_DIR", "file"]),
    "a folder below a file": (["OUTPUT_DIR", "file/run"], ["OUTPUT_DIR", "file/run"]),
    "nothing to evaluate": (["--eval-only"], ["MODEL.WEIGHTS", "--resume"]),
    "no test set": (
        ["--eval-only", "DATASETS.TEST", "[]", "CHECKPOINT.BEST.METRIC", ""],
        ["DATASETS.TEST", "nothing to evaluate"],
    ),
    "no metric for a test set": (["TEST.METRICS", "[]", "CHECKPOINT.BEST.METRIC", ""], ["TEST.METRICS is empty"]),
    "no metric to evaluate by": (
        ["--eval-only", "TEST.METRICS", "[]", "CHECKPOINT.BEST.METRIC", "", "MODEL.WEIGHTS", "file"],
        ["TEST.METRICS is empty"],
    ),
}


def assert_error(result, *words):
    code, _, err = result
    assert code == 2, err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert err.count("error: ") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_exits_with_2_one_message_and_no_folder(tool, tmp_path, name):
    arguments, words = ERRORS[name]
    (tmp_path / "file").write_text("")
    before = sorted(os.listdir(tmp_path))
    assert_error(tool("--config-file", SYNTHETIC, "OUTPUT_DIR", "run", *arguments), *words)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_missing_config_file_is_named_with_the_nearest_one(tool, tmp_path):
    (tmp_path / "convnet.yaml").write_text("SEED: 1")
    assert_error(tool("--config-file", "convnt.yaml"), "convnt.yaml", "convnet.yaml")
    assert os.listdir(tmp_path) == ["convnet.yaml"]


def test_a_mistake_in_a_config_file_is_named_with_the_file(tool, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"_BASE_: {SYNTHETIC}\nSOLVER: {{BASE_LRR: 0.1}}\n")
    assert_error(tool("--config-file", "mine.yaml"), "mine.yaml", "SOLVER.BASE_LRR", "SOLVER.BASE_LR")


@pytest.mark.parametrize(
    ("arguments", "key"), [([], "MODEL.NAME"), (["MODEL.NAME", "MLP"], "DATASETS.TRAIN")], ids=["nothing", "no data"]
)
def test_missing_required_keys_are_errors(tool, tmp_path, arguments, key):
    assert_error(tool(*arguments), key, "configs/digits/mlp.yaml")
    assert os.listdir(tmp_path) == []


def test_a_separate_process_exits_with_2_on_bad_input(tmp_path):
    command = [sys.executable, TOOL, "--config-file", SYNTHETIC, "SOLVER.BASE_LRR", "0.1"]
    environment = environment_in(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert_error((done.returncode, done.stdout, done.stderr), "SOLVER.BASE_LRR", "did you mean 'SOLVER.BASE_LR'")
    assert os.listdir(tmp_path) == []


def test_an_unknown_option_is_an_error_of_the_command_line(tool, tmp_path):
    code, _, err = tool("--config-fil", SYNTHETIC, "--rezume")
    assert code == 2
    assert "--rezume" in err
    assert os.listdir(tmp_path) == []
