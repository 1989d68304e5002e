"""Several machines: launchers that meet at an address, also in two network namespaces with a cable between them."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import HEADER, SYNTHETIC, finish, fork, rows, start, tool

SCRIPT = f"""{HEADER}
from hookline.engine import config_errors_exit

def main():
    print(comm.all_gather(comm.get_rank()), flush=True)

url, seconds, *numbers = sys.argv[1:]
gpus, machines, machine = map(int, numbers)
with config_errors_exit():
    limit = timedelta(seconds=float(seconds))
    launch(main, gpus, machines, machine, url, timeout=limit, device="cpu")
"""


@pytest.fixture
def machine(tmp_path):
    """Starts ``launch()`` as on a machine: ``machine(seconds, processes, machines, machine_rank)``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return lambda *numbers: fork([sys.executable, script, url, *numbers], tmp_path)


def test_a_machine_that_does_not_come_is_missed_when_the_timeout_is_over(machine):
    code, output = finish(machine(1, 1, 2, 0), timeout=20)
    assert code == 2
    assert output.startswith("error: rank 1 did not come within 1 s (PARALLEL.TIMEOUT): start all machines")
    assert output.count("\n") == 1


def test_a_machine_without_machine_0_waits_no_longer_than_the_timeout(machine):
    code, output = finish(machine(1, 1, 2, 1), timeout=20)
    assert code == 2
    assert "did not answer within 1 s (PARALLEL.TIMEOUT); start machine 0 as well" in output


def test_machines_with_different_numbers_of_processes_are_refused_at_once(machine):
    ended = [finish(one, timeout=20) for one in (machine(60, 1, 2, 0), machine(60, 2, 2, 1))]
    for code, output in ended:
        assert code == 2
        assert "counts 4 processes in all, 2 of them its own" in output
        assert "counts 2 and 1. Start all machines with the same --num-machines and --num-gpus" in output


def test_two_machines_with_one_number_are_refused_at_once(machine):
    first, *others = machine(60, 1, 3, 0), machine(60, 1, 3, 1), machine(60, 1, 3, 1)
    for code, output in [finish(one, timeout=20) for one in (first, *others)]:
        assert code == 2
        assert "rank 1 is there already" in output
        assert "give each machine its own --machine-rank" in output


def ip(*arguments):
    return subprocess.run(["ip", *map(str, arguments)], capture_output=True, text=True, check=True, timeout=30)


@pytest.fixture
def namespaces():
    """Names of the two, in which 10.213.7.1 and 10.213.7.2 are the ends of the cable ``machine0`` and ``machine1``."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need ip and root")
    names = [f"hookline-{os.getpid()}-{rank}" for rank in range(2)]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            # Made inside of the first one, so that nothing appears in the system's own network.
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
def test_machines_with_different_configs_are_refused_and_the_difference_is_named(there, difference, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    common = ["--config-file", SYNTHETIC, "--num-machines", 2, "--dist-url", url, "MODEL.DEVICE", "cpu"]
    common += ["OUTPUT_DIR", "together", "SEED", "3", "SOLVER.BASE_LR", "0.01"]
    processes = [fork(tool(*common, "--machine-rank", rank, *more), tmp_path) for rank, more in ((0, ()), (1, there))]
    for code, output in map(finish, processes):
        assert code == 2
        assert "error: rank 1, on" in output
        assert f"was started with another config than rank 0: {difference}. Start all machines" in output
        assert output.count("\n") == 1
    assert not (tmp_path / "together").exists()


@pytest.mark.slow
def test_two_machines_train_over_a_network_what_one_process_trains(namespaces, tmp_path):
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
