import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hookline.config import ConfigError
from hookline.engine import launch
from hookline.engine.launch import _join_start, launched_by_torchrun, note_training, restarted

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_one_process_runs_the_function_and_returns_its_result():
    assert launch(lambda a, b: a + b, 1, args=(2, 3)) == 5
    assert launch(lambda: "done", 1, num_machines=1, machine_rank=0, dist_url="auto") == "done"


def test_an_error_of_the_function_comes_through():
    with pytest.raises(ZeroDivisionError):
        launch(lambda: 1 / 0, 1)


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
        ({"num_gpus_per_machine": 2, "device": "cuda:1"}, "MODEL.DEVICE: each process has a GPU of its own"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_process_is_started(arguments, message):
    with pytest.raises(ConfigError, match=message):
        launch(pytest.fail, **arguments)


def test_an_address_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--dist-url tcp://127.0.0.1:{port} cannot be opened here"):
            launch(pytest.fail, 2, dist_url=f"tcp://127.0.0.1:{port}", device="cpu")


def test_a_function_that_cannot_be_given_to_processes_is_named_and_leaves_none_behind():
    with pytest.raises(TypeError, match=r"main_func and args.*function at the top of a module"):
        launch(lambda: None, 2, device="cpu")


def test_torchruns_processes_are_known_by_its_variables(monkeypatch):
    assert not launched_by_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")  # as clusters set it too
    assert not launched_by_torchrun()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launched_by_torchrun()


def test_a_number_of_processes_beside_torchruns_is_refused(monkeypatch):
    for name, value in {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--num-gpus 3: torchrun started 2"):
        launch(pytest.fail, 3, device="cpu")


def test_one_process_of_torchrun_joins_nobody(monkeypatch):
    for name, value in {**TORCHRUN, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch(lambda: "done", 1) == "done"


def test_ranks_that_are_started_again_meet_whatever_earlier_ones_left_in_the_store():
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = []
    for _ in range(2):
        stores = [dist.TCPStore("127.0.0.1", kept.port, is_master=False) for _ in range(2)]
        with ThreadPoolExecutor() as threads:
            other = threads.submit(_join_start, stores[1], 1, 2)  # rank 1: the thread waits for rank 0's answer
            part, greet = _join_start(stores[0], 0, 2)
            while not other.done():
                greet()
            other.result()[0].set("from rank 1", "here")
        assert part.get("from rank 1") == b"here"
        parts.append(part)
    parts[0].set("key", "of the first start")
    assert not parts[1].check(["key"])


def test_a_run_that_began_to_train_is_resumed_when_the_same_agent_starts_it_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "agent" / "attempt_0" / "0" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # of this machine; the first start never came to training
    monkeypatch.setenv("LOCAL_RANK", "0")
    (tmp_path / "agent").mkdir()
    assert not restarted("run")
    note_training("run")
    assert not restarted("run")  # evaluated later, in the same process
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # as after a machine joined
    assert restarted("run")
    assert not restarted("another run")


def run_python(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_a_function_of_python_c_or_of_a_notebook_is_run_in_several_processes():
    code = """
from hookline.engine import comm, launch
def main(word):
    return comm.all_gather((comm.get_rank(), word))
print(launch(main, 2, args=("hello",), device="cpu"))
"""
    ended = run_python("-c", code)
    assert ended.stdout == "[(0, 'hello'), (1, 'hello')]\n", ended.stderr


def test_ranks_start_loader_workers_as_their_launcher_would(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import multiprocessing
from hookline.engine import launch

if __name__ == "__main__":
    assert launch(multiprocessing.get_start_method, 2, device="cpu") == multiprocessing.get_start_method()
"""
    )
    done = run_python(script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_default_timeout_is_detectron2s():
    from hookline.engine.launch import DEFAULT_TIMEOUT

    assert timedelta(minutes=30) == DEFAULT_TIMEOUT
