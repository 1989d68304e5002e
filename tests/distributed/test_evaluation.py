"""Evaluation on two ranks gives the results of one process, on every rank."""

import pytest
from ranks import run_ranks


def test_metrics_equal_those_of_one_process_and_every_sample_is_seen_once(tmp_path):
    results = []
    for ranks in (1, 2):
        code, output, found = run_ranks("evaluations:main", ranks, tmp_path / str(ranks))
        assert code == 0, output
        results += found
    for name in results[0]:
        (alone, all_seen), (first, seen), (second, nothing) = (found[name] for found in results)
        size = int(name.split()[1])
        assert first == second
        assert first["samples"] == len(seen["samples"]) == size
        assert first.pop("loss") == pytest.approx(alone.pop("loss"), abs=1e-6)
        assert first == alone
        assert set(alone) == {
            "accuracy",
            "accuracy_top2",
            "multiclass_confusion_matrix",
            "samples",
            "shape",
            "first_class",
        }
        assert seen["samples"] == all_seen["samples"]
        assert seen["most"] <= 2
        assert nothing is None
