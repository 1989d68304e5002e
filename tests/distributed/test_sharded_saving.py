"""Sharded checkpoints, and training with them, follow the rules of checkpoint files."""

import json
import sys
from itertools import pairwise

import pytest
import torch
from ranks import HOOKLINE, finish, fork, run_ranks

from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.candidates import find_resumable
from hookline.engine.checkpoint.weights import averaged_weights, read_checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    code, output, results = run_ranks("sharded:training", 2, folder)
    assert code == 0, output
    return folder, results


def test_an_interrupted_run_with_ema_and_asynchronous_saves_resumes_to_identical_weights(trained):
    folder, results = trained
    for result in results:
        assert result["started"] == 8
        assert result["model"]
        assert result["averaged"]
    rows = [(folder / name / "metrics.json").read_text().splitlines() for name in ("stopped", "through")]
    losses = [[json.loads(row)["total_loss"] for row in part if "total_loss" in row] for part in rows]
    assert losses[0] == losses[1]


def test_old_folders_are_removed_and_the_best_are_kept(trained):
    folder, results = trained
    assert results[0]["stopped"][:1] == ["model_0000007.pth"]
    left = sorted(path.name for path in (folder / "through").glob("*.pth"))
    assert "model_0000011.pth" in left
    assert "model_0000002.pth" not in left
    assert "model_0000008.pth" not in left
    assert len([name for name in left if name.startswith("model_best")]) == 3  # the best has two names
    assert not list((folder / "through").glob(".hookline-*"))
    assert (folder / "through/last_checkpoint").read_text() == "model_final.pth"
    assert all((folder / "through" / name / ".metadata").is_file() for name in left)


def test_averaged_weights_of_a_sharded_run_are_exported(trained):
    folder, _ = trained
    path = folder / "through/model_0000011.pth"
    export = [sys.executable, HOOKLINE, "export", "--checkpoint", path, "--weights", "averaged"]
    code, output = finish(fork([*export, "--output", folder / "averaged.pth"], folder))
    assert code == 0, output
    exported = torch.load(folder / "averaged.pth", weights_only=True)
    checkpoint = read_checkpoint(str(path))
    saved = averaged_weights(checkpoint)
    assert exported.keys() == saved.keys() == checkpoint["model"].keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert not all(torch.equal(exported[name], checkpoint["model"][name]) for name in saved)


def test_all_ranks_handle_a_nan_loss_of_one_rank(trained):
    for result in trained[1]:
        assert result["skipped"] == 1
        assert result["finite"]
        assert result["raised"].startswith("on rank 1 the loss is NaN or infinite at iteration 5")


def test_a_nan_in_one_shard_is_raised_on_all_ranks_and_not_saved(trained):
    for result in trained[1]:
        assert result["raised alone"].startswith("the gradient of 1.weight is NaN or infinite at iteration 6")
        assert result["left"]
        assert [name for name in result["saved"] if "best" not in name] == ["model_0000002.pth", "model_0000005.pth"]


def test_ranks_do_not_exchange_flags_in_every_step(trained):
    for result in trained[1]:
        before = result["exchanges"]
        assert any(first == then for first, then in pairwise(before))


def test_a_loss_scale_accumulation_and_clipping_work_together(trained):
    first, second = trained[1]
    assert first["scale"] == second["scale"] > 0
    assert first["norm"] == second["norm"] > 0


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    code, output, results = run_ranks("sharded:saving", request.param, folder)
    assert code == 0, output
    return folder, results


def test_an_asynchronous_save_has_the_state_of_its_call_and_becomes_the_last_when_complete(saved):
    for result in saved[1]:
        assert result["last while it is written"] == "old.pth"
        assert result["last"] == "new.pth"
        assert result["of the call"]


def test_a_rank_loads_only_its_shards_even_from_a_file(saved):
    results = saved[1]
    for name in ("run/new.pth", "file.pth"):
        assert sum(result[name] for result in results) == results[0]["whole"]
        assert max(result[name] for result in results) < 0.7 * results[0]["whole"]
    for result in results:  # loaded into the shards
        assert result["prefixed"]
        assert result["hugging_face"]
        assert result["dcp_folder"]
    assert all(result["optimizer unread"] for result in results)


def test_each_rank_writes_only_its_share(saved):
    folder, results = saved
    sizes = [(folder / f"run/new.pth/__{rank}_0.distcp").stat().st_size for rank in range(len(results))]
    assert max(sizes) < 0.75 * sum(sizes)


def test_a_disk_error_on_one_rank_fails_on_all_and_keeps_the_previous_checkpoint(saved):
    folder, results = saved
    for result in results:
        assert result["twice"] == "twice.pth"
        assert "No space left on device" in result["error"]
        assert "make room there" in result["error"]
        assert result["reported"] == result["error"]
        assert result["after the error"] == ["twice.pth", ["new.pth", "old.pth", "twice.pth"]]
        assert "Permission denied" in result["untagged"]
    assert "on rank 1: No space" in results[0]["error"]
    assert (folder / "run/last_checkpoint").read_text() == "twice.pth"


def test_evaluations_use_equal_running_means(saved):
    assert all(result["equal buffers"] for result in saved[1])


@pytest.mark.parametrize(
    ("rank", "where", "asynchronous"),
    [
        (1, "checksums", True),
        pytest.param(0, "rename", True, marks=pytest.mark.slow),
        pytest.param(0, "write_parts", False, marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_while_writing_leaves_the_previous_checkpoint(tmp_path, rank, where, asynchronous):
    exit_code, output, _ = run_ranks("sharded:killed", 2, tmp_path, rank, where, asynchronous)
    assert exit_code != 0
    assert "SIGKILL" in output
    run = tmp_path / "run"
    assert (run / "last_checkpoint").read_text() == "model_0000000.pth"
    assert not (run / "model_0000001.pth").exists()
    keeper = Checkpointer(torch.nn.Linear(1, 1), str(run))
    assert find_resumable(keeper) == str(run / "model_0000000.pth")
    keeper.save("model_0000002")
    assert not list(run.glob(".hookline-*"))


def test_a_rank_that_fails_alone_does_not_wait_for_others_to_save(tmp_path):
    code, output, _ = run_ranks("sharded:failing", 2, tmp_path, timeout=120)
    assert code == 1
    assert "ValueError: the reason" in output
    run = tmp_path / "run"
    assert not (run / "model_exception.pth").exists()
    assert (run / "last_checkpoint").read_text() == "model_0000002.pth"


def test_the_best_checkpoints_are_chosen_by_the_mean_loss_over_ranks(tmp_path):
    code, output, results = run_ranks("sharded:choosing", 2, tmp_path)
    assert code == 0, output
    assert results[0] == results[1]
    assert results[0]["sharded"] == [pytest.approx(row) for row in results[0]["losses"][:2]]
    best = torch.load(tmp_path / "sharded/model_best.pth/state.pth", weights_only=True)
    assert [best["best_metric"]["value"], best["iteration"]] == results[0]["other"][0]
