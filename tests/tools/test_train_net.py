"""tools/train_net.py. What it refuses is in tests/promises/test_wrong_uses.py, its exit codes in test_exit_codes.py."""

import json
import os
import pathlib
import pickle
import re
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
from forker import forker
from run_tools import run_tool
from torch.distributed import checkpoint

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs" / "digits" / "convnet.yaml"
SYNTHETIC = ROOT / "configs" / "synthetic" / "mlp.yaml"
TIMES = ("time", "data_time", "eta_seconds")
QUICK = ("--config-file", SYNTHETIC, "MODEL.DEVICE", "cpu", "LOG.WRITERS", '["JSONWriter"]', "OUTPUT_DIR", "run")


@pytest.fixture
def tool(tmp_path, monkeypatch, capfd):
    """Run the tool in this process; returns its exit code, standard output and standard error."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield lambda *arguments: run_tool("train_net.py", arguments, capfd)
    for number, handler in before.items():
        signal.signal(number, handler)


def rows(folder):
    lines = (folder / "metrics.json").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]


def tiny(folder, *overrides):
    return (
        *("--config-file", DIGITS, "OUTPUT_DIR", folder, "MODEL.DEVICE", "cpu"),
        *("MODEL.ARGS.width", 2, "MODEL.ARGS.dropout", 0.3, "SOLVER.MAX_ITER", "2ep", "SOLVER.BASE_LR", 0.02),
        *("LOG.WRITERS", '["JSONWriter"]', "LOG.PERIOD", 1, *overrides),
    )


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "log.txt"}


# ---------------------------------------------------------------------------- evaluating


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A folder with a finished run that evaluated averaged weights."""
    folder = tmp_path_factory.mktemp("averaged")
    ema = '[{"NAME": "EMA", "ARGS": {"decay": 0.9, "warmup": False}}]'
    command = [ROOT / "tools/train_net.py", *tiny("run", "HOOKS", ema)]
    assert forker.start(command, folder, {**os.environ, "OMP_NUM_THREADS": "1"}, log=folder / "log").wait() == 0
    return folder


def test_eval_only_evaluates_the_weights_that_the_run_evaluated_and_changes_nothing(tool, averaged, tmp_path):
    shutil.copytree(averaged, tmp_path, dirs_exist_ok=True)
    evaluated = [row for row in rows(tmp_path / "run") if "digits_test/loss" in row]
    best = max(evaluated, key=lambda row: row["digits_test/accuracy"])
    last = evaluated[-1]["digits_test/loss"]
    before = contents(tmp_path / "run")
    for weights, accuracy in (("run/model_best.pth", best["digits_test/accuracy"]), ("run", None)):
        code, out, err = tool(*tiny("run", "MODEL.WEIGHTS", weights), "--eval-only")
        assert (code, err) == (0, "")
        assert "averaged by EMA" in out
        expected = f"accuracy +{accuracy:.5g}" if accuracy else f"loss +{last:.5g}"
        assert re.search(rf"digits_test +{expected}\n", out)
    _, out, _ = tool(*tiny("run", "MODEL.WEIGHTS", "run", "MODEL.WEIGHTS_FROM", "model"), "--eval-only")
    assert not re.search(rf"digits_test +loss +{last:.5g}\n", out)
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("pointer", [True, False])
def test_eval_only_with_resume_evaluates_the_newest_checkpoint(tool, averaged, tmp_path, pointer):
    shutil.copytree(averaged, tmp_path, dirs_exist_ok=True)
    if not pointer:
        (tmp_path / "run/last_checkpoint").unlink()
    code, out, _ = tool(*tiny("run"), "--eval-only", "--resume")
    assert code == 0
    assert ("the newest undamaged checkpoint" in out) is not pointer
    assert re.search(rf"digits_test +loss +{rows(tmp_path / 'run')[-1]['digits_test/loss']:.5g}\n", out)


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


