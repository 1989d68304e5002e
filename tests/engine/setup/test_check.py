"""Invalid configs are errors that name the key, before anything is written (most are in tests/promises)."""

import os

import pytest
import torch

from hookline.config import ConfigError, get_cfg
from hookline.engine.setup.check import check_config


def test_the_defaults_and_a_valid_config_pass_and_nothing_changes(make, tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    for cfg in (get_cfg(), make("CHECKPOINT.BEST.METRIC", "synthetic/accuracy", "TEST.EVAL_PERIOD", 10)):
        check_config(cfg)
    assert torch.equal(torch.rand(1), expected)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["TEST.EXPECTED_RESULTS", [["synthetic", "accuracy", "0.9", 0.1]]], "'0.9'"),
        (["DETERMINISTIC", True, "CUDNN_BENCHMARK", True], "contradict"),
    ],
)
def test_values_that_cannot_hold_are_refused_before_training(make, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_config(make(*overrides))
