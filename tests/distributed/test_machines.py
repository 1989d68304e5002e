"""Two machines that reach each other over a network alone: two network namespaces, and a cable between them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import SYNTHETIC, finish, fork, rows, start, tool


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
