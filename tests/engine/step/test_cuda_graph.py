"""Which steps are captured, replayed or run without a graph, tested on the CPU with functions in place of graphs.

Tests that need a GPU are in ``test_gpu.py``.
"""

import logging

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import SimpleTrainer, check_config
from hookline.engine.modeling import ModelAdapter
from hookline.engine.step.cuda_graph import GraphedStep
from hookline.hooks import CallbackHook, LRScheduler


class Calls:
    """Replaces CUDA graphs: a replay calls the function, and reads and fills the same tensors each time."""

    device_type = "cpu"

    def __init__(self):
        self.log = []

    def warm_up(self, function):
        self.log.append("warm up")
        return function()

    def capture(self, function):
        self.log.append("capture")
        filled = None

        def replay():
            nonlocal filled
            self.log.append("replay")
            losses, found, metrics = function()
            if filled is None:
                filled = losses, found, metrics
            filled[1].copy_(found)
            for kept, values in ((filled[0], losses), (filled[2], metrics)):
                for name, value in values.items():
                    kept[name].copy_(value)
            return filled

        return replay


def batches(sizes=(8, 8, 8, 5)):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator)) for size in sizes
    ]


def trainer(calls=None, data=None, optimizer=None, hooks=(), **kwargs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    make = optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
    adapter = ModelAdapter(nn.CrossEntropyLoss())
    made = SimpleTrainer(net, data or batches(), make(net.parameters()), adapter=adapter, **kwargs)
    if calls is not None:
        made._whole_step = GraphedStep(calls)
    made.register_hooks(hooks)
    return made


def compare(steps=14, prepare=lambda t: None, **kwargs):
    calls = Calls()
    ordinary, graphed = trainer(**kwargs), trainer(calls, **kwargs)
    losses = []
    for one in (ordinary, graphed):
        prepare(one)
        one.train(0, steps)
        losses.append(one.storage.history("loss").values())
    torch.testing.assert_close(graphed.model.state_dict(), ordinary.model.state_dict())
    assert [value for value, _ in losses[1]] == pytest.approx([value for value, _ in losses[0]], rel=1e-5)
    assert str(graphed.optimizer.state_dict()["param_groups"]) == str(ordinary.optimizer.state_dict()["param_groups"])
    return graphed, calls.log


def cosine(of):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(of.optimizer, 20)
    of.register_hooks([LRScheduler(of.optimizer, schedule)])


def test_a_shape_is_captured_after_its_warm_up_and_other_shapes_run_without_a_graph():
    _, log = compare(prepare=cosine)
    # Batches of 8, 8, 8, 5, repeated, the first in an ordinary step: those of 5 have no graph.
    assert log[:3] == ["warm up"] * 3
    assert log.count("capture") == 1
    assert log.count("warm up") == 3 + 3
    assert log.count("replay") == 14 - 1 - 3 - 3


def test_gradients_are_accumulated_and_clipped_in_the_graph():
    graphed, log = compare(
        accumulation_steps=2, clip_gradients=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05)
    )
    assert "replay" in log
    assert graphed.storage.latest()["grad_norm"][0] > 0


def test_each_step_has_its_own_loss():
    seen = []
    compare(hooks=[CallbackHook(after_step=lambda t: seen.append(t.storage.latest()["loss"][0]))])
    ordinary, graphed = seen[:14], seen[14:]
    assert graphed == pytest.approx(ordinary, rel=1e-5)
    assert len(set(graphed)) == 14  # a graph's loss is copied before the next replay overwrites it


def test_gradients_may_be_kept():
    seen = []
    hook = CallbackHook(after_step=lambda t: seen.append([p.grad is None for p in t.model.parameters()]))
    compare(hooks=[hook], zero_grad_before_forward=True)
    assert not any(map(any, seen))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.optimizer.param_groups[0].update(weight_decay=0.5),
        lambda t: t.model[0].requires_grad_(False),
        lambda t: t.model[1].eval(),
        lambda t: setattr(t.model[3].bias, "data", t.model[3].bias.data.clone()),
        lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()),
        lambda t: setattr(t, "accumulation_steps", 2),
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
    assert log.count("warm up") == 6


def test_shapes_that_never_repeat_are_logged_once(caplog):
    calls = Calls()
    made = trainer(calls, data=[batches((size,))[0] for size in range(2, 260)])
    with caplog.at_level(logging.WARNING, logger="hookline"):
        made.train(0, 258)
    assert "capture" not in calls.log
    assert len([r for r in caplog.records if "SOLVER.CUDA_GRAPH does nothing" in r.message]) == 1


def test_hooks_run_around_the_graph():
    seen = []
    events = ("before_step", "before_fetch", "after_optimizer_step", "after_step")
    hook = CallbackHook(**{event: (lambda t, event=event: seen.append(event)) for event in events})
    trainer(Calls(), hooks=[hook]).train(0, 8)
    assert seen == list(events) * 8


# ---------------------------------------------------------------------------- what is refused


class Unread:
    def __len__(self):
        return 4

    def __iter__(self):
        raise AssertionError("data was read")


def refused(match, calls=None, **kwargs):
    with pytest.raises(ConfigError, match=match):
        trainer(calls or Calls(), data=Unread(), **kwargs).train(0, 3)


def test_a_hook_for_an_event_within_the_step_is_refused_by_name():
    refused("CUDA_GRAPH.*CallbackHook listens to after_backward", hooks=[CallbackHook(after_backward=lambda t: None)])


def test_a_gradient_scaler_is_refused():
    refused("CUDA_GRAPH.*AMP.DTYPE", precision=torch.float16)


def test_optimizers_that_cannot_be_captured_are_refused():
    refused("CUDA_GRAPH.*SGD can be captured only where it is fused", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def test_a_model_on_another_device_is_refused_before_any_data_is_read():
    net = nn.Linear(6, 4)
    made = SimpleTrainer(net, Unread(), torch.optim.AdamW(net.parameters()), cuda_graph=True)
    with pytest.raises(ConfigError, match=r"SOLVER\.CUDA_GRAPH: needs a CUDA device.*cpu.*MODEL\.DEVICE"):
        made.train(0, 3)


def test_cuda_graph_and_compile_step_exclude_each_other():
    net = nn.Linear(6, 4)
    with pytest.raises(ConfigError, match=r"SOLVER\.COMPILE_STEP and SOLVER\.CUDA_GRAPH"):
        SimpleTrainer(net, Unread(), torch.optim.AdamW(net.parameters()), cuda_graph=True, compile_step=True)


def test_a_config_for_another_device_is_refused():
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.CUDA_GRAPH", True, "MODEL.DEVICE", "cpu"])
    with pytest.raises(ConfigError, match=r"SOLVER\.CUDA_GRAPH: needs a CUDA device.*MODEL\.DEVICE"):
        check_config(cfg)


def test_a_failed_capture_is_an_error_that_says_so():
    class Failing(Calls):
        def capture(self, function):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    made = trainer(Failing())
    with pytest.raises(ConfigError, match=r"SOLVER\.CUDA_GRAPH: this step cannot be captured: operation not permitted"):
        made.train(0, 8)
