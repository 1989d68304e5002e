import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hookline.config import ConfigError
from hookline.engine import launch
from hookline.engine.ranks.environment import check_alone, launched_by_torchrun, note_training, restarted
from hookline.engine.ranks.process import _join_start

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

SRUN = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in (*TORCHRUN, *SRUN, *MPIRUN):
        monkeypatch.delenv(name, raising=False)


def test_a_process_of_torchrun_is_recognised_by_its_variables(monkeypatch):
    assert not launched_by_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")  # some clusters set it
    assert not launched_by_torchrun()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launched_by_torchrun()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (SRUN, r"one of 4 processes that srun started .*SLURM_STEP_NUM_TASKS.*Start one process on each machine"),
        (MPIRUN, "one of 4 processes that mpirun started"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "one of 4 processes that mpirun started"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "one of 2 processes, but without LOCAL_RANK, MASTER_ADDR, MASTER_PORT it"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "without LOCAL_RANK it"),
    ],
)
def test_a_process_of_another_launcher_does_not_train_alone(variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for processes in (1, 2):
        with pytest.raises(ConfigError, match=message):
            launch(pytest.fail, processes, device="cpu")


@pytest.mark.parametrize(
    "variables",
    [
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # started once, in a job for more
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},  # by a batch script
        {"SLURM_NTASKS": "4"},  # in the shell of salloc
        {**SRUN, **TORCHRUN, "WORLD_SIZE": "1"},  # by torchrun
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2"},
    ],
)
def test_a_single_process_of_another_launcher_runs_the_function(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch(lambda: "done", 1) == "done"


@pytest.mark.parametrize("launcher", [SRUN, MPIRUN])
def test_a_missing_local_rank_is_that_of_the_launcher(launcher, monkeypatch):
    for name, value in {**TORCHRUN, **launcher, "RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK")
    assert launched_by_torchrun()
    assert os.environ["LOCAL_RANK"] == "1"
    with pytest.raises(ConfigError, match="has not joined"):
        check_alone()


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
