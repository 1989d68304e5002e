"""Several machines: launchers with one address."""

import re
import sys

import pytest
from ranks import PROGRAMS, SYNTHETIC, finish, fork, free_port, tool


@pytest.fixture
def machine(tmp_path):
    """Start ``launch()`` as on one machine: ``machine(timeout, processes, machines, machine_rank)``."""
    url = f"tcp://127.0.0.1:{free_port()}"
    return lambda *numbers: fork([sys.executable, PROGRAMS / "machine.py", url, *numbers], tmp_path)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, r"rank\(s\) 1 did not join within 1 s \(PARALLEL.TIMEOUT\)"),
        (1, r"did not answer within 1 s .*start machine 0"),
    ],
)
def test_a_missing_machine_is_an_error_after_the_timeout(machine, rank, message):
    code, output = finish(machine(1, 1, 2, rank), timeout=50)
    assert code == 2
    assert re.search(message, output)


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
        pytest.param(("--resume",), "--resume is True (rank 0: False)", marks=pytest.mark.slow),
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
