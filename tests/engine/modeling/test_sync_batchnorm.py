"""MODEL.SYNC_BATCHNORM: when batch norms are converted, and what is logged otherwise."""

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import comm
from hookline.engine.modeling import build_model
from hookline.engine.modeling.changes import _to_sync_batchnorm


def config(name="ConvNet", **arguments):
    cfg = get_cfg()
    cfg.MODEL.NAME, cfg.MODEL.DEVICE, cfg.MODEL.SYNC_BATCHNORM = name, "cpu", True
    cfg.MODEL.ARGS.update(arguments)
    return cfg


def test_one_process_converts_nothing():
    model = build_model(config(width=2))
    assert not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def test_several_processes_on_gpus_convert_all_batch_norms_and_keep_names(monkeypatch):
    plain = build_model(config(width=2))
    names = list(plain.state_dict())
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    model = _to_sync_batchnorm(plain, torch.device("cuda"))
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 4
    assert all(isinstance(norm, nn.SyncBatchNorm) for norm in norms)
    assert list(model.state_dict()) == names


def test_sync_batchnorm_on_the_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"MODEL\.SYNC_BATCHNORM.*GPU"):
        build_model(config(width=2))
