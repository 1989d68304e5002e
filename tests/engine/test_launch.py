import socket
import subprocess
import sys
from pickle import PicklingError

import pytest
import torch.distributed as dist
from ranks import PROGRAMS
from starts import group_of_one
from torch.utils.data import DataLoader

from hookline.config import ConfigError
from hookline.config.errors import MismatchError
from hookline.engine import config_errors_exit, launch
from hookline.engine.launch import check_restarts

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SRUN = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.fixture
def variables(monkeypatch):
    """Sets variables of the environment, without those of launchers that were there."""
    for name in (*TORCHRUN, *SRUN, *MPIRUN):
        monkeypatch.delenv(name, raising=False)

    def set_all(values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # started once, in a job for more
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},  # by a batch script
        {"SLURM_NTASKS": "4"},  # in the shell of salloc
        {**SRUN, **TORCHRUN, "WORLD_SIZE": "1"},  # by torchrun
        {"WORLD_SIZE": "2"},  # some clusters set it
    ],
)
def test_one_process_runs_the_function_and_returns_its_result(values, variables):
    variables(values)
    assert launch(lambda a, b: a + b, 1, num_machines=1, machine_rank=0, dist_url="auto", args=(2, 3)) == 5
    with pytest.raises(ZeroDivisionError):
        launch(lambda: 1 / 0, 1)


def test_a_process_group_that_is_there_is_used(variables):
    variables(TORCHRUN)
    with group_of_one():
        assert launch(lambda: dist.get_world_size(), 1, device="cpu") == 1
        with pytest.raises(ConfigError, match="--num-gpus 2 --num-machines 1"):
            launch(pytest.fail, 2, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_gpus_per_machine": 2, "device": "mps"}, "MODEL.DEVICE: mps"),
        ({"num_gpus_per_machine": 3, "device": "cpu"}, "--num-gpus 3"),  # under torchrun
    ],
)
def test_invalid_arguments_are_refused(arguments, name, variables):
    variables({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"} if name == "--num-gpus 3" else {})
    with pytest.raises(ConfigError, match=name):
        launch(pytest.fail, **arguments)


def test_an_address_in_use_and_a_function_without_a_name_are_refused(variables):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--dist-url {url}"):
            launch(pytest.fail, 2, dist_url=url, device="cpu")
    with pytest.raises((AttributeError, PicklingError), match="lambda"):
        launch(lambda: None, 2, device="cpu")


@pytest.mark.slow
def test_ranks_have_the_start_method_of_their_launcher():
    command = [sys.executable, PROGRAMS / "start_method.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (SRUN, "SLURM_STEP_NUM_TASKS.*one of 4 processes"),
        (MPIRUN, "OMPI_COMM_WORLD_SIZE.*one of 4 processes"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "PMI_SIZE.*one of 4 processes"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "one of 2 processes.*without LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_a_process_of_another_launcher_does_not_train_alone(values, message, variables):
    variables(values)
    for processes in (1, 2):
        with pytest.raises(ConfigError, match=message):
            launch(pytest.fail, processes, device="cpu")


@pytest.mark.parametrize("values", [{"TORCHELASTIC_MAX_RESTARTS": "1"}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}])
def test_a_run_that_torchrun_may_restart_must_resume(values, variables):
    variables({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "0", **values})
    check_restarts()  # a rank of --num-gpus
    variables({"TORCHELASTIC_RUN_ID": "none"})
    with pytest.raises(ConfigError, match="--resume"):
        check_restarts()
    if values == {"TORCHELASTIC_MAX_RESTARTS": "1"}:
        variables({"TORCHELASTIC_USE_AGENT_STORE": "True"})
        with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            launch(pytest.fail, 1, device="cpu")


def fail(samples):
    raise MismatchError("the samples do not make a batch")


def test_errors_of_config_and_data_exit_with_2_and_print_only_their_message(capsys):
    with pytest.raises(SystemExit) as end, config_errors_exit():
        raise ConfigError("SOLVER.BASE_LR: is wrong")
    assert (end.value.code, capsys.readouterr().err) == (2, "error: SOLVER.BASE_LR: is wrong\n")
    loader = DataLoader([0], num_workers=1, collate_fn=fail)
    with pytest.raises(SystemExit), config_errors_exit():
        next(iter(loader))
    assert capsys.readouterr().err == "error: the samples do not make a batch\n"
    with pytest.raises(ZeroDivisionError), config_errors_exit():
        raise ZeroDivisionError
