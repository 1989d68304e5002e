"""How the ranks of ``launch()`` end together."""

import json
import re
import signal
from pathlib import Path

import pytest
from ranks import finish, run_ranks, start_ranks, wait_for

# What rank 1 does, and what is written.
FAILURES = {
    "raises": r"rank 0 is ended, since rank 1 failed.*in sleep_forever.*Rank 1 failed first:.*ValueError: the reason$",
    "is killed": r"Rank 1 failed first:\nprocess \d+ ended with exit code -9 \(SIGKILL\)$",
    "sys.exit 0": r"Rank 0 failed first:.*Connection closed by peer.*rank\(s\) 1 had ended before, without an error$",
    "hangs": r"rank 1 is ended, since rank [02] failed.*in sleep_forever.*Rank [02] failed first:.*in all_gather",
    "blocks": r"Rank 0 failed first:.*in synchronize",
}
SLOW = ("sys.exit 0", "blocks")


def is_gone(pid):
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.slow) if how in SLOW else how for how in FAILURES])
def test_the_first_failure_is_shown_once_and_ends_all_ranks_with_their_children(how, tmp_path):
    # The test's timeout is less than that of the ranks, unless they wait for it.
    limits = {"rank_timeout": 1, "timeout": 100} if how in ("hangs", "blocks") else {"timeout": 50}
    code, output, pids = run_ranks("failures:main", 3 if how == "hangs" else 2, tmp_path, how, **limits)
    assert code == 1
    assert re.search(FAILURES[how], output.rstrip(), re.DOTALL), output
    assert output.count("failed first") == 1
    assert all(is_gone(pid) for processes in pids for pid in processes if pid)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("stops", (75, "")), ("leaves", (0, "")), ("destroys", (0, "")), ("says why", (1, "the reason\n"))],
)
def test_ranks_that_end_without_an_error_write_nothing_but_their_reason(how, expected, tmp_path):
    code, output, _ = run_ranks("failures:main", 2, tmp_path, how, timeout=50)
    assert (code, output) == expected


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, 75), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
def test_a_signal_outside_of_training_ends_all_ranks_with_its_exit_code(number, expected, tmp_path):
    process = start_ranks("failures:main", 2, tmp_path / "run", "is ended")
    files = [tmp_path / "run" / f"{rank}.json" for rank in range(2)]
    wait_for(process, *files)
    process.send_signal(number)
    code, output = finish(process)
    assert code == expected, output
    assert all(is_gone(json.loads(file.read_text())[0]) for file in files)
