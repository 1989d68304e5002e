"""tools/train_net.py. Mistakes are in promises/test_wrong_commands.py, exit codes in promises/test_exit_codes.py."""

import json
import re
import shutil

import pytest
from loggers import unchanged_logging
from ranks import SYNTHETIC, rows
from starts import contents

from hookline.cli import main


def options(*overrides, folder="run"):
    return (
        *("--config-file", SYNTHETIC, "OUTPUT_DIR", folder, "MODEL.DEVICE", "cpu"),
        *("LOG.WRITERS", '["JSONWriter"]', "LOG.PERIOD", 1, "SOLVER.MAX_ITER", 20, *overrides),
    )


@pytest.fixture
def train(tool):
    return lambda *words: tool("train_net.py", *words)


# ---------------------------------------------------------------------------- evaluating


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A folder with a finished run that evaluated averaged weights."""
    folder = tmp_path_factory.mktemp("averaged")
    ema = '[{"NAME": "EMA", "ARGS": {"decay": 0.9, "warmup": False}}]'
    with pytest.MonkeyPatch.context() as patch, unchanged_logging():
        patch.chdir(folder)
        assert main(["train", *map(str, options("HOOKS", ema))]) == 0
    return folder


def test_eval_only_evaluates_the_weights_that_the_run_evaluated_and_changes_nothing(train, averaged, tmp_path):
    shutil.copytree(averaged, tmp_path, dirs_exist_ok=True)
    evaluated = [row for row in rows(tmp_path / "run") if "synthetic/loss" in row]
    best = max(evaluated, key=lambda row: row["synthetic/accuracy"])
    last = evaluated[-1]["synthetic/loss"]
    before = contents(tmp_path / "run", "log.txt")
    for weights, accuracy in (("run/model_best.pth", best["synthetic/accuracy"]), ("run", None)):
        code, out, err = train(*options("MODEL.WEIGHTS", weights), "--eval-only")
        assert (code, err) == (0, "")
        assert "averaged by EMA" in out
        expected = f"accuracy +{accuracy:.5g}" if accuracy else f"loss +{last:.5g}"
        assert re.search(rf"synthetic +{expected}\n", out)
    _, out, _ = train(*options("MODEL.WEIGHTS", "run", "MODEL.WEIGHTS_FROM", "model"), "--eval-only")
    assert not re.search(rf"synthetic +loss +{last:.5g}\n", out)
    assert contents(tmp_path / "run", "log.txt") == before


SAYS = """
from hookline.hooks import HookBase

class Says(HookBase):
    def before_eval(self):
        print("SAY before_eval")
    def after_eval(self, results):
        print("SAY after_eval", results["synthetic"]["accuracy"] == results["synthetic/accuracy"])
    def before_predict(self):
        print("SAY before_predict")
    def after_predict(self, results):
        print("SAY after_predict", sorted(results))
"""


def test_eval_only_and_predict_emit_their_events_and_read_no_training_data(train, averaged, tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "broken_data.py").write_text("def data():\n    raise RuntimeError('no training data here')\n")
    keys = [*("HOOKS", '["says:Says"]'), *("DATASETS.TRAIN", '["broken_data:data"]')]
    keys += ["MODEL.WEIGHTS", averaged / "run", "TEST.PREDICTIONS_COLUMNS", '["target", "class"]']
    for option, events in (
        ("--eval-only", ["SAY before_eval", "SAY after_eval True"]),
        ("--predict", ["SAY before_predict", "SAY after_predict ['batches']"]),
    ):
        code, out, _ = train(*options(*keys, folder="look"), option)
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("SAY")] == events
    written = tmp_path / "look" / "inference" / "synthetic" / "predictions.jsonl"
    assert json.loads(written.read_text().splitlines()[0]).keys() == {"index", "target", "class"}


@pytest.mark.parametrize(("expected", "code"), [(0.5, 0), (3.0, 1)])
def test_a_missed_expectation_exits_with_1(train, expected, code):
    results = ("TEST.EXPECTED_RESULTS", f'[["synthetic", "accuracy", {expected}, 0.5]]')
    assert train(*options(*results))[0] == code
    assert train(*options(*results, "MODEL.WEIGHTS", "run/model_final.pth"), "--eval-only")[0] == code


def test_a_misspelt_expectation_is_found_before_the_evaluation(train):
    assert train(*options())[0] == 0
    results = ("TEST.EXPECTED_RESULTS", '[["synthetic", "acuracy", 0.5, 0.5]]')
    code, out, err = train(*options(*results, "MODEL.WEIGHTS", "run/model_final.pth"), "--eval-only")
    assert (code, "Results:" in out) == (2, False)
    assert "there is no metric 'synthetic/acuracy'" in err


def test_an_expectation_for_another_set_than_the_trainings(train):
    best = ("CHECKPOINT.BEST.METRIC", "synthetic/accuracy")
    assert train(*options(*best))[0] == 0
    other = ("DATASETS.TEST", '[{"NAME": "synthetic", "AS": "other"}]')
    results = ("TEST.EXPECTED_RESULTS", '[["other", "accuracy", 0.5, 0.5]]')
    assert train(*options(*best, *other, *results, "MODEL.WEIGHTS", "run"), "--eval-only")[0] == 0


# ---------------------------------------------------------------------------- training


def test_the_saved_config_repeats_the_run(train, tmp_path):
    assert train(*options("SEED", -1))[0] == 0
    assert train("--config-file", "run/config.yaml", "OUTPUT_DIR", "second")[0] == 0
    assert rows(tmp_path / "run") == rows(tmp_path / "second")


def test_a_dry_run_of_a_resume_prints_changes_and_writes_nothing(train, tmp_path):
    assert train(*options("SEED", -1))[0] == 0
    before = contents(tmp_path, "log.txt")
    code, out, _ = train(*options("SEED", -1, "SOLVER.MAX_ITER", 40), "--dry-run", "--resume")
    assert code == 0
    assert "Resuming with SOLVER.MAX_ITER = 40 instead of 20" in out
    assert "another SEED" not in out
    assert contents(tmp_path, "log.txt") == before
