"""Every mesh of ranks trains like one rank, with every feature, and resumes the runs of others."""

import json
import shutil
import sys

import pytest
import torch
from ranks import HOOKLINE, finish, fork, rows, run_ranks, tool

pytestmark = pytest.mark.timeout(900)

TWO = ["2x1x1", "1x2x1", "1x1x2"]
FOUR = ["2x2x1", "1x2x2"]  # two ranks have tried the features one by one
# Runs of programs/meshes.py. "all" has accumulation, clipping by norm, EMA, evaluations, best checkpoints and
# asynchronous saves. The reference of the last ones is a run of one rank without them.
RUNS = ["all", "value", "param_norm", "inf", "tied", "items", "token_loss"]
REFERENCE = {"autocast": "autocast", "bfloat16": "autocast"}
# Relative differences; computing in bfloat16 rounds to 8 bits.
TOLERANCE = {"autocast": 0.01, "bfloat16": 0.02}
NAMES = [*RUNS, *REFERENCE]
RESUMED = ["one-1x2x2", "1x2x2-one", "2x2x1-1x2x2", "1x2x2-2x2x1", "1x2x2-1x2x2"]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The runs of one rank."""
    return launch(1, {"one": [*RUNS, "autocast", "plain"]}, tmp_path_factory.mktemp("one")) / "one"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(2, dict.fromkeys(TWO, NAMES), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory, one):
    folder = tmp_path_factory.mktemp("four")
    shutil.copytree(one, folder / "one")
    in_one = [pair for pair in RESUMED if pair.endswith("-one")]
    launch(4, {mesh: ["all"] for mesh in FOUR}, folder, [pair for pair in RESUMED if pair not in in_one])
    return launch(1, {}, folder, in_one)


def launch(ranks, meshes, folder, resumed=()):
    runs = [f"{mesh}:{','.join(names)}" for mesh, names in meshes.items()]
    code, output, _ = run_ranks(
        "meshes:combinations", ranks, folder, " ".join(runs), " ".join(resumed), timeout=800, rank_timeout=300
    )
    assert code == 0, output
    return folder


def assert_same(run, other, rel=1e-5):
    ours, theirs = rows(run), rows(other)
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=rel, abs=1e-6), our["iteration"]


def folder_of(mesh, request):
    return request.getfixturevalue("two" if mesh in TWO else "four")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mesh", TWO)
def test_a_mesh_trains_like_one_rank(one, two, mesh, name):
    assert_same(two / mesh / name, one / REFERENCE.get(name, name), TOLERANCE.get(name, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", FOUR)
def test_four_ranks_in_two_dimensions_train_like_one(one, four, mesh):
    assert_same(four / mesh / "all", one / "all")


@pytest.mark.slow
@pytest.mark.parametrize("pair", RESUMED)
def test_a_run_of_one_mesh_resumes_in_another(one, four, pair):
    assert_same(four / pair, one / "all")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*TWO, *FOUR])
def test_predictions_of_a_mesh_are_those_of_one_rank(one, mesh, request):
    ours = folder_of(mesh, request) / mesh / "predicted/predictions.jsonl"
    theirs = one / "predicted/predictions.jsonl"
    for our, their in zip(*(map(json.loads, path.read_text().splitlines()) for path in (ours, theirs)), strict=True):
        assert our["index"] == their["index"]
        assert torch.allclose(torch.tensor(our["prediction"]), torch.tensor(their["prediction"]), atol=1e-5)


def exported(run, folder):
    export = [sys.executable, HOOKLINE, "export", "--checkpoint", run / "model_final.pth"]
    code, out = finish(fork([*export, "--output", folder / "whole.pth"], folder))
    assert code == 0, out
    return torch.load(folder / "whole.pth", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", FOUR)
def test_a_checkpoint_of_a_mesh_is_exported_and_evaluated_on_one_rank(one, four, mesh, tmp_path):
    saved = four / mesh / "all"
    ours, theirs = exported(saved, tmp_path), exported(one / "all", tmp_path)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, atol=1e-5), name
    evaluate = [*tool("--config-file", saved / "config.yaml", "--eval-only"), "OUTPUT_DIR", tmp_path / "evaluated"]
    code, out = finish(fork([*evaluate, "MODEL.WEIGHTS", saved / "model_final.pth"], tmp_path))
    assert code == 0, out
    assert f"{rows(saved)[-1]['meshes:test/loss']:.5g}" in out


def test_two_ranks_split_layers_exactly_and_errors_name_the_key_and_the_remedy(tmp_path):
    code, output, results = run_ranks("meshes:errors", 2, tmp_path)
    assert code == 0, output
    product = "PARALLEL.ARGS: replicate 3 x shard 1 x tensor 1 does not give the number of ranks, 2. Start 3 ranks, or"
    for found in results:
        assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-6)
        assert found["losses"][0][2] < found["losses"][0][0]
        assert found["product"].startswith(product)
        assert "replicate -1 x shard 3 x tensor 1 does not give the number of ranks, 2. Start 3 ranks" in found["left"]
        assert "no submodule and no class that matches 'atention.q'; did you mean 'attention.q'?" in found["pattern"]
        assert "needs a plan, and Untouched has no tensor_parallel_plan" in found["none"]
        assert "'rowwse' is not known; did you mean 'rowwise'?" in found["word"]
        assert "'ml?' and an earlier pattern match mlp, with different words" in found["twice"]
        assert 'norm1 is a LayerNorm, and "colwise->replicate" splits Linear and Embedding only' in found["kind"]
        assert "tokens.weight and head.weight are one parameter" in found["tied"]
        assert 'mlp is "colwise" without a counterpart' in found["forgotten"]
        assert [one.partition(" than ")[0] for one in found["differ"]] == ["rank 1 has another scale"]
        assert '2 ranks cannot split odd ("colwise->replicate"), of size 3, evenly' in found["size"]
        for dtype in ("", " in bfloat16"):
            assert (
                "an operation before mlp_proj, such as softmax or a norm, needs the whole width"
                in found[f"whole width{dtype}"]
            )


@pytest.mark.slow
def test_the_plans_of_transformers_are_used(tmp_path):
    pytest.importorskip("transformers")
    code, output, results = run_ranks("meshes:plans_of_transformers", 2, tmp_path)
    assert code == 0, output
    for whole, split in (*results[0].values(), *results[1].values()):
        assert split == pytest.approx(whole, rel=1e-5)
        assert whole[2] < whole[0]
