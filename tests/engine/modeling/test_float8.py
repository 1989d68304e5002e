import sys
import types

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine.modeling import check_model
from hookline.engine.modeling.float8 import check_float8, to_float8


def config(*options):
    cfg = get_cfg()
    sizes = "{'in_features': 8, 'num_classes': 3}"
    cfg.merge_from_list(["MODEL.NAME", "MLP", "MODEL.ARGS", sizes, "MODEL.DEVICE", "cpu", *options])
    return cfg


def test_a_cpu_is_refused_before_anything_is_built():
    with pytest.raises(ConfigError, match=r"MODEL.FLOAT8: needs a GPU of compute capability .* MODEL.DEVICE is cpu"):
        check_model(config("MODEL.FLOAT8", "rowwise"))
    check_model(config())


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ConfigError, match=r"MODEL\.FLOAT8"):
        config("MODEL.FLOAT8", "columnwise")


def with_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")


def test_an_old_gpu_is_named(monkeypatch):
    with_gpu(monkeypatch, (8, 0))
    with pytest.raises(ConfigError, match=r"and A GPU has \(8, 0\)"):
        check_float8("tensorwise", torch.device("cuda"))


def test_the_missing_package_is_named(monkeypatch):
    with_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package torchao: pip install"):
        check_float8("tensorwise", torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: types.SimpleNamespace(name=name))
    check_float8("tensorwise", torch.device("cuda"))


@pytest.mark.slow  # importing torchao takes seconds
def test_layers_whose_sizes_fit_are_converted(monkeypatch):
    pytest.importorskip("torchao")
    with_gpu(monkeypatch, (9, 0))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    names, weight = list(model.state_dict()), model[0].weight
    model = to_float8(model, "rowwise", torch.device("cuda"))
    assert [type(module).__name__ for module in model] == ["Float8Linear", "ReLU", "Linear"]
    assert list(model.state_dict()) == names
    assert model[0].weight is weight
    assert "torchao" in sys.modules
