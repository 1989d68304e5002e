"""Launchers of several machines that do not fit together, or are missing."""

import re

import pytest
from ranks import SYNTHETIC, finish, fork, free_port, tool


@pytest.fixture
def end(tmp_path):
    """Start a launcher for each tuple of options, and return their exit codes and outputs."""

    def end(machines, *launchers):
        url = f"tcp://127.0.0.1:{free_port()}"
        common = ["--config-file", SYNTHETIC, "--num-machines", machines, "--dist-url", url]
        common += ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", "together", "SEED", "3"]
        started = [fork(tool(*common, *options), tmp_path) for options in launchers]
        ended = [finish(process, timeout=50) for process in started]
        assert not (tmp_path / "together").exists()
        return ended

    return end


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        pytest.param(0, r"rank\(s\) 1 did not join within 1 s \(PARALLEL.TIMEOUT\)", marks=pytest.mark.slow),
        (1, r"--dist-url tcp://127.0.0.1:\d+: .*timed out after 1000ms.*machine 0 opens it"),
    ],
)
def test_a_missing_machine_is_an_error_after_the_timeout(end, rank, message):
    [(code, output)] = end(2, ["--machine-rank", rank, "PARALLEL.TIMEOUT", "1s"])
    assert code == 2
    assert re.search(message, output)


@pytest.mark.parametrize(
    ("machines", "launchers", "messages"),
    [
        (
            2,
            [["--machine-rank", 0], ["--machine-rank", 1, "--num-gpus", 2]],
            ["expects 4( processes)?, 2 of them", "expects 2( processes)?, 1 of them", "--num-machines and --num-gpus"],
        ),
        (
            3,
            [["--machine-rank", 0], ["--machine-rank", 1], ["--machine-rank", 1]],
            ["rank 1 is there already", "give each machine its own --machine-rank"],
        ),
        (
            2,
            [["--machine-rank", 0], ["--machine-rank", 1, "SOLVER.BASE_LR", 0.5, "--resume"]],
            ["error: rank 1, on .* has another config than rank 0", r"SOLVER\.BASE_LR is 0\.5", "--resume is True"],
        ),
    ],
    ids=["processes", "rank", "config"],
)
def test_machines_that_do_not_fit_are_refused_at_once(end, machines, launchers, messages):
    for code, output in end(machines, *launchers):
        assert code == 2
        assert all(re.search(message, output) for message in messages), output
