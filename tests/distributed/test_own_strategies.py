"""Strategies as a user writes them, of docs/distributed.md and strategies/: training, resume and evaluation."""

from pathlib import Path

import pytest
from ranks import ROOT, rows, run_ranks
from snippets import Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STRATEGIES = {
    "tensor_parallel": "TensorParallel",
    "local_sgd": "LocalSGD",
    "hsdp": "HSDP",
    "by_hand": "ByHand",
    "engine_step": "EngineStrategy",
}
EACH = pytest.mark.parametrize("name", STRATEGIES)


def write_strategies(folder):
    for path in Path(__file__).parent.glob("strategies/*.py"):
        (folder / path.name).write_text(path.read_text())
    for snippet in Page(ROOT / "docs/distributed.md").snippets:
        if snippet.file:
            (folder / snippet.file).write_text(snippet.text)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Train with each strategy on two ranks, then on one; return the folder and what the ranks report."""
    folder = tmp_path_factory.mktemp("strategies")
    write_strategies(folder)
    names = ",".join(f"{module}:{cls}" for module, cls in STRATEGIES.items())
    code, output, results = run_ranks("own_strategies:train", 2, folder, names)
    assert code == 0, output
    code, output, (alone,) = run_ranks("own_strategies:alone", 1, folder, *STRATEGIES)
    assert code == 0, output
    return folder, results, alone


def assert_same(run, other):
    leave_out = ("time", "data_time", "eta_seconds", "slowest_rank", "num_items")
    ours, theirs = rows(run, leave_out), rows(other, leave_out)
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=1e-4, abs=1e-6), our["iteration"]


@EACH
def test_a_strategy_of_the_page_trains_like_one_rank(ran, name):
    folder = ran[0]
    if name == "local_sgd":  # each rank has its own weights
        assert len(rows(folder / name)) == len(rows(folder / "alone"))
        return
    assert_same(folder / name, folder / "alone")
    assert_same(folder / f"{name}-alone", folder / "alone")  # resumed


@EACH
def test_it_resumes_exactly(ran, name):
    folder, results, _ = ran
    assert [ranks[name] for ranks in results] == [True, True]
    assert results[0]["engine's steps"] == 5  # the engine makes every update of the resumed run
    assert rows(folder / f"{name}-resumed") == rows(folder / name)


@EACH
def test_one_rank_evaluates_its_checkpoint(ran, name):
    folder, _, found = ran
    assert found[name] == pytest.approx(rows(folder / name)[-1]["synthetic/accuracy"], abs=1e-6)


def test_what_does_not_work_with_own_methods_is_refused(tmp_path):
    write_strategies(tmp_path)
    code, output, (found,) = run_ranks("own_strategies:refusals", 1, tmp_path)
    assert code == 0, output
    assert found == [
        "SOLVER.AMP.DTYPE: float16's gradient scaler calls the optimizer's step(), and the strategy EngineStrategy has "
        "its own: use bfloat16",
        "SOLVER.COMPILE_STEP: works in one process only, without a backward pass of the strategy's own; or set "
        "SOLVER.COMPILE_STEP to False",
    ]
