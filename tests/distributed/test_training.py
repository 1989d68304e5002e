"""Runs of the command line in several processes: results, files and failures."""

import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from ranks import DIGITS, SYNTHETIC, finish, fork, forked_torchrun, free_port, rows, start, tool, torchrun

pytestmark = pytest.mark.timeout(400)


def options(folder, *more, mishap=None):
    arguments = ["--config-file", SYNTHETIC, *more, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", folder, "SEED", "3"]
    if mishap:
        arguments += ["HOOKS", f"[{{'NAME': 'mishaps:Mishap', 'ARGS': {mishap!r}}}]"]
    return arguments


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """An undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    code, output = finish(fork(tool(*options("run", "--num-gpus", "2")), folder))
    assert code == 0, output
    return folder / "run", output


def assert_gone(folder, what):
    pids = [int(path.read_text()) for path in folder.glob(f"{what}.?")]
    assert len(pids) == 2
    end = time.monotonic() + 60
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, alive
        time.sleep(0.1)


# ---------------------------------------------------------------------------- results


def test_two_processes_compute_the_same_as_one(two, tmp_path):
    code, output = finish(fork(tool(*options("run")), tmp_path))
    assert code == 0, output
    alone, together = rows(tmp_path / "run"), rows(two[0])
    assert [row.keys() for row in together] == [row.keys() for row in alone]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_each_process_has_a_log_and_the_console_shows_rank_0(two):
    run, output = two
    assert sorted(path.name for path in run.glob("log.txt*")) == ["log.txt", "log.txt.rank1"]
    assert output.count("Training ended at iteration 160: completed") == 1
    assert "rank1] hookline.engine.train_loop INFO: Training ended" in (run / "log.txt.rank1").read_text()
    assert "rank1]" not in (run / "log.txt").read_text()
    assert len(list(run.glob("events.out.*"))) == 1
    assert len(rows(run)) == len({row["iteration"] for row in rows(run)})


def test_the_slowest_rank_is_among_the_metrics(two):
    found = [row["slowest_rank"] for row in rows(two[0], leave_out=("eta",)) if "slowest_rank" in row]
    assert found
    assert set(found) <= {0, 1}


@pytest.mark.slow
def test_evaluating_in_two_processes_prints_the_last_results_once(two, tmp_path):
    arguments = options("eval", "--eval-only", "--num-gpus", "2", "MODEL.WEIGHTS", two[0] / "model_final.pth")
    code, output = finish(fork(tool(*arguments), tmp_path))
    assert code == 0, output
    last = rows(two[0])[-1]
    results = [line.split() for line in output.splitlines() if line.startswith("  synthetic")]
    expected = [["accuracy", last["synthetic/accuracy"]], ["loss", last["synthetic/loss"]]]
    assert results == [["synthetic", name, f"{value:.5g}"] for name, value in expected]


@pytest.mark.slow
def test_two_processes_learn_digits_as_well_as_one(tmp_path):
    accuracy = []
    for ranks in ("1", "2"):
        arguments = ["--config-file", DIGITS, "--num-gpus", ranks, "OUTPUT_DIR", f"run{ranks}", "MODEL.DEVICE", "cpu"]
        code, output = finish(fork(tool(*arguments, "SOLVER.MAX_ITER", "6ep"), tmp_path), timeout=300)
        assert code == 0, output
        accuracy.append(rows(tmp_path / f"run{ranks}")[-1]["digits_test/accuracy"])
    assert min(accuracy) > 0.95
    assert accuracy[0] == pytest.approx(accuracy[1], abs=0.01)  # each batch norm sees half of a batch


# ---------------------------------------------------------------------------- agreement


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_signal_to_the_launcher_stops_all_ranks_at_the_same_step_with_a_checkpoint(tmp_path, number, exit_code):
    process = fork(tool(*options("run", "SOLVER.MAX_ITER", "1000000", "--num-gpus", "2")), tmp_path)
    wait_for(tmp_path / "run" / "metrics.json", process)
    process.send_signal(number)
    code, output = finish(process)
    assert code == exit_code, output
    at = ended(tmp_path / "run", f"interrupted by {number.name}")
    assert (tmp_path / "run" / "last_checkpoint").read_text() == f"model_{at - 1:07d}.pth"


@pytest.mark.slow
def test_ranks_save_and_exit_when_their_launcher_is_killed(tmp_path):
    process = start(
        tool(*options("run", "--num-gpus", "2", "SOLVER.MAX_ITER", "1000000", mishap={"what": "none"})), tmp_path
    )
    wait_for(tmp_path / "none.0", process)
    wait_for(tmp_path / "none.1", process)
    process.kill()
    process.communicate(timeout=100)  # returns when all processes have closed their outputs
    assert_gone(tmp_path, "none")
    at = ended(tmp_path / "run", "interrupted by SIGTERM")
    assert (tmp_path / "run" / "last_checkpoint").read_text() == f"model_{at - 1:07d}.pth"


def ended(run, reason):
    """Return the iteration at which all ranks ended."""
    logs = [log.read_text() for log in run.glob("log.txt*")]
    assert len(logs) == 2
    ends = [re.findall(rf"Training ended at iteration (\d+): {reason}", log) for log in logs]
    assert all(ends), "\n".join(log[-2000:] for log in logs)
    (at,) = {end[-1] for end in ends}
    return int(at)


def wait_for(path, process, timeout=150):
    end = time.monotonic() + timeout
    while not path.exists() or not path.stat().st_size:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_stopped_by_one_rank_resumes_to_the_same_metrics(two, tmp_path):
    code, output = finish(fork(tool(*options("run", "--num-gpus", "2", mishap={"what": "stop"})), tmp_path))
    assert code == 75, output
    ended(tmp_path / "run", "one rank asked")
    shutil.copytree(tmp_path / "run", tmp_path / "one")
    code, output = finish(fork(tool(*options("run", "--num-gpus", "2", "--resume")), tmp_path))
    assert code == 0, output
    assert rows(tmp_path / "run") == rows(two[0])
    # Another number of ranks only changes the order of additions.
    code, output = finish(fork(tool(*options("one", "--resume")), tmp_path))
    assert code == 0, output
    for ours, theirs in zip(rows(tmp_path / "one"), rows(two[0]), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


# ---------------------------------------------------------------------------- failure


def test_an_exception_on_one_rank_is_first_and_last_in_the_log(tmp_path):
    code, output = finish(fork(tool(*options("run", "--num-gpus", "2", mishap={"what": "raise"})), tmp_path))
    assert code == 1
    log = (tmp_path / "run" / "log.txt").read_text()
    for text in (output, log):
        *_, reason, place, command = text.rstrip().splitlines()
        assert [reason, place] == ["ValueError: the reason", LAST.format("raise", 30)]
        assert re.fullmatch(r"look at this step: .*train_net.py --config-file \S*run/config.yaml --replay 30", command)
    first = log.index("Traceback")
    assert "rank1]" in log[:first].splitlines()[-1]
    assert "ValueError: the reason" in log[first : log.index("rank0]", first)]
    assert_gone(tmp_path, "raise")


LAST = "(in hook Mishap.before_step, at iteration {1})"


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    process = fork(tool(*options("run", "--num-gpus", "2", mishap={"what": "kill"})), tmp_path)
    wait_for(tmp_path / "kill.1", process)
    killed = time.monotonic()
    code, output = finish(process)
    assert code == 1
    assert time.monotonic() - killed < 100  # about ten seconds on a quiet machine
    pid = (tmp_path / "kill.1").read_text()
    assert output.rstrip().endswith(f"rank 1 of 2 failed first: process {pid} was killed by SIGKILL")
    last = (tmp_path / "run" / "log.txt").read_text().rstrip().splitlines()[-2:]
    assert last[0].endswith("Rank 1 failed first:")
    assert last[1] == f"process {pid} was killed by SIGKILL"
    assert_gone(tmp_path, "kill")


@pytest.mark.slow
def test_a_rank_ended_while_writing_leaves_complete_checkpoints(two, tmp_path):
    saves = ("SOLVER.CHECKPOINT_PERIOD", "20")
    arguments = options("run", "--num-gpus", "2", *saves, mishap={"what": "raise while saving", "at": 60})
    code, output = finish(fork(tool(*arguments), tmp_path))
    assert code == 1
    run = tmp_path / "run"
    assert "rank 0 is ended: rank 1 failed, and this one did not end by itself" in output
    assert (tmp_path / "saving").read_text().endswith("run/model_0000059.pth")
    assert not (run / "model_0000059.pth").exists()
    assert (run / "last_checkpoint").read_text() == "model_0000039.pth"
    code, output = finish(fork(tool(*options("run", "--num-gpus", "2", "--resume", *saves)), tmp_path))
    assert code == 0, output
    assert rows(run) == rows(two[0])
    assert not [path.name for path in run.iterdir() if "tmp" in path.name]


@pytest.mark.slow
def test_a_rank_that_misses_a_collective_is_named_with_its_stack(tmp_path):
    arguments = options("run", "--num-gpus", "2", mishap={"what": "sleep"})
    code, output = finish(fork(tool(*arguments, "PARALLEL.TIMEOUT", "4s"), tmp_path))
    assert code == 1
    for text in (output, (tmp_path / "run" / "log.txt").read_text()):
        last = text.rpartition("Rank 1 hung first:")[2].partition("waited for it here:")[0]
        assert "others waited 4 s for it" in last
        assert "mishaps.py" in last
    assert "rank 1 is ended: rank 1 hung, and this one did not end by itself; stacks of its threads" in output
    assert "mishaps.py" in output.partition("stacks of its threads")[2]
    assert_gone(tmp_path, "sleep")


@pytest.mark.parametrize(
    "policy", ["raise", pytest.param("skip", marks=pytest.mark.slow), pytest.param("stop", marks=pytest.mark.slow)]
)
def test_all_ranks_apply_the_policy_for_a_nan_loss_of_one_rank(tmp_path, policy):
    arguments = options("run", "--num-gpus", "2", mishap={"what": "nan"})
    code, output = finish(fork(tool(*arguments, "SOLVER.NONFINITE_LOSS", policy), tmp_path))
    logs = [(tmp_path / "run" / name).read_text() for name in ("log.txt", "log.txt.rank1")]
    if policy == "raise":
        assert code == 1
        for log in logs:
            assert "FloatingPointError: on rank 1 the loss is NaN or infinite at iteration 30" in log
        return
    assert code == 0, output
    if policy == "stop":
        for log in logs:
            assert "Training ended at iteration 31: on rank 1 the loss is NaN" in log
        return
    row = next(row for row in rows(tmp_path / "run") if "nonfinite_steps" in row)
    assert (row["iteration"], row["nonfinite_steps"]) == (30, 1)
    assert rows(tmp_path / "run")[-1]["synthetic/accuracy"] > 0.9


# ---------------------------------------------------------------------------- machines


def machines(folder, other=None, more=()):
    """Start two launchers with one address, as on two machines."""
    url = f"tcp://127.0.0.1:{free_port()}"
    places = (folder, other or folder)
    common = ("--num-machines", "2", "--dist-url", url)
    return [
        fork(tool(*options("run", "--machine-rank", rank, *common, *more)), place) for rank, place in enumerate(places)
    ]


@pytest.mark.slow
def test_two_machines_train_together(two, tmp_path):
    ended = [finish(process) for process in machines(tmp_path)]
    assert [code for code, _ in ended] == [0, 0], ended
    assert "Training ended at iteration 160: completed" in ended[0][1]
    assert ended[1][1] == ""
    assert rows(tmp_path / "run") == rows(two[0])


@pytest.mark.slow
def test_machines_without_a_shared_folder_are_warned_and_resume_from_copies(tmp_path):
    """Each machine has its own disk. Between the runs the folder is copied to the other machine."""
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    ended = [finish(process) for process in machines(*places, more=("SOLVER.MAX_ITER", 100))]
    assert [code for code, _ in ended] == [0, 0], ended
    assert "OUTPUT_DIR: rank 1 (on " in ended[0][1]
    assert "does not see the folder" in ended[0][1]
    ended = [finish(process) for process in machines(*places, more=("--resume",))]
    assert 2 in [code for code, _ in ended]
    assert any("/second/run/model_final.pth" in output for _, output in ended), ended
    shutil.copytree(places[0] / "run", places[1] / "run", dirs_exist_ok=True)
    ended = [finish(process) for process in machines(*places, more=("--resume",))]
    assert [code for code, _ in ended] == [0, 0], ended
    assert rows(places[0] / "run")[-1]["iteration"] == 160


# ---------------------------------------------------------------------------- torchrun


@pytest.mark.slow
def test_torchrun_restarts_killed_ranks_and_a_signal_to_it_stops_all_with_a_checkpoint(tmp_path):
    mishaps = [
        {"NAME": "mishaps:Mishap", "ARGS": {"what": what, "at": at}} for what, at in (("kill once", 30), ("none", 50))
    ]
    arguments = options("run", "SOLVER.MAX_ITER", "1000000", "SOLVER.CHECKPOINT_PERIOD", "20")
    process = start(torchrun(2, *arguments, "HOOKS", mishaps, options=("--max-restarts", 1)), tmp_path)
    for rank in range(2):
        wait_for(tmp_path / f"none.{rank}", process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 1, output  # torchrun's own exit code
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "torchrun restarts this run: it resumes from its last checkpoint" in log
    assert "Starting training from iteration 20" in log
    at = ended(tmp_path / "run", "interrupted by SIGTERM")
    assert (tmp_path / "run" / "last_checkpoint").read_text() == f"model_{at - 1:07d}.pth"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "at"), [(1, 0), (0, 17), (1, 80), (0, 159)])
def test_killing_any_rank_at_any_step_gives_the_same_result(two, tmp_path, rank, at):
    arguments = options("run", mishap={"what": "kill once", "at": at, "rank": rank})
    code, output = finish(forked_torchrun(2, *arguments, restarts=1, folder=tmp_path))
    assert code == 0, output
    assert (tmp_path / "killed").exists()
    assert rows(tmp_path / "run") == rows(two[0])


@pytest.mark.slow
def test_a_rank_that_exits_silently_under_torchrun_is_named_in_the_log(tmp_path):
    code, output = finish(forked_torchrun(2, *options("run", mishap={"what": "exit"}), restarts=0, folder=tmp_path))
    assert code == 1
    assert re.search(r"Root Cause.*\n.*\n.*\n.*\n *rank *: 1 .*\n *exitcode *: 3 ", output)
    assert "Rank 1 left first:\nit does not answer" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_invalid_input_is_printed_once_under_torchrun(tmp_path):
    code, output = finish(
        forked_torchrun(2, *options("run"), "PARALLEL.ARGS.compresion", "bf16", restarts=0, folder=tmp_path)
    )
    assert code == 1  # torchrun's own exit code
    assert output.count("error: PARALLEL.ARGS.compresion: DDP takes no argument 'compresion'; did you mean") == 1
    code, output = finish(forked_torchrun(2, *options("run"), "SOLVER.BASE_LRR", "1", restarts=0, folder=tmp_path))
    assert output.count("unknown key 'SOLVER.BASE_LRR'; did you mean 'SOLVER.BASE_LR'?") == 1
    assert not (tmp_path / "run").exists()


def test_invalid_input_exits_with_one_line(tmp_path):
    code, output = finish(start(tool(*options("run", "--num-gpus", "2"), "PARALLEL.NAME", "dpd"), tmp_path))
    assert code == 2
    assert output.startswith("error: PARALLEL.NAME: unknown strategy 'dpd'; did you mean 'ddp'?")
    assert len(output.splitlines()) == 1
