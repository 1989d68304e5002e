"""Every mesh of ranks trains like one rank, with every feature, and resumes the runs of others."""

import json
import shutil
import sys

import pytest
import torch
from ranks import HOOKLINE, finish, fork, rows, run_ranks, tool

pytestmark = pytest.mark.timeout(900)

TWO = ["2x1x1", "1x2x1", "1x1x2"]
# Four ranks in one dimension train with all features only: two ranks have tried them one by one.
LARGE = ["4x1x1", "1x4x1", "1x1x4"]
MIXED = ["2x2x1", "2x1x2", "1x2x2"]
FOUR = [*LARGE, *MIXED]
# Runs of programs/meshes.py. "all" has accumulation, clipping by norm, EMA, evaluations, best checkpoints and
# asynchronous saves. The reference of the last ones is a run of one rank without them.
RUNS = ["all", "value", "param_norm", "inf", "sequence", "tied", "items", "token_loss"]
REFERENCE = {"autocast": "autocast", "bfloat16": "autocast"}
# Relative differences; computing in bfloat16 rounds to 8 bits.
TOLERANCE = {"autocast": 0.01, "bfloat16": 0.02}
NAMES = [*RUNS, *REFERENCE]
# Each mesh is left for two others and entered from two others; and one is resumed as it was.
ORDER = ["one", *FOUR]
RESUMED = [f"{ORDER[i]}-{ORDER[(i + step) % len(ORDER)]}" for step in (1, 3) for i in range(len(ORDER))]
RESUMED += ["1x2x2-1x2x2"]


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
    meshes = {mesh: ["all"] for mesh in LARGE} | dict.fromkeys(MIXED, NAMES)
    launch(4, meshes, folder, [pair for pair in RESUMED if pair not in in_one])
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
@pytest.mark.parametrize("mesh", [*TWO, *MIXED])
def test_a_mesh_trains_like_one_rank(one, mesh, name, request):
    run = folder_of(mesh, request) / mesh / name
    assert_same(run, one / REFERENCE.get(name, name), TOLERANCE.get(name, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", LARGE)
def test_four_ranks_in_one_dimension_train_like_one(one, four, mesh):
    assert_same(four / mesh / "all", one / "all")


@pytest.mark.slow
def test_eight_ranks_in_three_dimensions_train_like_one(one, tmp_path):
    assert_same(launch(8, {"2x2x2": ["all"]}, tmp_path) / "2x2x2" / "all", one / "all")


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
@pytest.mark.parametrize("mesh", ["1x1x4", "2x2x1", "1x2x2"])
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
    product = "PARALLEL.ARGS: replicate 3 x shard 1 x tensor 1 is 3, not the number of ranks, 2. Start 3 ranks, or set"
    for found in results:
        assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-6)
        assert found["losses"][0][2] < found["losses"][0][0]
        assert found["product"].startswith(product)
        assert "shard 3 x tensor 1 does not divide the number of ranks, 2. Start 3 ranks" in found["left"]
        assert "no submodule and no class that matches 'atention.q'; did you mean 'attention.q'?" in found["pattern"]
        assert "needs a plan, and Untouched has no tensor_parallel_plan" in found["none"]
        assert "norm2 (LayerNorm) has none" in found["incomplete"]
        assert "'mlp' and 'ml?' both match mlp" in found["twice"]
        assert 'norm1 is a LayerNorm, and "colwise" splits Linear and Embedding only' in found["kind"]
        assert "tokens.weight and head.weight are one parameter" in found["tied"]
        assert 'mlp is "colwise", which leaves its output split, and no "rowwise" layer' in found["forgotten"]
        assert [one.partition(" than ")[0] for one in found["differ"]] == ["rank 1 has another scale"]
        assert "2 ranks cannot split the heads of attention, 3, evenly" in found["heads"]
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
