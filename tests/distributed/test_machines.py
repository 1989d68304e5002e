"""Several machines: launchers with one address, also in connected network namespaces."""

import re
import sys

import pytest
from ranks import PROGRAMS, SYNTHETIC, finish, fork, free_port, rows, start, tool


@pytest.fixture
def machine(tmp_path):
    """Start ``launch()`` as on one machine: ``machine(timeout, processes, machines, machine_rank)``."""
    url = f"tcp://127.0.0.1:{free_port()}"
    return lambda *numbers: fork([sys.executable, PROGRAMS / "machine.py", url, *numbers], tmp_path)


def test_a_missing_machine_is_an_error_after_the_timeout(machine):
    code, output = finish(machine(1, 1, 2, 0), timeout=50)
    assert code == 2
    assert output.startswith("error: rank(s) 1 did not join within 1 s (PARALLEL.TIMEOUT): start all machines")
    assert output.count("\n") == 1


def test_a_missing_machine_0_is_an_error_after_the_timeout(machine):
    code, output = finish(machine(1, 1, 2, 1), timeout=50)
    assert code == 2
    assert "did not answer within 1 s (PARALLEL.TIMEOUT); start machine 0 as well" in output


def test_machines_with_different_numbers_of_processes_are_refused_at_once(machine):
    ended = [finish(one, timeout=50) for one in (machine(60, 1, 2, 0), machine(60, 2, 2, 1))]
    for code, output in ended:
        assert code == 2
        assert output.count(" expects ") == 2
        assert re.search("expects 4( processes)?, 2 of them its own", output)
        assert re.search("expects 2( processes)?, 1 of them its own", output)
        assert "Start all machines with the same --num-machines and --num-gpus" in output


def test_two_machines_with_the_same_rank_are_refused_at_once(machine):
    first, *others = machine(60, 1, 3, 0), machine(60, 1, 3, 1), machine(60, 1, 3, 1)
    for code, output in [finish(one, timeout=50) for one in (first, *others)]:
        assert code == 2
        assert "rank 1 is there already" in output
        assert "give each machine its own --machine-rank" in output


@pytest.mark.parametrize(
    ("there", "difference"),
    [
        (("SOLVER.BASE_LR", "0.5"), "SOLVER.BASE_LR is 0.5 (rank 0: 0.01)"),
        (("SEED", "4"), "SEED is 4 (rank 0: 3)"),
        (("--resume",), "--resume is True (rank 0: False)"),
    ],
)
def test_machines_with_different_configs_are_refused_with_the_difference(there, difference, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}"
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
    for rank, name in enumerate(namespaces[:2]):
        command = ["ip", "netns", "exec", name, *tool(*together, "--machine-rank", rank)]
        processes.append(start(command, tmp_path, GLOO_SOCKET_IFNAME="net"))
    ended = [finish(process) for process in processes]
    assert [code for code, _ in ended] == [0, 0], ended
    assert "Training ended at iteration 160: completed" in ended[0][1]
    ours, theirs = rows(tmp_path / "together"), rows(tmp_path / "alone")
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, abs=1e-5)
