"""Steps that run as one compiled graph: same results as ordinary steps, with hooks around them."""

from functools import partial

import pytest
import torch
from fvcore.common.param_scheduler import LinearParamScheduler
from small_runs import compiled_trainer, load
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import AMPTrainer, SimpleTrainer
from hookline.engine.modeling import ModelAdapter
from hookline.engine.setup.check import check_config
from hookline.engine.solver import LRMultiplier
from hookline.engine.solver.clipping import build_grad_clipper
from hookline.hooks import CallbackHook, LRScheduler


class Graphs:
    """A backend that runs graphs uncompiled, and counts them."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def convnet():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 4)
    )


def batches(sizes=(8, 8, 8, 5)):
    """Return the batches of an epoch whose last batch is smaller."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator)) for size in sizes
    ]


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=0.3),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True, weight_decay=0.3),
}


def trainer(compile_step, model=mlp, optimizer="SGD", data=None, hooks=(), cls=SimpleTrainer, loss=True, **kwargs):
    torch.manual_seed(0)
    net, adapter = model(), ModelAdapter(nn.CrossEntropyLoss() if loss else None)
    optimizer = OPTIMIZERS[optimizer](net.parameters())
    made = cls(net, data or batches(), optimizer, adapter=adapter, compile_step=compile_step, **kwargs)
    made.register_hooks(hooks)
    return made


def compare(steps=10, rtol=1e-4, atol=1e-5, prepare=lambda trainer: None, **kwargs):
    """Train both ways and compare; return the trainer with compiled steps, and its number of graphs."""
    graphs, losses = Graphs(), []
    ordinary, compiled = trainer(False, **kwargs), trainer({"backend": graphs}, **kwargs)
    for one in (ordinary, compiled):
        prepare(one)
        seen = []
        one.register_hooks([CallbackHook(after_step=lambda t, seen=seen: seen.append(t.storage.latest()))])
        one.train(0, steps)
        losses.append([{name: value for name, (value, _) in row.items() if name != "data_time"} for row in seen])
    torch.testing.assert_close(compiled.model.state_dict(), ordinary.model.state_dict(), rtol=rtol, atol=atol)
    for expected, found in zip(*losses, strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    state, expected_state = compiled.optimizer.state_dict(), ordinary.optimizer.state_dict()
    assert str(state["param_groups"]) == str(expected_state["param_groups"])
    torch.testing.assert_close(state["state"], expected_state["state"], rtol=1e-3, atol=1e-4)
    assert graphs.count
    return compiled, graphs.count


def clip(kind, limit):
    cfg = get_cfg()
    cfg.SOLVER.CLIP_GRADIENTS = {"ENABLED": True, "CLIP_TYPE": kind, "CLIP_VALUE": limit, "NORM_TYPE": 2.0}
    cfg.LOG.GRAD_NORM = True
    return build_grad_clipper(cfg)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (  # as a config's
            lambda of: LRMultiplier(of, LinearParamScheduler(1.0, 0.0), 20),
            {"optimizer": "SGD", "clip_gradients": clip("norm", 0.05)},
        ),
        pytest.param(  # rate and momentum
            lambda of: torch.optim.lr_scheduler.OneCycleLR(of, 0.1, total_steps=20),
            {"optimizer": "momentum", "clip_gradients": clip("value", 0.01)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda of: torch.optim.lr_scheduler.CosineAnnealingLR(of, 20),
            {"optimizer": "AdamW", "zero_grad_before_forward": True, "model": convnet},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["SGD", "momentum", "AdamW"],
)
def test_results_equal_ordinary_steps_with_one_graph_for_each_shape(schedule, options, recwarn):
    def prepare(t):
        t.register_hooks([LRScheduler(t.optimizer, schedule(t.optimizer))])

    compiled, graphs = compare(prepare=prepare, **options)
    assert graphs == 2
    assert all(type(group["lr"]) is float for group in compiled.optimizer.param_groups)
    assert ("grad_norm" in compiled.storage.latest()) == ("clip_gradients" in options)
    kept = [p.grad is not None for p in compiled.model.parameters()]
    assert set(kept) == {"zero_grad_before_forward" in options}
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]  # schedules know that the optimizer was stepped


@pytest.mark.slow
def test_the_default_backend_equals_ordinary_steps():
    found = []
    for compile_step in (True, False):
        made = trainer(compile_step, model=partial(nn.Linear, 6, 4), optimizer="AdamW", data=batches(sizes=(8,)))
        made.train(0, 4)
        found.append(made.model.state_dict())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_parameters_that_have_one_gradient_together_are_clipped_once():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))

        def forward(self, x):
            return x @ (self.a + self.b)

    compare(model=Sum, clip_gradients=lambda parameters: [p.grad.mul_(0.5) for p in parameters] and None, steps=4)


