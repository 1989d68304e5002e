import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import launch
from hookline.engine.modeling import resolve_device
from hookline.engine.parallel import Strategy
from hookline.engine.parallel.base import build_strategy


def make(name, **args):
    cfg = get_cfg()
    cfg.merge_from_list(["PARALLEL.NAME", name, "PARALLEL.ARGS", args])
    return cfg


def test_in_a_single_process_nothing_is_wrapped():
    assert type(build_strategy(make("auto"))) is Strategy
    model = nn.Linear(2, 2)
    for strategy in (build_strategy(make(name)) for name in ("none", "ddp", "fsdp2", "mesh")):
        assert strategy.wrap(model, torch.device("cpu")) is model
        with strategy.no_sync(model):
            assert strategy.clip(lambda parameters: torch.tensor(float(len(parameters))), list(model.parameters())) == 2


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("ddp", {"compression": "int8"}, r"PARALLEL\.ARGS\.compression"),
        ("fsdp2", {"param_dtype": "bf16"}, r"PARALLEL\.ARGS\.param_dtype"),
        ("fsdp2", {"init": "gpu"}, r"PARALLEL\.ARGS\.init"),
        ("mesh", {"replicate": -1, "shard": -1}, "one can be -1"),
        ("mesh", {"shard": 0}, "shard"),
        ("none", {"static_graph": True}, r"PARALLEL\.ARGS\.static_graph"),
    ],
)
def test_a_wrong_strategy_is_an_error_that_names_the_key(name, args, message):
    with pytest.raises(ConfigError, match=message):
        build_strategy(make(name, **args))


def test_a_timeout_is_a_time():
    with pytest.raises(ConfigError, match=r"PARALLEL\.TIMEOUT"):
        get_cfg().merge_from_list(["PARALLEL.TIMEOUT", "20it"])


def test_each_process_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr("hookline.engine.comm.get_world_size", lambda: 4)
    monkeypatch.setattr("hookline.engine.comm.get_local_rank", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 1)
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.mps.is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cpu")  # processes cannot share Apple's


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"--num-gpus 3: this machine has 2 GPU\(s\).*MODEL.DEVICE to cpu"):
        launch(pytest.fail, 3)
