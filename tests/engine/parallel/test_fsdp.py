"""FSDP2 in a single process, and what is refused before there are any; tests/distributed has the rest."""

import logging

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine.parallel.fsdp import FSDP2
from hookline.hooks.common import has_shards


def test_one_process_does_not_shard_the_model_and_logs_it(caplog):
    model = nn.Linear(2, 2)
    with caplog.at_level(logging.INFO, "hookline"):
        assert FSDP2(modules=["Nothing"]).wrap(model, torch.device("cpu")) is model
    assert not has_shards(model)
    assert "fsdp2 does not shard the model" in caplog.text


def test_units_without_parameters_are_refused():
    with pytest.raises(ConfigError, match=r"PARALLEL\.ARGS\.min_params: must be at least 1, not 0"):
        FSDP2(min_params=0)
