"""Runs of several ranks in which a sharded save fails."""

import re

import pytest
from ranks import finish, start_ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Exit code, output and saved iterations of each run, and its folder. They sleep, and so run at the same time."""
    folder = tmp_path_factory.mktemp("runs")
    hows = {"stop": ("stop", True), "continue": ("continue", True), "gone": ("continue", False)}
    started = {how: start_ranks("sharded_failures:main", 2, folder / how, *hows[how]) for how in hows}
    ended = {how: finish(process, timeout=120) for how, process in started.items()}
    return {
        how: (*end, sorted(int(path.stem[6:]) for path in (folder / how / "run").glob("model_0*.pth")), folder / how)
        for how, end in ended.items()
    }


def test_a_failed_save_ends_the_run_on_all_ranks(runs):
    code, output, saved, _ = runs["stop"]
    assert code == 1
    assert saved == []
    assert "model_0000079.pth: No such file or directory" in output
    assert set(re.findall(r"in hook PeriodicCheckpointer\.on_save, at iteration (\d+)", output)) == {"159"}


def test_a_run_continues_after_a_failed_save_with_on_error_continue(runs):
    code, output, saved, folder = runs["continue"]
    assert code == 0, output
    assert "Training continues without this checkpoint" in output
    assert saved == [159]
    assert (folder / "run/last_checkpoint").read_text() == "model_final.pth"


def test_each_failed_save_is_reported(runs):
    code, output, saved, _ = runs["gone"]
    assert code == 1  # the end cannot be saved either
    assert saved == []
    failed = {int(iteration) for iteration in re.findall(r"cannot save \S+/model_(\d+)\.pth", output)}
    assert failed == {79, 159}
