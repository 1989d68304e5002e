import math
import random
import re

import numpy as np
import pytest
import torch
from metric_runs import Losses, at, train_losses
from small_runs import Net, batches, make_trainer
from torch import nn

from hookline.engine import setup_logger
from hookline.hooks import CallbackHook, EvalHook


def evaluations(period, *hooks, end=20, results=None, **kwargs):
    """Return the trainer of a run, and the iterations at which it evaluated."""
    trainer, found = Losses(), []

    def evaluate():
        found.append(trainer.iter)
        return results

    trainer.register_hooks([EvalHook(period, evaluate, **kwargs), *hooks])
    trainer.train(0, end)
    return trainer, found


@pytest.mark.parametrize(
    ("period", "end", "kwargs", "hooks", "expected"),
    [
        (15, 30, {}, [], [14, 30]),
        (15, 31, {}, [], [14, 29, 31]),
        (0, 20, {}, [], [20]),
        (10, 20, {"eval_after_train": False}, [], [9, 19]),
        (0, 20, {}, [at(19, lambda trainer: trainer.request_eval())], [20]),
    ],
)
def test_evaluates_every_period_and_after_the_last_iteration(period, end, kwargs, hooks, expected):
    assert evaluations(period, *hooks, end=end, **kwargs)[1] == expected


def test_weights_that_the_first_step_creates_are_evaluated_before_it():
    model, found = Net(), []
    model.fc = nn.Sequential(nn.LazyLinear(1), nn.LazyBatchNorm1d())
    evaluate = EvalHook(0, lambda: found.append(model.training), on_start=True)
    make_trainer(evaluate, model=model, data=batches()).train(0, 1)
    assert len(found) == 2


def test_nested_results_are_put_under_full_names_and_not_smoothed(log):
    results = {"test": {"accuracy": torch.tensor(0.5), "by_class": {"0": 1}}, "extra": math.nan}
    trainer, _ = evaluations(0, end=5, results=results)
    latest = trainer.storage.latest()
    assert latest["test/accuracy"] == (0.5, 5)
    assert latest["test/by_class/0"] == (1.0, 5)
    assert math.isnan(latest["extra"][0])
    assert trainer.storage.smoothing_hints() == {"loss": True} | dict.fromkeys(latest.keys() - {"loss"}, False)
    assert any(line.startswith("Evaluation:  test/accuracy: 0.5  test/by_class/0: 1") for line in log.messages)


def test_the_console_has_a_line_of_at_most_80_columns_for_each_test_set(capsys, tmp_path):
    setup_logger(str(tmp_path))
    names = ("average_precision_of_small_boxes", "recall", "average_precision")
    evaluations(0, end=1, results={"few": {"accuracy": 0.5}, "boxes_2017_test": dict.fromkeys(names, 0.25), "x": 1})
    evaluations(0, end=1, results={"many": {f"accuracy_of_{number}": 0.125 for number in range(20)}})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    few, boxes, others, many = (line[10:] for line in lines if ": 0." in line or "x: 1" in line)
    assert re.fullmatch(r"few \(\S+ s\):  accuracy: 0\.5", few)
    assert boxes == "…es_2017_test:  …_small_boxes: 0.25  recall: 0.25  …ge_precision: 0.25"
    assert others == "Evaluation:  x: 1"
    assert re.fullmatch(r"many \(\S+ s\):  …racy_of_0: 0\.125  …racy_of_1: 0\.125  …", many)
    assert "boxes_2017_test/average_precision_of_small_boxes: 0.25" in (tmp_path / "log.txt").read_text()


def test_hooks_get_results_by_full_name_and_by_test_set():
    seen = []
    listener = CallbackHook(after_eval=lambda trainer, results: seen.append(results))
    evaluations(0, listener, end=1, results={"test": {"accuracy": 0.5, "by_class": {"0": 1}}, "extra": 2})
    (results,) = seen
    assert results == {"test/accuracy": 0.5, "test/by_class/0": 1, "extra": 2}
    assert (results["test"]["accuracy"], results["test"]["by_class"]["0"], results["extra"]) == (0.5, 1, 2)
    assert results.get("test", {}).get("accuracy") == 0.5
    assert ("test" in results, "tes" in results, results.get("tes")) == (True, False, None)
    with pytest.raises(KeyError, match="tests/accuracy; did you mean 'test/accuracy'"):
        results["tests/accuracy"]


@pytest.mark.parametrize(("results", "named"), [(0.5, "0.5"), ({"a": {"b": "good"}}, "'a/b' is 'good'")])
def test_results_that_are_not_numbers_raise_an_error_with_the_name(results, named):
    with pytest.raises(TypeError, match=named):
        evaluations(0, end=1, results=results)


def test_a_second_schedule_puts_its_results_and_hooks_do_not_follow_it():
    seen, others = [], []
    listener = CallbackHook(
        before_eval=lambda trainer: seen.append("before"),
        on_eval_end=lambda trainer: seen.append("end"),
        after_eval=lambda trainer, results: seen.append(results),
        before_step=lambda trainer: trainer.request_eval() if trainer.iter == 1 else None,
    )
    other = EvalHook(6, lambda: others.append(1) or {"full/a": 2}, main=False)
    trainer, found = evaluations(4, other, listener, end=8, results={"val/a": 1})
    assert found == [1, 3, 8]
    assert len(others) == 2
    latest = trainer.storage.latest()
    assert (latest["val/a"], latest["full/a"]) == ((1.0, 8), (2.0, 8))
    assert [one for one in seen if isinstance(one, dict)] == [{"val/a": 1}] * 3
    assert seen.count("before") == seen.count("end") == 5


@pytest.mark.parametrize(
    ("period", "end", "at_end", "expected"),
    [(4, 12, True, [2, 1, 0]), (4, 13, True, [3, 2, 1, 0]), (4, 13, False, [2, 1, 0]), ("1000h", 9, True, [0])],
)
def test_the_time_left_counts_further_evaluations(monkeypatch, period, end, at_end, expected):
    now, left = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def evaluate():
        now[0] += 6.0
        return {"val/a": 1}

    note = CallbackHook(after_eval=lambda trainer, results: left.extend(trainer.storage.evaluations_left.values()))
    train_losses(EvalHook(period, evaluate, at_end), note, end=end)
    assert left == [6.0 * number for number in expected]


def draw(*_):
    """Draw a number from each global generator."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [random.random(), np.random.rand(), *(torch.rand((), device=device).item() for device in devices)]


def test_what_an_evaluation_draws_does_not_change_training():
    seen = {}
    for period in (0, 2):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        seen[period] = []
        note = CallbackHook(before_eval=draw, after_eval=draw)
        note.after_step = lambda into=seen[period]: into.append(draw())
        evaluations(period, note, EvalHook(period, lambda: {"drawn": draw()[0]}, main=False), end=6)
    assert seen[0] == seen[2]
