"""The strategies of docs/strategies.md, as a user writes them: training, resume and evaluation."""

import pytest
from ranks import ROOT, rows, run_ranks
from snippets import Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

QUICK = {"tensor_parallel": "TensorParallel", "local_sgd": "LocalSGD", "pipeline": "Pipeline"}
SLOW = {"hsdp": "HSDP", "by_hand": "ByHand", "engine_step": "EngineStrategy", "schedule": "OneByOne"}
EACH = pytest.mark.parametrize("name", [*QUICK, *SLOW])


def write_page(folder):
    for snippet in Page(ROOT / "docs/strategies.md").snippets:
        if snippet.file:
            (folder / snippet.file).write_text(snippet.text)


def train(folder, strategies):
    """Train with each strategy on two ranks, then on one; return the folder and what the ranks report."""
    write_page(folder)
    names = ",".join(f"{module}:{cls}" for module, cls in strategies.items())
    code, output, results = run_ranks("own_strategies:train", 2, folder, names)
    assert code == 0, output
    code, output, (alone,) = run_ranks("own_strategies:alone", 1, folder, *strategies)
    assert code == 0, output
    return folder, results, alone


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return train(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return train(tmp_path_factory.mktemp("slow"), SLOW)


@pytest.fixture
def ran(request, name):
    return request.getfixturevalue("quick" if name in QUICK else "slow")


def assert_same(run, other):
    leave_out = (
        "time",
        "data_time",
        "eta_seconds",
        "slowest_rank",
        "num_items",
    )  # a schedule of its own counts no items
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
    alone = folder / ("alone_pipeline" if name == "pipeline" else "alone")
    assert_same(folder / name, alone)
    assert_same(folder / f"{name}-alone", alone)  # resumed


@EACH
def test_it_resumes_exactly(ran, name):
    folder, results, _ = ran
    assert [ranks[name] for ranks in results] == [True, True]
    assert rows(folder / f"{name}-resumed") == rows(folder / name)


@EACH
def test_one_rank_evaluates_its_checkpoint(ran, name):
    folder, _, found = ran
    assert found[name] == pytest.approx(rows(folder / name)[-1]["synthetic/accuracy"], abs=1e-6)


@pytest.mark.slow
def test_the_engine_makes_every_update(slow):
    assert [ranks["engine's steps"] for ranks in slow[1]] == [5, 5]  # of the resumed run


@pytest.mark.slow
def test_four_ranks_in_two_groups_train_like_one_rank(slow, tmp_path):
    write_page(tmp_path)
    code, output, results = run_ranks("own_strategies:train", 4, tmp_path, "hsdp:HSDP")
    assert code == 0, output
    assert results == [{"hsdp": True}] * 4
    assert_same(tmp_path / "hsdp", slow[0] / "alone")


@pytest.mark.slow
def test_a_gpt_in_a_pipeline_trains_like_one_rank(tmp_path):
    write_page(tmp_path)
    for ranks in (2, 1):
        code, output, _ = run_ranks("own_strategies:gpts", ranks, tmp_path)
        assert code == 0, output
    for name in ("gpt", "gpt_interleaved"):
        assert_same(tmp_path / name, tmp_path / "gpt_alone")


def test_what_does_not_work_with_own_methods_is_refused(tmp_path):
    write_page(tmp_path)
    code, output, (found,) = run_ranks("own_strategies:refusals", 1, tmp_path)
    assert code == 0, output
    assert found == [
        "SOLVER.AMP.DTYPE: float16's gradient scaler calls the optimizer's step(), and the strategy EngineStrategy has "
        "its own: use bfloat16",
        "SOLVER.COMPILE_STEP: the strategy ByHand has its own backward(); set SOLVER.COMPILE_STEP to False",
        "PARALLEL.NAME: the hook Listening listens to before_backward, which comes in the middle of forward_backward() "
        "of the strategy OneByOne: remove the hook",
        "PARALLEL.NAME: the hook Reading uses the model's outputs, which forward_backward() of the strategy OneByOne "
        "does not return: remove the hook",
        "Pipeline: 61 samples cannot be split into 2 equal micro-batches",
    ]
