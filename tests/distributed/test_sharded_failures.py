"""A run of several ranks in which a sharded save fails."""

import re

from ranks import run_ranks


def run(folder, on_error, comes_back=True):
    code, output, _ = run_ranks("sharded_failures:main", 2, folder, on_error, comes_back, timeout=120)
    return code, output, sorted(int(path.stem[6:]) for path in (folder / "run").glob("model_0*.pth"))


def test_a_failed_save_ends_the_run_on_all_ranks(tmp_path):
    code, output, saved = run(tmp_path, "stop")
    assert code == 1
    assert saved == []
    assert "model_0000079.pth: No such file or directory" in output
    [iteration] = set(re.findall(r"in hook PeriodicCheckpointer\.on_save, at iteration (\d+)", output))
    assert 79 < int(iteration) < 159


def test_a_failed_save_is_retried_with_on_error_continue(tmp_path):
    code, output, saved = run(tmp_path, "continue")
    assert code == 0, output
    assert "Training continues without this checkpoint" in output
    retried, due = saved
    assert 79 < retried < due == 159
    assert (tmp_path / "run/last_checkpoint").read_text() == "model_final.pth"


def test_a_failed_save_is_retried_once_until_the_next_period(tmp_path):
    code, output, saved = run(tmp_path, "continue", comes_back=False)
    assert code == 1  # the end cannot be saved either
    assert saved == []
    failed = {int(iteration) for iteration in re.findall(r"cannot save \S+/model_(\d+)\.pth", output)}
    assert failed >= {79, 159}
    assert len([iteration for iteration in failed if 79 < iteration < 159]) == 1