class ByName(nn.Module):
    """Returns two losses, and the number of items that they are means over."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, y):
        each = nn.functional.cross_entropy(self.net(x), y, reduction="none") * (y != 0)
        items = (y != 0).sum()
        return {"loss": each.sum() / items, "size": 0.01 * (self.net(x) ** 2).sum() / items, "num_items": items}


def test_batches_may_be_dicts_and_models_may_return_losses_and_count_items():
    data = [{"x": x, "y": y} for x, y in batches((8, 8))]
    compiled, _ = compare(model=ByName, loss=False, data=data, steps=4)
    assert {"loss", "size", "total_loss", "num_items"} <= set(compiled.storage.latest())


def test_forward_and_loss_run_in_the_given_precision():
    compare(cls=AMPTrainer, precision=torch.bfloat16, rtol=1e-2, atol=1e-3, steps=4, data=batches((8, 8)))


def test_parameters_may_be_unused_and_frozen_at_first():
    def model():
        net = mlp()
        net.unused = nn.Parameter(torch.ones(3))
        net.forward = lambda x: nn.Sequential.forward(net[:3], x)
        return net

    def prepare(t):
        t.register_hooks([CallbackHook(before_step=lambda t: t.model[0].requires_grad_(t.iter >= 3) and None)])

    compiled, _ = compare(model=model, optimizer="AdamW", prepare=prepare, steps=6, data=batches(sizes=(8,)))
    assert torch.equal(compiled.model.unused, torch.ones(3))


def test_shapes_may_share_a_graph_and_too_many_graphs_are_an_error():
    graphs = Graphs()
    trainer({"backend": graphs, "dynamic": True}, data=batches(sizes=(8, 7, 6))).train(0, 4)
    assert graphs.count == 1
    made = trainer({"backend": graphs, "recompile_limit": 2}, data=batches(sizes=(2, 3, 4, 5)))
    with pytest.raises(ConfigError, match=r"SOLVER\.COMPILE_STEP.*DROP_LAST"):
        made.train(0, 4)
    assert graphs.count == 3

    class Waiting(nn.Linear):
        def forward(self, x):
            return super().forward(x * int(str(int(x.sum() > -1e9))))

    with pytest.raises(ConfigError, match=r"SOLVER\.COMPILE_STEP: torch cannot make one graph"):
        trainer({"backend": graphs}, model=lambda: Waiting(6, 4)).train(0, 3)


def test_hooks_and_methods_run_around_the_compiled_part():
    seen = []

    class Own(SimpleTrainer):
        def optimizer_step(self):
            super().optimizer_step()
            seen.append("optimizer_step")

        def fetch(self):
            x, y = super().fetch()
            return 2 * x, y

    events = ("before_step", "before_fetch", "after_optimizer_step", "after_step", "after_epoch")
    hook = CallbackHook(
        after_fetch=lambda t, batch: seen.append("after_fetch"),
        **{event: (lambda t, event=event: seen.append(event)) for event in events},
    )
    compare(cls=Own, hooks=[hook], steps=3, data=batches(sizes=(8, 8, 8)))
    step = ["before_step", "before_fetch", "after_fetch", "after_optimizer_step", "optimizer_step", "after_step"]
    assert seen == [*step * 3, "after_epoch"] * 2


def test_a_resumed_run_is_equal_to_the_bit_and_may_turn_compilation_off(tmp_path):
    def make(folder, resume=False, compile_step=True):
        return compiled_trainer(
            tmp_path / folder,
            *("SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.COMPILE_STEP", compile_step, "TEST.EVAL_PERIOD", 4),
            *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {"size": 32, "shape": [8], "num_classes": 4}}]),
            *("SOLVER.MAX_ITER", 8, "DATALOADER.BATCH_SIZE", 16),
            resume=resume,
        )

    make("whole").train()
    killed = make("parts")
    killed.register_hooks([CallbackHook(after_step=lambda t: t.request_stop("enough", 75) if t.iter == 4 else None)])
    assert killed.train().reason == "enough"
    assert make("parts", resume=True, compile_step=False).start_iter == 5
    resumed = make("parts", resume=True)
    resumed.train()
    found, expected = load(tmp_path / "parts"), load(tmp_path / "whole")
    assert all(type(group["lr"]) is float for group in found["trainer"]["optimizer"]["param_groups"])
    assert str(found["trainer"]["optimizer"]) == str(expected["trainer"]["optimizer"])
    for name, value in expected["model"].items():
        assert torch.equal(value, found["model"][name]), name


# ---------------------------------------------------------------------------- what is refused


class Unread:
    def __len__(self):
        return 4

    def __iter__(self):
        raise AssertionError("data was read")


def overriding(method):
    return type("Own", (SimpleTrainer,), {method: lambda self, *args: None})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"hooks": [CallbackHook(before_forward=lambda *args: None)]}, "COMPILE_STEP: .*before_forward"),
        ({"hooks": [CallbackHook(before_backward=lambda *args: None)]}, "COMPILE_STEP: .*before_backward"),
        ({"cls": overriding("run_step")}, "COMPILE_STEP: Own overrides run_step"),
        ({"cls": overriding("forward_backward")}, "COMPILE_STEP: Own overrides forward_backward"),
        ({"precision": torch.float16}, r"COMPILE_STEP.*AMP\.DTYPE"),
        ({"compile_step": {"backend": "inductr"}}, "COMPILE_STEP_ARGS.*'inductr'"),
    ],
)
def test_what_does_not_work_with_compiled_steps_is_refused_before_data_is_read(options, match):
    with pytest.raises(ConfigError, match=match):
        trainer(**{"compile_step": True, "data": Unread(), **options}).train(0, 3)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["SOLVER.COMPILE_STEP_ARGS.backened", "eager"], r"COMPILE_STEP_ARGS\.backened.*did you mean"),
        (["SOLVER.COMPILE_STEP_ARGS.fullgraph", False], r"COMPILE_STEP_ARGS\.fullgraph"),
        (["SOLVER.COMPILE_STEP_ARGS.mode", "reduce-overhead"], r"COMPILE_STEP_ARGS\.mode.*MODEL\.COMPILE\.ARGS\.mode"),
        (["SOLVER.COMPILE_STEP_ARGS.mode", "max-autotune"], "COMPILE_STEP_ARGS.mode"),
    ],
)
def test_a_config_with_unsupported_settings_is_refused(overrides, match):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "SOLVER.COMPILE_STEP", True, *overrides])
    with pytest.raises(ConfigError, match=match):
        check_config(cfg)


def test_the_removed_key_of_captured_steps_is_an_error_that_says_what_to_write():
    with pytest.raises(ConfigError, match=r"CUDA_GRAPH was renamed to MODEL\.COMPILE: .*reduce-overhead"):
        get_cfg().merge_from_list(["SOLVER.CUDA_GRAPH", True])
