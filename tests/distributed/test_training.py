"""Runs of the command line in several processes: results, files and failures."""

import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from ranks import SYNTHETIC, finish, fork, forked_torchrun, free_port, rows, start, tool, torchrun

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


def test_each_process_has_a_log_and_the_console_and_files_are_those_of_rank_0(two):
    run, output = two
    assert sorted(path.name for path in run.glob("log.txt*")) == ["log.txt", "log.txt.rank1"]
    assert output.count("Training ended at iteration 160: completed") == 1
    assert "rank1] hookline.engine.train_loop INFO: Training ended" in (run / "log.txt.rank1").read_text()
    assert "rank1]" not in (run / "log.txt").read_text()
    assert len(list(run.glob("events.out.*"))) == 1
    assert len(rows(run)) == len({row["iteration"] for row in rows(run)})

    found = [row["slowest_rank"] for row in rows(run, leave_out=("eta",)) if "slowest_rank" in row]
    assert found
    assert set(found) <= {0, 1}


# ---------------------------------------------------------------------------- agreement


def test_a_signal_to_the_launcher_stops_all_ranks_at_the_same_step_with_a_checkpoint(tmp_path):
    process = fork(tool(*options("run", "SOLVER.MAX_ITER", "1000000", "--num-gpus", "2")), tmp_path)
    wait_for(tmp_path / "run" / "metrics.json", process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    at = ended(tmp_path / "run", "interrupted by SIGTERM")
    assert (tmp_path / "run" / "last_checkpoint").read_text() == f"model_{at - 1:07d}.pth"


@pytest.mark.slow
def test_ranks_save_and_exit_when_their_launcher_is_killed(tmp_path):
    process = start(
        tool(*options("run", "--num-gpus", "2", "SOLVER.MAX_ITER", "1000000", mishap={"what": "none"})), tmp_path
    )
    wait_for(tmp_path / "none.0", process)
    wait_for(tmp_path / "none.1", process)
    process.kill()
    print(process.communicate(timeout=100)[0])  # returns when all processes have closed their outputs
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
def test_all_ranks_raise_for_a_nan_loss_of_one_rank(tmp_path):
    code, _ = finish(fork(tool(*options("run", "--num-gpus", "2", mishap={"what": "nan"})), tmp_path))
    assert code == 1
    for name in ("log.txt", "log.txt.rank1"):
        log = (tmp_path / "run" / name).read_text()
        assert "FloatingPointError: on rank 1 the loss is NaN or infinite at iteration 30" in log


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
def test_machines_without_a_shared_folder_resume_from_copies(tmp_path):
    """Each machine has its own disk. Between the runs the folder is copied to the other machine."""
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    ended = [finish(process) for process in machines(*places, more=("SOLVER.MAX_ITER", 100))]
    assert [code for code, _ in ended] == [0, 0], ended
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
    command = torchrun(2, *arguments, "HOOKS", mishaps, "--resume", options=("--max-restarts", 1))
    process = start(command, tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    for rank in range(2):
        wait_for(tmp_path / f"none.{rank}", process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 1, output  # torchrun's own exit code
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Starting training from iteration 20" in log
    at = ended(tmp_path / "run", "interrupted by SIGTERM")
    assert (tmp_path / "run" / "last_checkpoint").read_text() == f"model_{at - 1:07d}.pth"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "at"), [(1, 0), (0, 90)])
def test_killing_any_rank_at_any_step_gives_the_same_result(two, tmp_path, rank, at):
    arguments = options("run", mishap={"what": "kill once", "at": at, "rank": rank})
    code, output = finish(forked_torchrun(2, *arguments, "--resume", restarts=1, folder=tmp_path))
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
    assert not (tmp_path / "run").exists()


def test_invalid_input_exits_with_one_line(tmp_path):
    code, output = finish(start(tool(*options("run", "--num-gpus", "2"), "PARALLEL.NAME", "dpd"), tmp_path))
    assert code == 2
    assert output.startswith("error: PARALLEL.NAME: unknown strategy 'dpd'; did you mean 'ddp'?")
    assert len(output.splitlines()) == 1
