import logging
from contextlib import nullcontext

import pytest

from hookline.config import get_cfg
from hookline.engine.evaluation import flatten_results_dict, format_results, print_csv_format, verify_results

RESULTS = {"val": {"accuracy": 0.9, "loss": {"cls": 1.5}}, "score": 2.0}


def test_results_are_flattened_at_any_depth():
    assert flatten_results_dict(RESULTS) == {"val/accuracy": 0.9, "val/loss/cls": 1.5, "score": 2.0}


def test_results_are_logged_for_pasting(caplog):
    with caplog.at_level(logging.INFO):
        print_csv_format(RESULTS)
    assert [record.getMessage() for record in caplog.records] == [
        "copypaste: Task: val",
        "copypaste: accuracy,loss/cls",
        "copypaste: 0.9000,1.5000",
        "copypaste: score=2.0",
    ]


def test_results_that_are_no_numbers_are_shown_as_they_are(caplog):
    with caplog.at_level(logging.INFO):
        print_csv_format({"val": {"file": "rows.csv", "accuracy": 0.5}})
    assert caplog.messages[-1] == "copypaste: rows.csv,0.5000"
    assert "rows.csv" in format_results({"val": {"file": "rows.csv"}})


@pytest.mark.parametrize(
    ("expected", "met", "message"),
    [
        ([], True, ""),
        ([["val", "accuracy", 0.91, 0.02]], True, "1 expected"),
        ([["val", "accuracy", 0.95, 0.02]], False, "val/accuracy is 0.9, expected 0.95 within 0.02"),
        ([["val", "f1", 0.95, 0.02]], False, "val/f1 is not among the results (val/accuracy"),
        ([["val", "accuracy", 0.9, 0.1], ["nan", "loss", 1.0, 9.0]], False, "nan/loss is nan"),
    ],
)
def test_results_are_compared_with_the_expected_ones(caplog, expected, met, message):
    cfg = get_cfg()
    cfg.TEST.EXPECTED_RESULTS = expected
    exits = nullcontext() if met else pytest.raises(SystemExit, match="1")  # as in detectron2
    with caplog.at_level(logging.INFO), exits:
        assert verify_results(cfg, {**RESULTS, "nan": {"loss": float("nan")}})
    assert message in caplog.text