def test_a_downloaded_folder_of_weights_executes_nothing(tool, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save({"model": {"0.weight": torch.zeros(1)}}, checkpoint_id=str(tmp_path / "downloaded"))
    metadata = tmp_path / "downloaded" / ".metadata"
    content = pickle.loads(metadata.read_bytes())
    content.storage_meta.checkpoint_id = OfWindows()
    metadata.write_bytes(pickle.dumps(content))
    (tmp_path / "downloaded" / "__0.metadata").write_bytes(pickle.dumps(Attack(tmp_path / "attacked")))
    for option in ("--eval-only", "--dry-run"):
        _, out, err = tool(*QUICK, "MODEL.WEIGHTS", "downloaded", option)
        assert "downloaded" in out + err
        assert not (tmp_path / "attacked").exists()


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


def test_eval_only_and_predict_emit_their_events_and_read_no_training_data(tool, averaged, tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "broken_data.py").write_text("def data():\n    raise RuntimeError('no training data here')\n")
    options = [*("HOOKS", '["says:Says"]'), *("DATASETS.TRAIN", '["broken_data:data"]')]
    options += ["MODEL.WEIGHTS", averaged / "run", "TEST.PREDICTIONS_COLUMNS", '["target", "class"]']
    for option, events in (
        ("--eval-only", ["SAY before_eval", "SAY after_eval ['digits_test']"]),
        ("--predict", ["SAY before_predict", "SAY after_predict ['batches']"]),
    ):
        code, out, _ = tool(*tiny(tmp_path / "look", *options), option)
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("SAY")] == events
    written = tmp_path / "look" / "inference" / "digits_test" / "predictions.jsonl"
    assert json.loads(written.read_text().splitlines()[0]).keys() == {"index", "target", "class"}


@pytest.mark.parametrize(("expected", "code"), [(0.5, 0), (3.0, 1)])
def test_a_missed_expectation_exits_with_1(tool, expected, code):
    results = ("TEST.EXPECTED_RESULTS", f'[["synthetic", "accuracy", {expected}, 0.5]]')
    assert tool(*QUICK, *results, "SOLVER.MAX_ITER", 5)[0] == code
    assert tool(*QUICK, *results, "MODEL.WEIGHTS", "run/model_final.pth", "--eval-only")[0] == code


# ---------------------------------------------------------------------------- training


def test_a_run_starts_from_the_weights_of_the_run_that_it_moves(tool, tmp_path):
    assert tool(*QUICK, "SOLVER.MAX_ITER", 5)[0] == 0
    before = torch.load(tmp_path / "run/model_final.pth", weights_only=True)["model"]
    code, out, _ = tool(*QUICK, "SOLVER.MAX_ITER", 1, "SOLVER.BASE_LR", 0.0, "MODEL.WEIGHTS", "run")
    assert code == 0
    assert re.search(r"Loaded (\d+) of the model's \1 weights from run\n", out)
    after = torch.load(tmp_path / "run/model_final.pth", weights_only=True)["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "run/previous_001/model_final.pth").exists()
    code, out, _ = tool(*QUICK, "SOLVER.MAX_ITER", 1, "MODEL.WEIGHTS", "run", "MODEL.ARGS.num_classes", 5)
    assert code == 0
    assert "in the file, (5, " in out  # what does not fit is named and left out


def test_the_saved_config_repeats_the_run(tool, tmp_path):
    assert tool(*QUICK, "SEED", -1, "SOLVER.MAX_ITER", 10)[0] == 0
    assert tool("--config-file", "run/config.yaml", "OUTPUT_DIR", "second")[0] == 0
    assert rows(tmp_path / "run") == rows(tmp_path / "second")


def test_a_dry_run_of_a_resume_prints_changes_and_writes_nothing(tool, tmp_path):
    assert tool(*QUICK, "SEED", -1, "SOLVER.MAX_ITER", 20)[0] == 0
    before = contents(tmp_path)
    code, out, _ = tool(*QUICK, "SEED", -1, "SOLVER.MAX_ITER", 40, "--dry-run", "--resume")
    assert code == 0
    assert "Resuming with SOLVER.MAX_ITER = 40 instead of 20" in out
    assert "another SEED" not in out
    assert contents(tmp_path) == before


def test_another_batch_size_keeps_the_number_of_epochs(tool):
    assert tool(*QUICK, "SOLVER.MAX_ITER", "2ep")[0] == 0
    code, out, _ = tool(*QUICK, "SOLVER.MAX_ITER", "4ep", "DATALOADER.BATCH_SIZE", 128, "--resume")
    assert code == 0
    assert "Training for 48 iterations (4 epochs), 128 samples each" in out


@pytest.mark.slow
def test_an_error_of_one_rank_in_the_first_step_does_not_change_the_folder(tool, tmp_path):
    assert tool(*QUICK, "SOLVER.MAX_ITER", 5)[0] == 0
    (tmp_path / "fails.py").write_text(
        "from hookline.hooks import HookBase\nclass Fails(HookBase):\n"
        "    def after_forward(self, batch, outputs):\n"
        "        if self.trainer.comm.get_rank() == 1: raise ZeroDivisionError('of rank 1')\n"
    )
    before = contents(tmp_path / "run")
    command = [ROOT / "tools/train_net.py", *QUICK, "--num-gpus", 2, "HOOKS", '["fails:Fails"]']
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    process = forker.start(command, tmp_path, environment, apart=True)
    _, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "of rank 1" in err
    assert contents(tmp_path / "run") == before
