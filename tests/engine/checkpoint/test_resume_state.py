"""What a resume takes from a checkpoint of several ranks."""

import pytest
import torch
from small_runs import Net
from torchdata.stateful_dataloader import StatefulDataLoader

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer


def test_a_loader_with_a_state_of_its_own_is_not_resumed_on_another_number_of_ranks():
    def make():
        model, data = Net(), [torch.ones(2)] * 6
        return SimpleTrainer(model, StatefulDataLoader(data, 2), torch.optim.SGD(model.parameters(), lr=0.1))

    trainer = make()
    trainer.train(0, 2)
    state = trainer.state_dict()
    make().load_state_dict(state)
    state["data_of_ranks"] = [state["data"]] * 2
    with pytest.raises(ConfigError, match=r"on 1 data rank\(s\): it has the states of 2 loader"):
        make().load_state_dict(state)
