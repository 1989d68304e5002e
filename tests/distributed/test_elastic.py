"""Machines that join, are lost and return under torchrun, also in connected network namespaces."""

import json
import math
import os
import select
import signal
import subprocess
import sys
import time

import pytest
from ranks import PROGRAMS, SYNTHETIC, TOOL, finish, fork, free_port, rows, tool


@pytest.fixture
def agent(tmp_path):
    """Start an agent of one run. ``namespace``: name and number of its network namespace.

    The first agent keeps torchrun's store, or the first one after all earlier ones have ended.
    """
    port, started = free_port(), []

    def start_agent(least, most, restarts, hooks, *options, ranks=1, namespace=None, **environment):
        run = tool("--config-file", SYNTHETIC, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", "run", "SEED", "3")
        names = [hook if isinstance(hook, dict) else f"waiting:{hook}" for hook in hooks]
        run += ["HOOKS", json.dumps(names), "SOLVER.CHECKPOINT_PERIOD", "20"]
        run += ["--resume", *options]
        if namespace is None:
            endpoint, address = f"localhost:{port}", f"127.0.0.{len(started) + 1}"  # ranks are in this order
            has_store = all(process.poll() is not None for process in started)
        else:
            name, number = namespace
            endpoint, address = "10.213.7.1:29512", f"10.213.7.{number + 1}"
            has_store = number == 0
            environment |= {"NAMESPACE": name, "GLOO_SOCKET_IFNAME": "net"}
        environment |= {"ADDRESS": address, "HAS_STORE": str(has_store)}
        command = [sys.executable, PROGRAMS / "agent.py", endpoint, least, most, ranks, restarts, *run[1:]]
        started.append(fork(command, tmp_path, **environment))
        return started[-1]

    yield start_agent
    for process in started:
        process.kill()


def wait_for(path, *processes):
    end = time.monotonic() + 100
    while not (path.exists() and path.read_text()):
        ended = [process.communicate()[0] for process in processes if process.poll() is not None]
        assert not ended, "\n".join(ended)
        assert time.monotonic() < end
        time.sleep(0.02)
    return path


def assert_resumed(folder, times=1, length=160):
    log = (folder / "log.txt").read_text()
    assert log.count("Starting training from iteration ") == times + 1
    assert f"Training ended at iteration {length}: completed" in log
    iterations = [row["iteration"] for row in rows(folder)]
    assert iterations == sorted(set(iterations))
    assert not (folder / "previous_001").exists()


# By default a machine that joins later never finds the store of torch's agents.
JOINS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def steps_in_result(folder):
    """Return for each iteration what the start of the ranks recorded whose step is in the result."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    starts = sorted({tuple(line["start"]) for line in lines})
    steps = {}
    for start in starts:
        steps = {number: step for number, step in steps.items() if number < start[1]}
        for line in lines:
            if tuple(line["start"]) == start:
                steps.setdefault(line["iteration"], []).append(line)
    return [steps[number] for number in sorted(steps)]


@pytest.mark.slow
def test_a_run_continues_without_a_lost_machine_and_with_one_that_returns(agent, namespaces, tmp_path):
    size, epochs, batch, reference = 1000, 16, 48, 3
    options = ["DATASETS.TRAIN", json.dumps([{"NAME": "synthetic", "ARGS": {"size": size, "seed": 0}}])]
    options += ["DATALOADER.BATCH_SIZE", batch, "SOLVER.MAX_ITER", f"{epochs}ep"]
    options += ["SOLVER.REFERENCE_WORLD_SIZE", reference, "PARALLEL.TIMEOUT", "20s"]

    def machine(number):
        return agent(1, 4, 3, ["Record", "Wait"], *options, namespace=(namespaces[number], number), **JOINS)

    machines = [machine(number) for number in range(3)]
    for rank in range(3):
        wait_for(tmp_path / f"waits.{rank}of3", *machines)
    machines[2].kill()
    for rank in range(2):
        wait_for(tmp_path / f"waits.{rank}of2", *machines[:2])
    for rank in range(3):
        (tmp_path / f"waits.{rank}of3").unlink()
    machines[2] = machine(2)
    for rank in range(3):
        wait_for(tmp_path / f"waits.{rank}of3", *machines)
    (tmp_path / "go").write_text("")
    ended = [finish(process) for process in machines]
    assert [code for code, _ in ended] == [0, 0, 0], ended

    steps = steps_in_result(tmp_path)
    assert [step[0]["iteration"] for step in steps] == list(range(len(steps)))
    worlds = [step[0]["ranks"] for step in steps]
    changes = [world for world, before in zip(worlds, [0, *worlds], strict=False) if world != before]
    assert changes[-3:] == [3, 2, 3], changes
    seen = [number for step in steps for line in step for number in line["samples"]]
    assert len(seen) == size * epochs
    for epoch in range(epochs):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))
    done = 0
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
def test_a_run_resumes_when_a_machine_is_replaced(agent, tmp_path):
    machines = [agent(2, 2, 1, ["Wait"], **JOINS) for _ in range(2)]
    places = [wait_for(tmp_path / f"waits.{rank}of2", *machines) for rank in range(2)]
    # The second one is killed: the first agent keeps torchrun's store.
    assert int(places[1].read_text().split()[1]) == machines[1].pid
    machines[1].kill()
    for place in places:
        place.unlink()
    machines[1] = agent(2, 2, 1, ["Wait"], **JOINS)
    wait_for(places[1], *machines)
    (tmp_path / "go").write_text("")
    ended = [finish(process) for process in machines]
    assert [code for code, _ in ended] == [0, 0], ended
    assert_resumed(tmp_path / "run")


def test_ranks_save_and_exit_when_their_torchrun_agent_is_killed(agent, tmp_path):
    process = agent(1, 1, 0, ["Wait"])
    rank = os.pidfd_open(int(wait_for(tmp_path / "waits.0of1", process).read_text().split()[0]))
    os.kill(process.pid, signal.SIGKILL)
    assert select.select([rank], [], [], 100)[0], "the rank trains on"
    assert "Training ended at iteration" in (tmp_path / "run" / "log.txt").read_text()
    assert (tmp_path / "run" / "last_checkpoint").exists()


@pytest.mark.slow
def test_a_run_continues_without_a_machine_whose_network_is_cut(agent, namespaces, tmp_path):
    machines = [
        agent(1, 4, 3, ["Record", "Wait"], "PARALLEL.TIMEOUT", "15s", namespace=(name, number), **JOINS)
        for number, name in enumerate(namespaces)
    ]
    for rank in range(3):
        wait_for(tmp_path / f"waits.{rank}of3", *machines)
    subprocess.run(["ip", "-n", namespaces[0], "link", "set", "port2", "down"], check=True)
    for rank in range(2):
        wait_for(tmp_path / f"waits.{rank}of2", *machines[:2])
    (tmp_path / "go").write_text("")
    ended = [finish(process) for process in machines[:2]]
    assert [code for code, _ in ended] == [0, 0], ended
    seen = [number for step in steps_in_result(tmp_path) for line in step for number in line["samples"]]
    assert [sorted(seen[i : i + 1024]) for i in range(0, len(seen), 1024)] == [list(range(1024))] * 10
    end = time.monotonic() + 60
    while len(machines[2].alive()) > 1 and time.monotonic() < end:
        time.sleep(0.1)
    machines[2].kill()  # its agent keeps trying to reach the others
    _, output = finish(machines[2])
    assert "Timeout (0:00:20)!" in output


# ---------------------------------------------------------------------------- our own launcher


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "how", "said"),
    [
        (1, "killed", ["Rank 1 left first:\nit does not answer: its process ended or is blocked", ""]),
        (1, "unplugged", ["Rank 1 left first:\nit does not answer", "Timeout (0:00:20)!"]),
    ],
)
def test_a_run_of_several_machines_ends_with_a_lost_one_and_resumes_on_fewer(namespaces, tmp_path, lost, how, said):
    hooks = json.dumps(["waiting:Record", "waiting:Wait"])
    run = [TOOL, "--config-file", SYNTHETIC, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", "run", "SEED", "3"]
    run += ["HOOKS", hooks, "SOLVER.CHECKPOINT_PERIOD", "20", "PARALLEL.TIMEOUT", "20s"]
    machines = []
    for rank, name in enumerate(namespaces[:2]):
        several = ["--num-machines", 2, "--dist-url", "tcp://10.213.7.1:29511", "--machine-rank", rank]
        command = [sys.executable, PROGRAMS / "namespace.py", *run, *several]
        machines.append(fork(command, tmp_path, NAMESPACE=name, GLOO_SOCKET_IFNAME="net"))
    for rank in range(2):
        wait_for(tmp_path / f"waits.{rank}of2", *machines)
    if how == "unplugged":
        subprocess.run(["ip", "-n", namespaces[0], "link", "set", "port1", "down"], check=True)
    else:
        machines[lost].kill()
    for rank, (code, output) in enumerate([finish(machine, timeout=120) for machine in machines]):
        assert code == (-signal.SIGKILL if how == "killed" and rank == lost else 1)
        assert said[rank] in output
    (tmp_path / "go").write_text("")
    code, output = finish(fork([sys.executable, *run, "--resume"], tmp_path))
    assert code == 0, output
    seen = [number for step in steps_in_result(tmp_path) for line in step for number in line["samples"]]
    assert [sorted(seen[i : i + 1024]) for i in range(0, len(seen), 1024)] == [list(range(1024))] * 10
    assert_resumed(tmp_path / "run", times=1)
