"""Runs of the command line in several processes: results, files and failures."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from ranks import SYNTHETIC, complete, finish, fork, forked_torchrun, free_port, rows, start, tool, torchrun, wait_for

pytestmark = pytest.mark.timeout(400)


def options(*more, mishaps=()):
    arguments = ["--config-file", SYNTHETIC, *more, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", "run", "SEED", "3"]
    return [*arguments, "HOOKS", [{"NAME": "mishaps:Mishap", "ARGS": args} for args in mishaps]]


TWO = ("--num-gpus", 2)
FOREVER = ("SOLVER.MAX_ITER", 1000000)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """An undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    output = complete(tool(*options(*TWO)), folder)
    return folder / "run", output


def assert_gone(folder, what):
    pids = [int(path.read_text()) for path in folder.glob(f"{what}.?")]
    assert len(pids) == 2
    end = time.monotonic() + 60
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, alive
        time.sleep(0.1)


def assert_stopped(run, reason="interrupted by SIGTERM"):
    """Assert that all ranks ended at the same iteration, with a checkpoint."""
    logs = [log.read_text() for log in run.glob("log.txt*")]
    assert len(logs) == 2
    ends = [re.findall(rf"Training ended at iteration (\d+): {reason}", log) for log in logs]
    assert all(ends), "\n".join(log[-2000:] for log in logs)
    (at,) = {end[-1] for end in ends}
    assert (run / "last_checkpoint").read_text() == f"model_{int(at) - 1:07d}.pth"


# ---------------------------------------------------------------------------- results


def test_each_process_has_a_log_and_the_console_and_files_are_those_of_rank_0(two):
    run, output = two
    assert sorted(path.name for path in run.glob("log.txt*")) == ["log.txt", "log.txt.rank1"]
    assert output.count("Training ended at iteration 160: completed") == 1
    assert "rank1] hookline.engine.train_loop INFO: Training ended" in (run / "log.txt.rank1").read_text()
    assert "rank1]" not in (run / "log.txt").read_text()
    assert len(list(run.glob("events.out.*"))) == 1
    assert len(rows(run)) == len({row["iteration"] for row in rows(run)})
    found = {row["slowest_rank"] for row in rows(run, leave_out=("eta",)) if "slowest_rank" in row}
    assert found
    assert found <= {0, 1}


# ---------------------------------------------------------------------------- stops


def test_a_signal_to_the_launcher_stops_all_ranks_at_the_same_step_with_a_checkpoint(tmp_path):
    process = fork(tool(*options(*FOREVER, *TWO)), tmp_path)
    wait_for(process, tmp_path / "run" / "metrics.json")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert_stopped(tmp_path / "run")


def test_ranks_save_and_exit_when_their_launcher_is_killed(tmp_path):
    process = fork(tool(*options(*FOREVER, *TWO, mishaps=[{"what": "none"}])), tmp_path)
    wait_for(process, tmp_path / "none.0", tmp_path / "none.1")
    os.kill(process.pid, signal.SIGKILL)
    assert_gone(tmp_path, "none")
    assert_stopped(tmp_path / "run")


@pytest.mark.slow
def test_a_run_stopped_by_one_rank_resumes_to_the_same_metrics(two, tmp_path):
    complete(tool(*options(*TWO, mishaps=[{"what": "stop"}])), tmp_path, code=75)
    assert_stopped(tmp_path / "run", "one rank asked")
    (tmp_path / "one").mkdir()
    shutil.copytree(tmp_path / "run", tmp_path / "one/run")
    complete(tool(*options(*TWO, "--resume")), tmp_path)
    assert rows(tmp_path / "run") == rows(two[0])
    # Another number of ranks only changes the order of additions.
    complete(tool(*options("--resume")), tmp_path / "one")
    for ours, theirs in zip(rows(tmp_path / "one/run"), rows(two[0]), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_an_exception_on_one_rank_is_first_and_last_in_the_log(tmp_path):
    code, output = finish(fork(tool(*options(*TWO, mishaps=[{"what": "raise"}])), tmp_path))
    assert code == 1
    log = (tmp_path / "run" / "log.txt").read_text()
    for text in (output, log):
        *_, reason, place, command = text.rstrip().splitlines()
        assert [reason, place] == ["ValueError: the reason", "(in hook Mishap.before_step, at iteration 30)"]
        assert re.fullmatch(r"look at this step: .*train_net.py --config-file \S*run/config.yaml --replay 30", command)
    first = log.index("Traceback")
    assert "rank1]" in log[:first].splitlines()[-1]
    assert "ValueError: the reason" in log[first : log.index("rank0]", first)]
    assert_gone(tmp_path, "raise")


# ---------------------------------------------------------------------------- machines


@pytest.mark.slow
def test_two_machines_train_together_and_without_a_shared_folder_resume_from_copies(two, tmp_path):
    """Each machine has its own disk. Between the runs the folder is copied to the other machine."""
    places = [tmp_path / "first", tmp_path / "second"]

    def run(*more, **mishaps):
        several = ("--num-machines", 2, "--dist-url", f"tcp://127.0.0.1:{free_port()}", *more, "--machine-rank")
        started = [fork(tool(*options(*several, rank, **mishaps)), place) for rank, place in enumerate(places)]
        return [finish(process) for process in started]

    for place in places:
        place.mkdir()
    ended = run(mishaps=[{"what": "stop"}])
    assert [code for code, _ in ended] == [75, 75], ended
    assert (ended[0][1].count("Training ended"), ended[1][1]) == (1, "")
    ended = run("--resume")
    assert 2 in [code for code, _ in ended]
    assert any("/second/run/model_0" in output for _, output in ended), ended
    shutil.copytree(places[0] / "run", places[1] / "run", dirs_exist_ok=True)
    ended = run("--resume")
    assert [code for code, _ in ended] == [0, 0], ended
    assert rows(places[0] / "run") == rows(two[0])


# ---------------------------------------------------------------------------- torchrun


@pytest.mark.slow
def test_torchrun_restarts_killed_ranks_and_a_signal_to_it_stops_all(two, tmp_path):
    mishaps = [{"what": "kill once", "rank": 0}, {"what": "stop the launcher", "at": 90}]
    arguments = options("SOLVER.CHECKPOINT_PERIOD", 20, "--resume", mishaps=mishaps)
    restarts = ("--max-restarts", 1)
    process = start(torchrun(2, *arguments, options=restarts), tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    code, output = finish(process)
    assert code == 1, output  # torchrun's own exit code
    assert "Starting training from iteration 20" in (tmp_path / "run" / "log.txt").read_text()
    assert_stopped(tmp_path / "run")
    code, output = finish(forked_torchrun(2, *options("--resume"), restarts=0, folder=tmp_path))
    assert code == 0, output
    assert rows(tmp_path / "run") == rows(two[0])


@pytest.mark.slow
def test_invalid_input_is_printed_once_under_torchrun(tmp_path):
    wrong = ("PARALLEL.ARGS.compresion", "bf16")
    code, output = finish(forked_torchrun(2, *options(), *wrong, restarts=0, folder=tmp_path))
    assert code == 1  # torchrun's own exit code
    assert output.count("error: PARALLEL.ARGS.compresion: DDP takes no argument 'compresion'; did you mean") == 1
    assert not (tmp_path / "run").exists()
