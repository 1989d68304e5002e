"""Which steps are captured, replayed or run without a graph, tested on the CPU with functions in place of graphs.

Tests that need a GPU are in ``test_gpu.py``.
"""

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.modeling import ModelAdapter
from hookline.engine.step.graphs import CudaGraphStep
from hookline.hooks import CallbackHook, LRScheduler

from .test_compiled_step import Unread, batches


class Replayed(CudaGraphStep):
    """In place of a CUDA graph, a replay calls the function, and reads and fills the same tensors each time."""

    device_type = "cpu"

    def __init__(self):
        super().__init__()
        self.log = []

    def _compute(self, *args):
        result = super()._compute(*args)
        if result is None:
            self.log.append("without")
        return result

    def _capture(self, function):
        self.log.append("capture")
        filled = None

        def replay():
            nonlocal filled
            self.log.append("replay")
            losses, gradients = function()
            if filled is None:
                filled = losses, gradients
            for name, value in losses.items():
                filled[0][name].copy_(value)
            for kept, gradient in zip(filled[1], gradients, strict=True):
                kept.copy_(gradient)
            return filled

        return replay


def trainer(graphs=None, data=None, optimizer=None, hooks=(), **kwargs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    make = optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
    adapter = ModelAdapter(nn.CrossEntropyLoss())
    made = SimpleTrainer(net, data or batches(), make(net.parameters()), adapter=adapter, **kwargs)
    if graphs is not None:
        made._whole_step = graphs
    made.register_hooks(hooks)
    return made


def compare(steps=14, prepare=lambda t: None, **kwargs):
    graphs, losses = Replayed(), []
    ordinary, graphed = trainer(**kwargs), trainer(graphs, **kwargs)
    for one in (ordinary, graphed):
        prepare(one)
        one.train(0, steps)
        losses.append([value for value, _ in one.storage.history("loss").values()])
    torch.testing.assert_close(graphed.model.state_dict(), ordinary.model.state_dict())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(set(losses[1])) == len(losses[1])  # a graph's loss is copied before the next replay overwrites it
    assert str(graphed.optimizer.state_dict()["param_groups"]) == str(ordinary.optimizer.state_dict()["param_groups"])
    return graphed, graphs.log


def test_a_shape_is_captured_after_three_steps_in_a_row_and_other_shapes_run_without_a_graph():
    seen = []
    events = ("before_step", "before_fetch", "after_backward", "after_optimizer_step", "after_step")

    def prepare(t):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(t.optimizer, 20)
        around = CallbackHook(**{event: (lambda t, event=event: seen.append(event)) for event in events})
        t.register_hooks([LRScheduler(t.optimizer, schedule), around])

    _, log = compare(prepare=prepare, data=batches((8, 8, 8, 8, 5)))
    assert seen == list(events) * 28
    assert log[:4] == ["without"] * 3 + ["capture"]
    assert log.count("capture") == 1
    assert log.count("without") == 3 + 2  # the batches of 5
    assert log.count("replay") == 14 - 3 - 2


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.model[0].requires_grad_(False),
        lambda t: t.model[1].eval(),
        lambda t: setattr(t.model[3].bias, "data", t.model[3].bias.data.clone()),
        lambda t: setattr(t, "adapter", ModelAdapter(nn.CrossEntropyLoss(label_smoothing=0.1))),
    ],
)
def test_a_change_that_a_graph_would_miss_captures_a_new_one(change):
    def at_the_tenth(t):
        if t.iter == 10:
            change(t)

    def prepare(t):
        t.register_hooks([CallbackHook(before_step=at_the_tenth)])

    _, log = compare(steps=20, prepare=prepare, data=batches((8, 8, 8)))
    assert log.count("capture") == 2
    assert log.count("without") == 6


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("graphs", "options", "match"),
    [
        (Replayed, {"hooks": [CallbackHook(before_backward=lambda t, losses: None)]}, "before_backward"),
        (Replayed, {"precision": torch.float16}, "AMP.DTYPE"),
        (Replayed, {"accumulation_steps": 2}, "ACCUMULATION_STEPS"),
        (lambda: None, {"cuda_graph": True}, "needs a CUDA device.*cpu"),
        (lambda: None, {"cuda_graph": True, "compile_step": True}, "COMPILE_STEP"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_before_any_data_is_read(graphs, options, match):
    with pytest.raises(ConfigError, match=match) as caught:
        trainer(graphs(), data=Unread(), **options).train(0, 3)
    assert "SOLVER.CUDA_GRAPH" in str(caught.value)
