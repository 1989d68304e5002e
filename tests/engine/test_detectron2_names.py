"""Names of ``detectron2.engine`` that only code written for it needs."""

import pytest
import torch
from small_runs import Net, batches

from hookline.config import get_cfg
from hookline.engine import AMPTrainer
from hookline.engine.detectron2_names import _try_get_key


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_first_update_leaves_weights_and_momentum_as_they_are(fused):
    net = Net(3, 2)
    before = net.fc.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)  # the scaled gradients are infinite
    made = AMPTrainer(net, [100 * b for b in batches()], optimizer, grad_scaler=scaler, precision=torch.bfloat16)
    made.train(0, 1)
    assert torch.equal(net.fc.weight, before)
    assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())
    scaler.update(1.0)
    made.train(1, 2)
    assert 0 < (net.fc.weight - before).abs().max() < 1


def test_keys_of_any_config_are_tried_in_order():
    assert _try_get_key(get_cfg(), "train.seed", "SEED", default=0) == -1
    assert _try_get_key({"train": {"seed": 3}}, "SEED", "train.seed") == 3
    assert _try_get_key(get_cfg(), "SEED.x", default=7) == 7
