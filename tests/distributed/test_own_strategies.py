"""The strategies of docs/strategies.md, as a user writes them: training, resume and evaluation."""

import pytest
from ranks import ROOT, rows, run_ranks
from snippets import Page

pytestmark = pytest.mark.timeout(400)

STRATEGIES = {
    "tensor_parallel": "TensorParallel",
    "hsdp": "HSDP",
    "local_sgd": "LocalSGD",
    "by_hand": "ByHand",
    "engine_step": "EngineStrategy",
    "schedule": "OneByOne",
}


def write_page(folder):
    for snippet in Page(ROOT / "docs/strategies.md").snippets:
        if snippet.file:
            (folder / snippet.file).write_text(snippet.text)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    write_page(folder)
    names = ",".join(f"{module}:{cls}" for module, cls in STRATEGIES.items())
    code, output, results = run_ranks("own_strategies:train", 2, folder, names)
    assert code == 0, output
    code, output, (alone,) = run_ranks("own_strategies:alone", 1, folder, *STRATEGIES)
    assert code == 0, output
    return folder, results, alone


def assert_same(run, other):
    ours, theirs = rows(run), rows(other)
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=1e-4, abs=1e-6), our["iteration"]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "local_sgd"])
def test_a_strategy_of_the_page_trains_like_one_rank(ran, name):
    folder = ran[0]
    assert_same(folder / name, folder / "alone")


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_resumes_exactly(ran, name):
    folder, results, _ = ran
    assert [ranks[f"{name}:{STRATEGIES[name]}"] for ranks in results] == [True, True]
    assert rows(folder / f"{name}_resumed") == rows(folder / name)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "local_sgd"])
def test_it_resumes_on_one_rank(ran, name):
    folder = ran[0]
    assert_same(folder / f"{name}_alone", folder / "alone")


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_rank_evaluates_its_checkpoint(ran, name):
    folder, _, found = ran
    assert found[name] == pytest.approx(rows(folder / name)[-1]["synthetic/accuracy"], abs=1e-6)


@pytest.mark.slow
def test_four_ranks_in_two_groups_train_like_one_rank(ran, tmp_path):
    write_page(tmp_path)
    code, output, results = run_ranks("own_strategies:train", 4, tmp_path, "hsdp:HSDP")
    assert code == 0, output
    assert results == [{"hsdp:HSDP": True}] * 4
    assert_same(tmp_path / "hsdp", ran[0] / "alone")


def test_the_engine_makes_every_update(ran):
    assert [ranks["engine's steps"] for ranks in ran[1]] == [5, 5]  # of the resumed run


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
    ]
