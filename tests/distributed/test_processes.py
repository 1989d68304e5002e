"""Ranks of ``launch()``: collectives, and how ranks end together."""

import signal
import time
from pathlib import Path

import pytest
from ranks import finish, run_ranks, start_ranks

pytestmark = pytest.mark.timeout(400)


def test_ranks_exchange_objects_and_numbers(tmp_path):
    code, output, (first, second) = run_ranks("collectives:collectives", 2, tmp_path)
    assert code == 0, output
    assert (first["ranks"], second["ranks"]) == ([0, 2, 0, 2], [1, 2, 1, 2])
    assert (first["environment"], second["environment"]) == (["0", "2", "0"], ["1", "2", "1"])
    for result in (first, second):
        assert result["broadcast"] == {"from": 1}
        assert (result["sum"], result["sum of floats"], result["sum of tensors"]) == (3, 2.0, [4.0])
        assert (result["ranks of this machine"], result["a group a rank"]) == (2.0, 1)
        assert (result["main process"], result["error of the main process"]) == (0, "rank 0 cannot read the file")
        assert result["gathered"] == [0, 1, 1]
    assert (first["found the cache"], second["found the cache"]) == (False, True)
    assert first["missing"] == "barrier 'the evaluation': rank(s) 1 did not come within 0.5 s (rank 0 waited)"


def end(how, folder):
    return run_ranks("failures:ends", 2, folder, how)


def assert_gone(pids):
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_an_exception_on_one_rank_ends_the_other_which_dumps_its_stacks(tmp_path):
    code, output, pids = end("raises", tmp_path)
    assert code == 1
    assert "rank 0 is ended: rank 1 failed, and this one did not end by itself; stacks of its threads:" in output
    assert 'failures.py", line' in output.partition("stacks of its threads:")[2]
    assert output.count("ValueError: the reason") == 3  # where it was raised, where rank 0 ends, and at the end
    assert output.rstrip().endswith("ValueError: the reason")
    assert_gone(pids)


def test_a_rank_that_is_killed_ends_the_others_and_is_named(tmp_path):
    code, output, pids = end("is killed", tmp_path)
    assert code == 1
    assert output.rstrip().endswith(f"Rank 1 failed first:\nprocess {pids[1]} was killed by SIGKILL")
    assert_gone(pids)


def test_the_launcher_exits_with_the_exit_code_of_all_ranks(tmp_path):
    code, output, _ = end("stops", tmp_path)
    assert (code, output) == (75, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_outside_of_training_ends_all_ranks_with_its_exit_code(number, tmp_path):
    process = start_ranks("failures:sleeps", 2, tmp_path / "run")
    files = [tmp_path / "run" / f"{rank}.json" for rank in range(2)]
    while not all(file.exists() and file.read_text() for file in files):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    code, output = finish(process)
    assert code == {signal.SIGTERM: 75, signal.SIGHUP: 129}[number], output
    assert_gone([int(file.read_text()) for file in files])


@pytest.mark.slow
def test_a_rank_that_is_done_waits_for_the_others(tmp_path):
    code, output, pids = end("is late", tmp_path)
    assert (code, output) == (0, "")
    assert_gone(pids)


def test_every_group_and_barrier_has_the_timeout_of_the_run(tmp_path):
    code, output, limits = run_ranks("collectives:timeouts", 2, tmp_path, rank_timeout=7)
    assert code == 0, output
    assert limits == [[7.0] * 5] * 2


def test_a_hung_rank_is_named_with_its_stack_after_the_timeout(tmp_path):
    code, output, pids = run_ranks("failures:hangs", 3, tmp_path, timeout=100, rank_timeout=2)
    assert code == 1
    last = output.rpartition("Rank 1 hung first:")[2]
    stands, _, waits = last.partition("waited for it here:")
    assert "others waited 2 s for it" in stands
    assert "in sleep_forever" in stands
    assert "in hangs" in waits
    assert "in sleep_forever" not in waits
    assert_gone(pids)


@pytest.mark.slow
def test_a_rank_with_a_blocked_interpreter_is_killed_after_a_stack_dump(tmp_path):
    code, output, pids = run_ranks("blocked:main", 2, tmp_path, timeout=100, rank_timeout=2)
    assert code == 1
    stands = output.partition("rank 1 is killed: its interpreter is blocked; its stack:")[2]
    assert "in search" in stands
    assert "Rank 1 left first:\nit does not answer: its process ended or is blocked" in output
    assert_gone(pids)


@pytest.mark.slow
def test_an_abort_by_nccl_shows_the_stack_of_the_hung_rank(tmp_path):
    code, output, _ = run_ranks("failures:aborts", 2, tmp_path, timeout=50)
    assert code == 1
    last = output.rpartition("Rank 0 failed first:\nprocess ")[2]
    assert "was killed by SIGABRT\nRank 1 did not wait for others, its stack:" in last
    assert "in sleep_forever" in last


@pytest.mark.parametrize("how", ["os._exit 3", "sys.exit 0", pytest.param("return", marks=pytest.mark.slow)])
def test_a_rank_that_leaves_early_is_named_with_its_exit_code(how, tmp_path):
    code, output, pids = run_ranks("failures:leaves", 2, tmp_path, how, timeout=50)  # less than the ranks' timeout
    assert code == 1
    last = output.rpartition("Rank 1 left first:\n")[2]
    number = "".join(filter(str.isdigit, how)) or "0"
    assert f"exit code was {number}" in last
    if how.startswith("sys"):
        assert "in leaves" in last
        assert f"SystemExit({number})" in last
    assert_gone(pids)


def test_a_rank_may_continue_alone_after_the_others_have_left(tmp_path):
    code, output, _ = run_ranks("failures:works_on", 2, tmp_path, timeout=50)
    assert (code, output) == (0, "")


@pytest.mark.slow
def test_child_processes_of_failed_ranks_are_killed(tmp_path):
    code, output, children = run_ranks("failures:left_behind", 2, tmp_path, timeout=60)
    assert code == 1
    assert "ValueError: the reason" in output
    for child in children:
        stat = Path(f"/proc/{child}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
