import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hookline.config import ConfigError
from hookline.engine import launch
from hookline.engine.ranks.torchrun import _join_start, launched_by_torchrun, note_training, restarted

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_a_process_of_torchrun_is_recognised_by_its_variables(monkeypatch):
    assert not launched_by_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")  # some clusters set it
    assert not launched_by_torchrun()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launched_by_torchrun()


def test_another_number_of_processes_than_torchruns_is_refused(monkeypatch):
    for name, value in {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--num-gpus 3: torchrun started 2"):
        launch(pytest.fail, 3, device="cpu")


def test_a_single_process_of_torchrun_runs_the_function(monkeypatch):
    for name, value in {**TORCHRUN, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch(lambda: "done", 1) == "done"


def test_restarted_ranks_do_not_see_the_keys_of_an_earlier_start():
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = []
    for _ in range(2):
        stores = [dist.TCPStore("127.0.0.1", kept.port, is_master=False) for _ in range(2)]
        with ThreadPoolExecutor() as threads:
            other = threads.submit(_join_start, stores[1], 1, 2)  # waits for the answer of rank 0
            part, greet = _join_start(stores[0], 0, 2)
            while not other.done():
                greet()
            other.result()[0].set("from rank 1", "here")
        assert part.get("from rank 1") == b"here"
        parts.append(part)
    parts[0].set("key", "of the first start")
    assert not parts[1].check(["key"])


def test_a_run_that_began_to_train_counts_as_restarted_under_the_same_agent(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "agent" / "attempt_0" / "0" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the first start ended before training
    monkeypatch.setenv("LOCAL_RANK", "0")
    (tmp_path / "agent").mkdir()
    assert not restarted("run")
    note_training("run")
    assert not restarted("run")  # the same process
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # after a machine joined
    assert restarted("run")
    assert not restarted("another run")
