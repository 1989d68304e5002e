"""Machines that join, are lost, no longer answer, and return."""

import json
import math
import os
import select
import signal
import sys
import time

import pytest
from ranks import PROGRAMS, SYNTHETIC, complete, finish, fork, free_port, rows, tool

RUN = ["--config-file", SYNTHETIC, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", "run", "SEED", "3"]
RUN += ["SOLVER.CHECKPOINT_PERIOD", "20", "PARALLEL.TIMEOUT", "5s", "HOOKS", '["waiting:Record", "waiting:Wait"]']


@pytest.fixture
def agent(tmp_path):
    """Start torchrun's agent of one machine of a run. The first one keeps torchrun's store."""
    port, started = free_port(), []

    def start_agent(*options, machines=(1, 3)):
        number = len(started) + 1
        place = {"machines": machines, "rdzv_endpoint": f"localhost:{port}", "local_addr": f"127.0.0.{number}"}
        # By default the fastest of the agents with the endpoint's address keeps the store.
        place["rdzv_configs"] = {"is_host": not started, "last_call_timeout": 1, "keep_alive_interval": 1}
        command = [sys.executable, PROGRAMS / "elastic.py", 1, 3, *tool(*RUN, *options, "--resume")[1:]]
        # By default a machine that joins later never finds the store of torch's agents.
        environment = {"AGENT": json.dumps(place), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        started.append(fork(command, tmp_path, **environment))
        return started[-1]

    yield start_agent
    for process in started:
        process.kill()


def wait_for(folder, ranks, processes):
    """Wait until that many ranks wait; return their processes."""
    paths, end = [folder / f"waits.{rank}of{ranks}" for rank in range(ranks)], time.monotonic() + 100
    while not all(path.exists() and path.read_text() for path in paths):
        ended = [process.communicate()[0] for process in processes if process.poll() is not None]
        assert not ended, "\n".join(ended)
        assert time.monotonic() < end
        time.sleep(0.02)
    pids = [int(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return pids


def assert_resumed(folder, times=1, length=160):
    log = (folder / "log.txt").read_text()
    assert log.count("Starting training from iteration ") == times + 1
    assert f"Training ended at iteration {length}: completed" in log
    iterations = [row["iteration"] for row in rows(folder)]
    assert iterations == sorted(set(iterations))
    assert not (folder / "previous_001").exists()


def steps_in_result(folder):
    """Return for each iteration what the start of the ranks recorded whose step is in the result."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    steps = {}
    for start in sorted({tuple(line["start"]) for line in lines}):
        steps = {number: step for number, step in steps.items() if number < start[1]}
        for line in lines:
            if tuple(line["start"]) == start:
                steps.setdefault(line["iteration"], []).append(line)
    return [steps[number] for number in sorted(steps)]


def assert_each_sample_once_an_epoch(folder, size, epochs):
    seen = [number for step in steps_in_result(folder) for line in step for number in line["samples"]]
    assert [sorted(seen[at : at + size]) for at in range(0, len(seen), size)] == [list(range(size))] * epochs


@pytest.mark.slow
def test_a_run_continues_without_a_lost_machine_and_with_one_that_returns(agent, tmp_path):
    size, epochs, batch, reference = 1000, 16, 48, 3
    options = ["DATASETS.TRAIN", json.dumps([{"NAME": "synthetic", "ARGS": {"size": size, "seed": 0}}])]
    options += ["DATALOADER.BATCH_SIZE", batch, "SOLVER.MAX_ITER", f"{epochs}ep"]
    options += ["SOLVER.REFERENCE_WORLD_SIZE", reference]
    machines = [agent(*options) for _ in range(3)]
    wait_for(tmp_path, 3, machines)
    machines.pop().kill()
    wait_for(tmp_path, 2, machines)
    for path in tmp_path.glob("waits.*of3"):
        path.unlink()
    machines.append(agent(*options))
    wait_for(tmp_path, 3, machines)
    (tmp_path / "go").write_text("")
    ended = [finish(process) for process in machines]
    assert [code for code, _ in ended] == [0, 0, 0], ended

    assert_each_sample_once_an_epoch(tmp_path, size, epochs)
    steps, done = steps_in_result(tmp_path), 0
    worlds = [step[0]["ranks"] for step in steps]
    changes = [world for world, before in zip(worlds, [0, *worlds], strict=False) if world != before]
    assert changes[-3:] == [3, 2, 3], changes
    for step in steps:
        ranks, in_batch = len(step), sum(len(line["samples"]) for line in step)
        assert ranks == step[0]["ranks"]
        full, lr = batch * ranks // reference, 0.003 * ranks / reference
        assert in_batch == min(full, size - done % size)
        if done >= size:  # after the warm-up; lengths are in iterations, and the last batch of an epoch is smaller
            expected = lr * (1 + math.cos(math.pi * done / size / epochs)) / 2
            assert [line["lr"] for line in step] == pytest.approx([expected] * ranks, rel=0.1, abs=1e-5)
        done += in_batch
    assert_resumed(tmp_path / "run", times=len(changes) - 1, length=len(steps))


@pytest.mark.slow
def test_ranks_save_and_exit_when_their_torchrun_agent_is_killed(agent, tmp_path):
    process = agent(machines=(1, 1))
    rank = os.pidfd_open(wait_for(tmp_path, 1, [process])[0])
    os.kill(process.pid, signal.SIGKILL)
    assert select.select([rank], [], [], 100)[0], "the rank trains on"
    assert "Training ended at iteration" in (tmp_path / "run" / "log.txt").read_text()
    assert (tmp_path / "run" / "last_checkpoint").exists()


@pytest.mark.slow
def test_a_run_continues_without_a_machine_that_no_longer_answers(agent, tmp_path):
    """As when its network is cut: its connections stay open."""
    machines = [agent() for _ in range(2)]
    wait_for(tmp_path, 2, machines)
    for pid in machines[1].alive():
        os.kill(pid, signal.SIGSTOP)
    wait_for(tmp_path, 1, machines[:1])
    (tmp_path / "go").write_text("")
    code, output = finish(machines[0])
    assert code == 0, output
    assert_each_sample_once_an_epoch(tmp_path, 1024, 10)


# ---------------------------------------------------------------------------- our own launcher


@pytest.mark.slow
def test_a_run_of_several_machines_ends_with_a_lost_one_and_resumes_on_fewer(tmp_path):
    several = ["--num-machines", 2, "--dist-url", f"tcp://127.0.0.1:{free_port()}", "--machine-rank"]
    machines = [fork(tool(*RUN, "PARALLEL.TIMEOUT", "60s", *several, rank), tmp_path) for rank in range(2)]
    wait_for(tmp_path, 2, machines)
    machines[1].kill()
    (code, output), (killed, _) = (finish(machine) for machine in machines)
    assert (code, killed) == (1, -signal.SIGKILL)
    assert "Rank 0 failed first" in output
    (tmp_path / "go").write_text("")
    output = complete(tool(*RUN, "--resume"), tmp_path)
    assert_each_sample_once_an_epoch(tmp_path, 1024, 10)
    assert_resumed(tmp_path / "run")
