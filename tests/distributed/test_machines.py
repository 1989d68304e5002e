"""Several machines: launchers with one address, also in two connected network namespaces."""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from ranks import PROGRAMS, SYNTHETIC, finish, fork, rows, start, tool


@pytest.fixture
def machine(tmp_path):
    """Start ``launch()`` as on one machine: ``machine(timeout, processes, machines, machine_rank)``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    return lambda *numbers: fork([sys.executable, PROGRAMS / "machine.py", url, *numbers], tmp_path)


def test_a_missing_machine_is_an_error_after_the_timeout(machine):
    code, output = finish(machine(1, 1, 2, 0), timeout=20)
    assert code == 2
    assert output.startswith("error: rank(s) 1 did not join within 1 s (PARALLEL.TIMEOUT): start all machines")
    assert output.count("\n") == 1


def test_a_missing_machine_0_is_an_error_after_the_timeout(machine):
    code, output = finish(machine(1, 1, 2, 1), timeout=20)
    assert code == 2
    assert "did not answer within 1 s (PARALLEL.TIMEOUT); start machine 0 as well" in output


def test_machines_with_different_numbers_of_processes_are_refused_at_once(machine):
    ended = [finish(one, timeout=20) for one in (machine(60, 1, 2, 0), machine(60, 2, 2, 1))]
    for code, output in ended:
        assert code == 2
        assert "expects 4 processes, 2 of them its own" in output
        assert "expects 2, 1 of them its own. Start all machines with the same --num-machines and --num-gpus" in output


def test_two_machines_with_the_same_rank_are_refused_at_once(machine):
    first, *others = machine(60, 1, 3, 0), machine(60, 1, 3, 1), machine(60, 1, 3, 1)
    for code, output in [finish(one, timeout=20) for one in (first, *others)]:
        assert code == 2
        assert "rank 1 is there already" in output
        assert "give each machine its own --machine-rank" in output


def ip(*arguments):
    return subprocess.run(["ip", *map(str, arguments)], capture_output=True, text=True, check=True, timeout=30)


@pytest.fixture
def namespaces():
    """Names of two network namespaces with the addresses 10.213.7.1 and 10.213.7.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need ip and root")
    names = [f"hookline-{os.getpid()}-{rank}" for rank in range(2)]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            # Created in the first namespace, so that the system's own network does not change.
            ip("-n", names[0], "link", "add", "machine0", "type", "veth", "peer", "name", "machine1")
            ip("-n", names[0], "link", "set", "machine1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        for rank, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.213.7.{rank + 1}/24", "dev", f"machine{rank}")
            ip("-n", name, "link", "set", f"machine{rank}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


@pytest.mark.parametrize(
    ("there", "difference"),
    [
        (("SOLVER.BASE_LR", "0.5"), "SOLVER.BASE_LR is 0.5 (rank 0: 0.01)"),
        (("SEED", "4"), "SEED is 4 (rank 0: 3)"),
        (("--resume",), "--resume is True (rank 0: False)"),
    ],
)
def test_machines_with_different_configs_are_refused_with_the_difference(there, difference, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    common = ["--config-file", SYNTHETIC, "--num-machines", 2, "--dist-url", url, "MODEL.DEVICE", "cpu"]
    common += ["OUTPUT_DIR", "together", "SEED", "3", "SOLVER.BASE_LR", "0.01"]
    processes = [fork(tool(*common, "--machine-rank", rank, *more), tmp_path) for rank, more in ((0, ()), (1, there))]
    for code, output in map(finish, processes):
        assert code == 2
        assert "error: rank 1, on" in output
        assert f"has another config than rank 0: {difference}. Start all machines" in output
        assert output.count("\n") == 1
    assert not (tmp_path / "together").exists()


@pytest.mark.slow
def test_two_machines_in_a_network_train_like_one_process(namespaces, tmp_path):
    common = ["--config-file", SYNTHETIC, "MODEL.DEVICE", "cpu", "SEED", "3"]
    code, output = finish(fork(tool(*common, "OUTPUT_DIR", "alone"), tmp_path))
    assert code == 0, output
    together = [*common, "--num-machines", 2, "--dist-url", "tcp://10.213.7.1:29511", "OUTPUT_DIR", "together"]
    processes = []
    for rank, name in enumerate(namespaces):
        command = ["ip", "netns", "exec", name, *tool(*together, "--machine-rank", rank)]
        processes.append(start(command, tmp_path, GLOO_SOCKET_IFNAME=f"machine{rank}"))
    ended = [finish(process) for process in processes]
    assert [code for code, _ in ended] == [0, 0], ended
    assert "Training ended at iteration 160: completed" in ended[0][1]
    ours, theirs = rows(tmp_path / "together"), rows(tmp_path / "alone")
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, abs=1e-5)


# ---------------------------------------------------------------------------- torchrun's agents


@pytest.fixture
def agent(tmp_path):
    """Start an agent of one run: ``agent(least, most, restarts, hook, **environment)``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []

    def start_agent(least, most, restarts, hook, **environment):
        run = tool("--config-file", SYNTHETIC, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", "run", "SEED", "3")
        run += ["HOOKS", f"['waiting:{hook}']", "SOLVER.CHECKPOINT_PERIOD", "20"]
        command = [sys.executable, PROGRAMS / "agent.py", port, least, most, restarts, *run[1:]]
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


def assert_resumed_once(folder):
    log = (folder / "log.txt").read_text()
    assert log.count("torchrun restarts this run: it resumes from its last checkpoint") == 1
    assert "Training ended at iteration 160: completed" in log
    iterations = [row["iteration"] for row in rows(folder)]
    assert iterations == sorted(set(iterations))
    assert not (folder / "previous_001").exists()


# By default a machine that joins later never finds the store of torch's agents.
JOINS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.slow
def test_a_run_resumes_when_a_machine_joins(agent, tmp_path):
    first = agent(1, 2, 0, "Wait", **JOINS)
    wait_for(tmp_path / "waits.0of1", first)
    second = agent(1, 2, 0, "Wait", **JOINS)
    wait_for(tmp_path / "waits.1of2", first, second)
    (tmp_path / "go").write_text("")
    ended = [finish(process) for process in (first, second)]
    assert [code for code, _ in ended] == [0, 0], ended
    assert_resumed_once(tmp_path / "run")


@pytest.mark.slow
def test_a_run_resumes_when_a_machine_is_replaced(agent, tmp_path):
    machines = [agent(2, 2, 1, "Wait", **JOINS) for _ in range(2)]
    places = [wait_for(tmp_path / f"waits.{rank}of2", *machines) for rank in range(2)]
    # The first agent keeps torchrun's store and has rank 0. The second one is killed.
    assert int(places[1].read_text().split()[1]) == machines[1].pid
    machines[1].kill()
    for place in places:
        place.unlink()
    machines[1] = agent(2, 2, 1, "Wait", **JOINS)
    wait_for(places[1], *machines)
    (tmp_path / "go").write_text("")
    ended = [finish(process) for process in machines]
    assert [code for code, _ in ended] == [0, 0], ended
    assert_resumed_once(tmp_path / "run")


@pytest.mark.slow
def test_agents_with_different_restart_counts_restart_together(agent, tmp_path):
    ended = [finish(process) for process in [agent(2, 2, 2, "KillOnce") for _ in range(2)]]
    assert [code for code, _ in ended] == [0, 0], ended
    assert (tmp_path / "killed").exists()
    assert_resumed_once(tmp_path / "run")


def test_ranks_save_and_exit_when_their_torchrun_agent_is_killed(agent, tmp_path):
    process = agent(1, 1, 0, "Wait")
    rank = os.pidfd_open(int(wait_for(tmp_path / "waits.0of1", process).read_text().split()[0]))
    os.kill(process.pid, signal.SIGKILL)
    assert select.select([rank], [], [], 30)[0], "the rank trains on"
    assert "Training ended at iteration" in (tmp_path / "run" / "log.txt").read_text()
    assert (tmp_path / "run" / "last_checkpoint").exists()
