"""Evaluation on several ranks gives the results of one process."""

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory):
    results = []
    for ranks in (1, 2):
        code, output, found = run_ranks("evaluations:main", ranks, tmp_path_factory.mktemp(f"ranks{ranks}"))
        assert code == 0, output
        results += found
    return results


@pytest.mark.parametrize("data", ["synthetic", "stream"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_metrics_equal_those_of_one_process_on_every_rank(evaluations, data, size):
    alone, first, second = (results[f"{data} {size}"] for results in evaluations)
    exact = {"accuracy", "accuracy_top2", "multiclass_confusion_matrix", "samples", "shape", "first_class"}
    assert set(alone) == {*exact, "loss"}
    assert first == second
    for name in exact:
        assert first[name] == alone[name]
    assert first["samples"] == size
    assert first["loss"] == pytest.approx(alone["loss"], abs=1e-6)


@pytest.mark.parametrize("data", ["synthetic", "stream"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_every_sample_is_seen_once_and_no_more_than_a_batch_at_a_time(evaluations, data, size):
    alone, first, second = (results[f"{data} {size} seen"] for results in evaluations)
    assert len(first["samples"]) == size
    assert first["samples"] == alone["samples"]
    assert first["most"] <= 2
    assert second is None


def test_results_of_rank_0_are_sent_to_all_ranks(evaluations):
    assert [results["on all ranks"] for results in evaluations] == [{"synthetic": {"accuracy": 0.5}}] * 3


def test_expected_results_are_checked_on_all_ranks_if_rank_0_reports_them(evaluations):
    assert [results["met"] for results in evaluations] == [[["seen"], True]] * 3


def test_hooks_of_all_ranks_get_the_results_of_rank_0(evaluations):
    assert [results["hooks"] for results in evaluations] == [[{"accuracy": 0.25}] * 2] * 3
