"""Every mesh of ranks trains like one rank, with every feature, and resumes the runs of others."""

import json
import shutil
import sys

import pytest
import torch
from ranks import HOOKLINE, checks, complete, rows, run_ranks, tool

pytestmark = pytest.mark.timeout(900)

TWO = ["2x1x1", "1x2x1", "1x1x2"]
# Runs of programs/meshes.py. "all" has accumulation, items, clipping, EMA, evaluations, best checkpoints and
# asynchronous saves. In bfloat16, 8 bits are exact.
TOLERANCE = {"all": 1e-5, "tied": 1e-5, "compiled": 1e-5, "autocast": 0.01, "bfloat16": 0.02}
RESUMED = ["one-1x2x2", "1x2x2-2x2x1", "1x2x2-one"]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The runs of one rank."""
    return launch(1, {"one": ["all", "tied", "compiled", "autocast"]}, tmp_path_factory.mktemp("one")) / "one"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(2, dict.fromkeys(TWO, TOLERANCE), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory, one):
    folder = tmp_path_factory.mktemp("four")
    shutil.copytree(one, folder / "one")
    launch(4, {"1x2x2": ["all"]}, folder, RESUMED[:2])
    return launch(1, {}, folder, RESUMED[2:])


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


def assert_same_predictions(run, other):
    pairs = zip(*((path / "predictions.jsonl").read_text().splitlines() for path in (run, other)), strict=True)
    for our, their in (map(json.loads, pair) for pair in pairs):
        assert our["index"] == their["index"]
        assert torch.allclose(torch.tensor(our["prediction"]), torch.tensor(their["prediction"]), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("mesh", TWO)
def test_a_mesh_trains_and_predicts_like_one_rank(one, two, mesh, name):
    assert_same(two / mesh / name, one / ("autocast" if name == "bfloat16" else name), TOLERANCE[name])
    if name == "all":
        assert_same_predictions(two / mesh / "predicted", one / "predicted")


@pytest.mark.slow
def test_four_ranks_in_two_dimensions_train_and_predict_like_one(one, four):
    assert_same(four / "1x2x2/all", one / "all")
    assert_same_predictions(four / "1x2x2/predicted", one / "predicted")


@pytest.mark.slow
@pytest.mark.parametrize("pair", RESUMED)
def test_a_run_of_one_mesh_resumes_in_another(one, four, pair):
    assert_same(four / pair, one / "all")


@pytest.mark.slow
def test_an_exported_checkpoint_of_a_mesh_evaluates_on_one_rank_to_the_same_loss(four, tmp_path):
    saved = four / "1x2x2/all"
    export = [sys.executable, HOOKLINE, "export", "--checkpoint", saved / "model_final.pth"]
    out = complete([*export, "--output", tmp_path / "whole.pth"], tmp_path)
    evaluate = [*tool("--config-file", saved / "config.yaml", "--eval-only"), "OUTPUT_DIR", tmp_path / "evaluated"]
    for weights in (tmp_path / "whole.pth", saved / "model_final.pth"):
        out = complete([*evaluate, "MODEL.WEIGHTS", weights], tmp_path)
        assert f"{rows(saved)[-1]['meshes:test/loss']:.5g}" in out


checked, test_two_ranks = checks("meshes", 2)


@pytest.mark.slow
def test_layers_are_split_exactly_by_the_plans_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    code, output, _ = run_ranks("meshes:plans_of_transformers", 2, tmp_path)
    assert code == 0, output
