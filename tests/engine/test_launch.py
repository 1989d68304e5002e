import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import PROGRAMS

from hookline.config import ConfigError
from hookline.engine import launch
from hookline.engine.launch import DEFAULT_TIMEOUT

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_one_process_runs_the_function_and_returns_its_result():
    assert launch(lambda a, b: a + b, 1, args=(2, 3)) == 5
    assert launch(lambda: "done", 1, num_machines=1, machine_rank=0, dist_url="auto") == "done"


def test_an_error_of_the_function_is_raised():
    with pytest.raises(ZeroDivisionError):
        launch(lambda: 1 / 0, 1)


def test_a_process_group_that_is_there_is_used(tmp_path, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert launch(lambda: dist.get_world_size(), 1, device="cpu") == 1
        with pytest.raises(ConfigError, match=r"--num-gpus 2 --num-machines 1: .* a process group of 1 already"):
            launch(pytest.fail, 2, device="cpu")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_gpus_per_machine": 0}, "--num-gpus 0"),
        ({"num_gpus_per_machine": 1, "num_machines": 2, "machine_rank": 2}, "--machine-rank 2: must be from 0 to 1"),
        ({"num_gpus_per_machine": 1, "num_machines": 2}, "--dist-url: several machines need.*tcp://"),
        ({"num_gpus_per_machine": 2, "dist_url": "file:///tmp/x"}, r"--dist-url file:///tmp/x: write it as tcp://"),
        ({"num_gpus_per_machine": 2, "dist_url": "tcp://localhost"}, r"--dist-url tcp://localhost: write it as tcp://"),
        ({"num_gpus_per_machine": 2, "dist_url": "tcp://host:many"}, "--dist-url tcp://host:many: write it as"),
        ({"num_gpus_per_machine": 2, "device": "mps"}, "MODEL.DEVICE: mps works in one process only"),
        ({"num_gpus_per_machine": 2, "device": "cuda:1"}, "MODEL.DEVICE: each process has its own GPU"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        launch(pytest.fail, **arguments)


def test_an_address_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--dist-url tcp://127.0.0.1:{port} cannot be opened here"):
            launch(pytest.fail, 2, dist_url=f"tcp://127.0.0.1:{port}", device="cpu")


def test_a_function_that_cannot_be_pickled_is_refused():
    with pytest.raises(TypeError, match=r"main_func must be a function at the top of a module"):
        launch(lambda: None, 2, device="cpu")


def run_python(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.slow
def test_a_function_of_python_c_runs_in_several_processes():
    code = """
from hookline.engine import comm, launch
def main(word):
    return comm.all_gather((comm.get_rank(), word))
print(launch(main, 2, args=("hello",), device="cpu"))
"""
    ended = run_python("-c", code)
    assert ended.stdout == "[(0, 'hello'), (1, 'hello')]\n", ended.stderr


@pytest.mark.slow
def test_ranks_have_the_start_method_of_their_launcher():
    done = run_python(PROGRAMS / "start_method.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_default_timeout_is_detectron2s():
    assert timedelta(minutes=30) == DEFAULT_TIMEOUT
