"""Sharded checkpoints, and training with them, follow the rules of checkpoint files."""

import sys

import torch
from ranks import HOOKLINE, checks, complete, run_ranks

from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.find_checkpoint import find_resumable
from hookline.engine.checkpoint.weights import find_averaged, read_checkpoint

checked, test_two_ranks = checks("sharded", 2)


def test_averaged_weights_of_a_sharded_run_are_exported(checked):
    folder = checked[0] / "check_an_interrupted_run_with_ema_and_async_saves_resumes_to_identical_weights"
    path = folder / "through/model_0000011.pth"
    export = [sys.executable, HOOKLINE, "export", "--checkpoint", path, "--weights", "averaged"]
    complete([*export, "--output", folder / "averaged.pth"], folder)
    exported = torch.load(folder / "averaged.pth", weights_only=True)
    checkpoint = read_checkpoint(str(path))
    saved = find_averaged(checkpoint)[1]
    assert exported.keys() == saved.keys() == checkpoint["model"].keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert not all(torch.equal(exported[name], checkpoint["model"][name]) for name in saved)


def test_a_rank_killed_while_writing_leaves_the_previous_checkpoint(tmp_path):
    exit_code, output, _ = run_ranks("sharded:killed", 2, tmp_path)
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
