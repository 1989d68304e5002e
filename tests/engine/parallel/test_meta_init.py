"""Models built on the meta device, and set by ``reset_parameters``."""

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine.parallel.meta_init import _reset


class Positions(nn.Module):
    def __init__(self, sets):
        super().__init__()
        self.sets = sets
        self.register_buffer("numbers", torch.arange(3))

    def reset_parameters(self):
        if self.sets:
            self.numbers.copy_(torch.arange(3))


def test_a_buffer_of_integers_that_stays_without_values_is_named():
    module = Positions(sets=True)
    _reset("places", module, torch.device("cpu"), set())
    assert module.numbers.tolist() == [0, 1, 2]
    with pytest.raises(
        ConfigError, match=r"reset_parameters\(\) of places \(Positions\) leaves numbers without values"
    ):
        _reset("places", Positions(sets=False), torch.device("cpu"), set())
