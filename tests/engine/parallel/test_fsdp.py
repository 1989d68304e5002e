"""FSDP2 in a single process, and what is refused before there are any; tests/distributed has the rest."""

import logging

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine.evaluation.evaluator import counted
from hookline.engine.parallel.fsdp import FSDP2
from hookline.hooks.common.tensors import has_shards


def test_one_process_does_not_shard_the_model_and_logs_it(caplog):
    model = nn.Linear(2, 2)
    with caplog.at_level(logging.INFO, "hookline"):
        assert FSDP2(modules=["Nothing"]).wrap(model, torch.device("cpu")) is model
    assert not has_shards(model)
    assert "fsdp2 does not shard the model" in caplog.text


def test_clipping_in_one_process_returns_the_norm():
    strategy, norm = FSDP2(), torch.tensor(2.0)
    assert strategy.clip(lambda parameters: norm, []) is norm
    assert strategy.clip(lambda parameters: None, []) is None
    model = nn.BatchNorm1d(2)
    strategy.before_evaluation(model)  # nobody to exchange with
    with strategy.no_sync(model):
        assert not has_shards(model)


def test_all_batches_count_in_one_process():
    assert list(counted(nn.Linear(2, 2), [1, 2])) == [(1, True), (2, True)]
    assert list(counted(nn.Linear(2, 2), [])) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"param_dtype": "bf16"}, r"PARALLEL\.ARGS\.param_dtype: must be"),
        ({"reduce_dtype": "int8"}, r"PARALLEL\.ARGS\.reduce_dtype: must be"),
        ({"min_params": 0}, r"PARALLEL\.ARGS\.min_params: must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        FSDP2(**arguments)
