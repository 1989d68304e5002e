"""Steps that run as one compiled graph: same results as ordinary steps, with hooks around them."""

import gc
import logging
import weakref
from functools import partial

import pytest
import torch
from small_runs import compiled_trainer
from torch import nn
from torch.optim.optimizer import _use_grad_for_differentiable

from hookline.config import ConfigError, get_cfg
from hookline.engine import AMPTrainer, SimpleTrainer
from hookline.engine.modeling import ModelAdapter
from hookline.engine.solver import LRMultiplier
from hookline.engine.solver.clipping import _clip_each_norm, _clip_norm, _clip_value
from hookline.hooks import CallbackHook, LRScheduler


class Graphs:
    """A backend that runs graphs uncompiled, and counts them."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def mlp(dropout=0.0):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 4)
    )


def batches(shape=(6,), sizes=(8, 8, 8, 5)):
    """Return the batches of an epoch whose last batch is smaller."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, *shape, generator=generator), torch.randint(4, (size,), generator=generator))
        for size in sizes
    ]


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AMSGrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, fused=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
}


def trainer(compile_step, model=mlp, optimizer="SGD", data=None, hooks=(), cls=SimpleTrainer, **kwargs):
    torch.manual_seed(0)
    net = model()
    data = data or batches((1, 6, 6) if model is convnet else (6,))
    adapter = kwargs.pop("adapter", None) or ModelAdapter(nn.CrossEntropyLoss())
    made = cls(net, data, OPTIMIZERS[optimizer](net.parameters()), adapter=adapter, compile_step=compile_step, **kwargs)
    made.register_hooks(hooks)
    return made


def cosine(of):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(of.optimizer, 20)
    of.register_hooks([LRScheduler(of.optimizer, schedule)])


def compare(steps=10, rtol=1e-4, atol=1e-5, prepare=lambda trainer: None, **kwargs):
    """Train both ways and compare; return the trainer with compiled steps, and its number of graphs."""
    graphs = Graphs()
    ordinary, compiled = trainer(False, **kwargs), trainer({"backend": graphs}, **kwargs)
    losses = []
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


@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "AdamW"])
def test_results_equal_ordinary_steps(optimizer):
    compare(optimizer=optimizer, prepare=cosine)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS.keys() - {"SGD", "momentum", "AdamW"}))
def test_results_equal_ordinary_steps_with_all_optimizers(optimizer):
    compare(optimizer=optimizer, prepare=cosine)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_batch_norm_keeps_its_running_statistics(optimizer):
    compiled, _ = compare(model=convnet, optimizer=optimizer, prepare=cosine)
    assert compiled.model[1].num_batches_tracked == 10
    assert compiled.model[1].running_mean.abs().sum() > 0


@pytest.mark.parametrize(
    "clip",
    [
        partial(_clip_norm, limit=0.05, norm_type=2.0),
        partial(_clip_value, limit=0.01),
        partial(_clip_each_norm, limit=0.05, norm_type=2.0),
        partial(nn.utils.clip_grad_norm_, max_norm=0.05),
    ],
)
def test_gradients_are_clipped(clip):
    compare(optimizer="momentum", clip_gradients=clip)


def test_parameters_that_have_one_gradient_together_are_clipped_once():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))

        def forward(self, x):
            return x @ (self.a + self.b)

    compare(model=Sum, clip_gradients=lambda parameters: [p.grad.mul_(0.5) for p in parameters] and None, steps=4)


def test_the_gradient_norm_is_put():
    compiled, _ = compare(clip_gradients=partial(_clip_norm, limit=0.05, norm_type=2.0))
    assert compiled.storage.latest()["grad_norm"][0] > 0


def test_gradients_are_accumulated():
    compare(optimizer="AdamW", accumulation_steps=3)


class Counted(nn.Module):
    """Returns two losses, and the number of items that they are means over."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, batch):
        x, y = batch
        keep = y != 0
        each = nn.functional.cross_entropy(self.net(x), y, reduction="none") * keep
        items = keep.sum()
        return {"loss": each.sum() / items, "size": 0.01 * (self.net(x) ** 2).sum() / items, "num_items": items}


@pytest.mark.slow
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_models_may_return_several_losses_and_count_their_items(accumulation_steps):
    compiled, _ = compare(model=Counted, adapter=ModelAdapter(), accumulation_steps=accumulation_steps)
    assert {"loss", "size", "total_loss", "num_items"} <= set(compiled.storage.latest())


def in_dicts():
    return [{"x": x, "label": y} for x, y in batches()]


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, scale=None):
        return self.net(x)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_batches_may_be_dicts(accumulation_steps):
    compare(model=ByName, data=in_dicts(), accumulation_steps=accumulation_steps)


def test_batches_may_have_several_inputs():
    compare(model=ByName, data=[(x, torch.zeros(len(x)), y) for x, y in batches()])


def test_batches_may_change_their_form_during_a_run():
    data = [batch for pair in zip(batches(), in_dicts(), strict=True) for batch in pair]
    compare(model=ByName, data=data, steps=12)


def test_forward_and_loss_run_in_the_given_precision():
    compare(optimizer="momentum", precision=torch.bfloat16, rtol=1e-2, atol=1e-3)


def test_mixed_precision_without_a_scaler_works_in_an_amp_trainer():
    compare(cls=AMPTrainer, precision=torch.bfloat16, rtol=1e-2, atol=1e-3)


def test_unused_parameters_do_not_change():
    def model():
        net = mlp()
        net[0].weight.requires_grad_(False)
        net.unused = nn.Parameter(torch.ones(3))
        net.forward = lambda x: nn.Sequential.forward(net[:4], x)
        return net

    compiled, _ = compare(model=model, optimizer="AdamW")
    assert torch.equal(compiled.model.unused, torch.ones(3))


@pytest.mark.slow
def test_parameters_may_be_unfrozen_during_a_run():
    def freeze(t):
        t.model[0].requires_grad_(t.iter >= 4)

    compare(optimizer="AdamW", prepare=lambda t: t.register_hooks([CallbackHook(before_step=freeze)]))


def test_each_shape_has_one_graph_also_when_the_learning_rate_changes():
    compiled, graphs = compare(optimizer="AdamW", prepare=cosine, steps=20)
    assert graphs == 2
    assert type(compiled.optimizer.param_groups[0]["lr"]) is float
    assert compiled.optimizer.param_groups[0]["lr"] != 0.01


def test_shapes_may_share_a_graph():
    graphs = Graphs()
    made = trainer({"backend": graphs, "dynamic": True}, data=batches(sizes=(8, 7, 6, 5, 4, 3)))
    made.train(0, 12)
    assert graphs.count == 1


@pytest.mark.slow
def test_too_many_shapes_are_logged_once_and_run_as_ordinary_steps(caplog):
    kwargs = {"data": batches(sizes=tuple(range(2, 9))), "optimizer": "AdamW"}
    graphs = Graphs()
    compiled = trainer({"backend": graphs, "recompile_limit": 3}, **kwargs)
    with caplog.at_level(logging.WARNING, logger="hookline"):
        compiled.train(0, 14)
    assert graphs.count == 3
    assert len([r for r in caplog.records if "more than" in r.message and "SOLVER.COMPILE_STEP" in r.message]) == 1
    ordinary = trainer(False, **kwargs)
    ordinary.train(0, 14)
    torch.testing.assert_close(compiled.model.state_dict(), ordinary.model.state_dict(), rtol=1e-4, atol=1e-5)


def test_hooks_run_between_the_steps():
    seen = []
    events = ("before_step", "before_fetch", "after_optimizer_step", "after_step", "after_epoch")
    hook = CallbackHook(
        after_fetch=lambda t, batch: seen.append("after_fetch"),
        **{event: (lambda t, event=event: seen.append(event)) for event in events},
    )
    trainer({"backend": Graphs()}, hooks=[hook]).train(0, 4)
    step = ["before_step", "before_fetch", "after_fetch", "after_optimizer_step", "after_step"]
    assert seen == step * 4 + ["after_epoch"]


def test_gradients_are_cleared_after_a_step_unless_they_must_be_kept():
    def gradients(**kwargs):
        seen = []
        hook = CallbackHook(after_step=lambda t: seen.append([p.grad for p in t.model.parameters()]))
        trainer({"backend": Graphs()}, hooks=[hook], **kwargs).train(0, 3)
        return seen[-1]

    assert all(gradient is None for gradient in gradients())
    assert all(gradient.abs().sum() > 0 for gradient in gradients(zero_grad_before_forward=True))
    compare(optimizer="momentum", zero_grad_before_forward=True)


# ---------------------------------------------------------------------------- losses that are not finite


def poisoned():
    data = batches()
    data[2] = (torch.full((8, 6), float("nan")), data[2][1])
    return data


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_the_update_of_a_nonfinite_loss_is_skipped(optimizer):
    kwargs = {"data": poisoned(), "optimizer": optimizer, "nonfinite": "skip"}
    updates = []
    hook = CallbackHook(after_optimizer_step=lambda t: updates.append(t.iter))
    compiled = trainer({"backend": Graphs()}, hooks=[hook], **kwargs)
    assert compiled.train(0, 8).metrics["nonfinite_steps"] == 2
    assert updates == [0, 1, 3, 4, 5, 7]
    ordinary = trainer(False, **kwargs)
    ordinary.train(0, 8)
    torch.testing.assert_close(compiled.model.state_dict(), ordinary.model.state_dict(), rtol=1e-4, atol=1e-5)
    found, expected = (t.optimizer.state_dict()["state"] for t in (compiled, ordinary))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_nonfinite_loss_is_an_error_and_does_not_change_the_weights():
    compiled, before = trainer({"backend": Graphs()}, data=poisoned()), trainer(False, data=poisoned())
    with pytest.raises(FloatingPointError, match="iteration 2"):
        compiled.train(0, 8)
    before.train(0, 2)
    torch.testing.assert_close(compiled.model.state_dict(), before.model.state_dict())


def test_training_stops_at_a_nonfinite_loss():
    compiled = trainer({"backend": Graphs()}, data=poisoned(), nonfinite="stop")
    result = compiled.train(0, 8)
    assert "NaN or infinite at iteration 2" in result.reason
    assert all(p.isfinite().all() for p in compiled.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_nonfinite_losses_in_the_first_steps_create_no_optimizer_state(optimizer, start):
    data = batches()
    data[:2] = [(torch.full((8, 6), float("nan")), y) for _, y in data[:2]]
    graphs, found = Graphs(), []
    for compile_step in ({"backend": graphs}, False):
        made = trainer(compile_step, data=data, optimizer=optimizer, nonfinite="skip")
        made.train(start, start + 4)
        assert made.nonfinite.steps == 2
        found.append((made.model.state_dict(), made.optimizer.state_dict()["state"]))
    assert graphs.count == 1  # the third step is an ordinary one
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_unfrozen_parameter_gets_its_optimizer_state_from_a_finite_loss():
    def unfreeze(t):
        t.model[0].requires_grad_(t.iter >= 2)  # the loss of iteration 2 is NaN

    kwargs = {"data": poisoned(), "optimizer": "AdamW", "nonfinite": "skip"}
    compare_states = []
    for compile_step in ({"backend": Graphs()}, False):
        made = trainer(compile_step, hooks=[CallbackHook(before_step=unfreeze)], **kwargs)
        made.train(0, 6)
        compare_states.append((made.model.state_dict(), made.optimizer.state_dict()["state"]))
    torch.testing.assert_close(*compare_states, rtol=1e-3, atol=1e-4)


def test_an_optimizer_that_always_creates_state_is_refused(monkeypatch):
    class Growing(torch.optim.SGD):
        @_use_grad_for_differentiable
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state[f"gradient_{len(state)}"] = parameter.grad.clone()

    monkeypatch.setitem(OPTIMIZERS, "growing", Growing)
    with pytest.raises(ConfigError, match=r"COMPILE_STEP: Growing makes new state in each step"):
        trainer({"backend": Graphs()}, optimizer="growing").train(0, 30)


def test_an_ordinary_step_between_compiled_steps_skips_nonfinite_updates_on_the_device():
    class OnDevice(SimpleTrainer):
        def _device_type(self):
            return "cuda"

    made = trainer({"backend": Graphs()}, cls=OnDevice, optimizer="AdamW", nonfinite="skip")
    flags = []
    hook = CallbackHook(after_step=lambda t: flags.append(t.optimizer.__dict__.pop("found_inf", None)))
    made.register_hooks([hook])
    made.train(0, 3)
    assert flags == [0.0, None, None]  # compiled steps revert their update


# ---------------------------------------------------------------------------- runs of a config


@pytest.fixture
def make(tmp_path):
    """Create trainers of runs, each in its own folder."""

    def make(folder, *overrides, resume=False, compile_step=True):
        return compiled_trainer(
            tmp_path / folder,
            *("SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.COMPILE_STEP", compile_step, "TEST.EVAL_PERIOD", 4),
            *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {"size": 40, "shape": [8], "num_classes": 4}}]),
            *("SOLVER.MAX_ITER", 12, "SOLVER.CHECKPOINT_PERIOD", 6),
            *overrides,
            resume=resume,
        )

    return make


def until(made, iteration):
    """Train, and stop after an iteration as if the process were killed."""

    def stop(t):
        if t.iter == iteration:
            t.request_stop("enough", 75)

    made.register_hooks([CallbackHook(after_step=stop)])
    assert made.train().reason == "enough"


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(make):
    whole = make("whole")
    assert whole.train().reason == "completed"
    until(make("parts"), 7)
    resumed = make("parts", resume=True)
    assert resumed.start_iter == 8
    resumed.train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert str(whole.optimizer.state_dict()) == str(resumed.optimizer.state_dict())


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_resume_may_turn_compilation_on_or_off(make, compiled_first):
    until(make("run", "MODEL.ARGS.dropout", 0.0, compile_step=compiled_first), 7)
    resumed = make("run", "MODEL.ARGS.dropout", 0.0, resume=True, compile_step=not compiled_first)
    assert resumed.start_iter == 8
    resumed.train()
    plain = make("plain", "MODEL.ARGS.dropout", 0.0, compile_step=False)
    plain.train()
    torch.testing.assert_close(resumed.model.state_dict(), plain.model.state_dict(), rtol=1e-4, atol=1e-5)


def test_checkpoints_are_the_same_as_without_compilation(make):
    compiled, plain = make("compiled"), make("plain", compile_step=False)
    for one in (compiled, plain):
        one.train()
    found, expected = (
        torch.load(f"{one.cfg.OUTPUT_DIR}/model_final.pth", weights_only=True) for one in (compiled, plain)
    )
    assert list(found["model"]) == list(expected["model"])
    groups = found["trainer"]["optimizer"]["param_groups"]
    assert str(groups) == str(expected["trainer"]["optimizer"]["param_groups"])
    assert all(type(group["lr"]) is float for group in groups)


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "event",
    [
        "before_forward",
        "after_forward",
        "before_backward",
        "after_backward",
        "before_optimizer_step",
        "after_zero_grad",
    ],
)
def test_a_hook_for_an_event_within_the_step_is_refused_by_name(event):
    hook = CallbackHook(**{event: lambda *args: None})
    with pytest.raises(ConfigError, match=rf"SOLVER\.COMPILE_STEP: .*CallbackHook listens to {event}"):
        trainer({"backend": Graphs()}, hooks=[hook])


def test_a_hook_appended_to_the_list_is_refused_before_any_data_is_read():
    made = trainer({"backend": Graphs()}, data=Unread())
    made._hooks.append(CallbackHook(after_backward=lambda t: None))
    with pytest.raises(ConfigError, match="after_backward"):
        made.train(0, 3)


class Unread:
    def __len__(self):
        return 4

    def __iter__(self):
        raise AssertionError("data was read")


def refused(match, **kwargs):
    with pytest.raises(ConfigError, match=match):
        trainer({"backend": Graphs()}, data=Unread(), **kwargs).train(0, 3)


def test_a_gradient_scaler_is_refused():
    refused("COMPILE_STEP.*AMP.DTYPE", precision=torch.float16)


def test_several_optimizers_are_refused():
    net = mlp()
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (net[0], net[3])]
    made = SimpleTrainer(net, Unread(), optimizers, compile_step={"backend": Graphs()})
    with pytest.raises(ConfigError, match=r"COMPILE_STEP.*several optimizers"):
        made.train(0, 3)


@pytest.mark.parametrize("cls", [torch.optim.SparseAdam])
def test_optimizers_that_cannot_be_compiled_are_refused(cls, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "other", cls)
    refused(rf"COMPILE_STEP.*{cls.__name__}", optimizer="other")


def test_an_optimizer_with_step_hooks_is_refused():
    made = trainer({"backend": Graphs()}, data=Unread())
    made.optimizer.register_step_post_hook(lambda *args: None)
    with pytest.raises(ConfigError, match=r"COMPILE_STEP.*step hooks"):
        made.train(0, 3)


def test_an_optimizer_whose_step_was_replaced_is_refused():
    made = trainer({"backend": Graphs()}, data=Unread())
    made.optimizer.step = lambda: None
    with pytest.raises(ConfigError, match=r"COMPILE_STEP.*replaced"):
        made.train(0, 3)


def test_sparse_gradients_are_refused_and_the_module_is_named():
    refused(r"COMPILE_STEP.*gradients of 0 are sparse", model=lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)))


@pytest.mark.parametrize(
    "method",
    ["forward", "forward_backward", "backward", "after_backward", "accumulate", "optimizer_step", "zero_grad"],
)
def test_an_overridden_method_that_would_not_be_called_is_refused_by_name(method):
    own = type("Own", (SimpleTrainer,), {method: lambda self, *args: None})
    refused(rf"COMPILE_STEP: Own overrides {method}\(\), which would not be called: move .*False", cls=own)


def test_a_method_of_a_mixin_is_refused_by_name():
    mixin = type("Mixin", (), {"forward": lambda self, batch: {}})
    refused(r"COMPILE_STEP: Own overrides forward\(\)", cls=type("Own", (mixin, SimpleTrainer), {}))


def test_a_replaced_method_is_refused_by_name():
    made = trainer({"backend": Graphs()}, data=Unread())
    made.zero_grad = lambda: None
    with pytest.raises(ConfigError, match=r"COMPILE_STEP: SimpleTrainer overrides zero_grad"):
        made.train(0, 3)


def test_methods_around_the_compiled_part_may_be_overridden():
    seen = []

    class Own(SimpleTrainer):
        def run_step(self):
            super().run_step()
            seen.append("run_step")

        def fetch(self):
            x, y = super().fetch()
            return 2 * x, y

        def _write_metrics(self, *args, **kwargs):
            super()._write_metrics(*args, **kwargs)
            seen.append("_write_metrics")

    compare(cls=Own, steps=6)
    assert seen == ["_write_metrics", "run_step"] * 12


def test_a_schedule_of_momentum_is_refused():
    made = trainer({"backend": Graphs()}, data=Unread(), optimizer="AdamW")
    schedule = torch.optim.lr_scheduler.OneCycleLR(made.optimizer, 0.1, total_steps=9)
    with pytest.raises(ConfigError, match=r"COMPILE_STEP.*OneCycleLR changes the momentum.*cycle_momentum"):
        made.register_hooks([LRScheduler(made.optimizer, schedule)])


def test_a_schedule_of_the_learning_rate_needs_no_new_graph():
    def one_cycle(t):
        schedule = torch.optim.lr_scheduler.OneCycleLR(t.optimizer, 0.1, total_steps=20, cycle_momentum=False)
        t.register_hooks([LRScheduler(t.optimizer, schedule)])

    assert compare(prepare=one_cycle, optimizer="AdamW")[1] == 2


def test_settings_that_change_in_each_step_are_logged(caplog):
    def change(t):
        t.optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * t.iter, 0.999)

    made = trainer({"backend": Graphs(), "recompile_limit": 2}, optimizer="AdamW", data=batches(sizes=(8,)))
    made.register_hooks([CallbackHook(after_step=change)])
    with caplog.at_level(logging.WARNING, logger="hookline"):
        made.train(0, 6)
    assert any("momentum or betas" in r.message and "cycle_momentum=False" in r.message for r in caplog.records)


def test_a_run_step_that_does_not_call_the_compiled_step_is_an_error():
    class Own(SimpleTrainer):
        def run_step(self):
            self.fetch()

    with pytest.raises(ConfigError, match=r"COMPILE_STEP.*Own\.run_step"):
        trainer({"backend": Graphs()}, cls=Own).train(0, 3)


def test_a_model_that_cannot_be_one_graph_is_an_error():
    class Waiting(nn.Linear):
        def forward(self, x):
            return super().forward(x * int(str(int(x.sum() > -1e9))))

    with pytest.raises(ConfigError, match=r"SOLVER\.COMPILE_STEP: torch cannot make one graph"):
        trainer({"backend": Graphs()}, model=lambda: Waiting(6, 4)).train(0, 3)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["SOLVER.COMPILE_STEP_ARGS.backend", "inductr"], r"SOLVER\.COMPILE_STEP_ARGS\.backend.*did you mean"),
        (["SOLVER.COMPILE_STEP_ARGS.backened", "eager"], r"SOLVER\.COMPILE_STEP_ARGS\.backened.*did you mean"),
        (["SOLVER.COMPILE_STEP_ARGS.fullgraph", False], r"SOLVER\.COMPILE_STEP_ARGS\.fullgraph"),
        (["SOLVER.COMPILE_STEP_ARGS.mode", "reduce-overhead"], r"SOLVER\.COMPILE_STEP_ARGS\.mode.*CUDA_GRAPH"),
        (["SOLVER.AMP.ENABLED", True, "SOLVER.AMP.DTYPE", "float16"], r"SOLVER\.COMPILE_STEP.*SOLVER\.AMP\.DTYPE"),
        (["SOLVER.CUDA_GRAPH", True], r"SOLVER\.COMPILE_STEP and SOLVER\.CUDA_GRAPH"),
        (["HOOKS", ["FlopsCounter"]], r"HOOKS\[0\]: FlopsCounter listens to before_forward"),
    ],
)
def test_a_config_with_unsupported_settings_is_refused(overrides, match):
    from hookline.engine import check_config

    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.SOLVER.COMPILE_STEP = True
    cfg.merge_from_list(overrides)
    with pytest.raises(ConfigError, match=match):
        check_config(cfg)


# ---------------------------------------------------------------------------- other


def test_the_trainer_and_its_model_are_freed():
    made = trainer({"backend": Graphs()}, optimizer="AdamW")
    made.train(0, 5)
    model = weakref.ref(made.model)
    del made
    gc.collect()
    assert model() is None


def test_a_schedule_knows_that_the_optimizer_was_stepped(recwarn):
    made = trainer({"backend": Graphs()})
    cosine(made)
    made.train(1, 4)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_a_schedule_of_a_config_sets_the_rate_of_compiled_steps():
    from fvcore.common.param_scheduler import LinearParamScheduler

    def linear(t):
        t.register_hooks([LRScheduler(t.optimizer, LRMultiplier(t.optimizer, LinearParamScheduler(1.0, 0.0), 10))])

    _, graphs = compare(prepare=linear)
    assert graphs == 2


DECAYED = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.3),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.3),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3),
    "AMSGrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.3),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, weight_decay=0.3),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, weight_decay=0.3),
    "Adadelta": partial(torch.optim.Adadelta, weight_decay=0.3),
    "Adamax": partial(torch.optim.Adamax, lr=0.01, weight_decay=0.3),
    "NAdam": partial(torch.optim.NAdam, lr=0.01, weight_decay=0.3),
    "RAdam": partial(torch.optim.RAdam, lr=0.01, weight_decay=0.3),
}


# Guards against silently wrong results of SGD and Adam.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizer", DECAYED)
def test_the_default_backend_uses_the_given_weight_decay(optimizer, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, optimizer, DECAYED[optimizer])
    found = []
    for compile_step in (True, False):
        kwargs = {"data": batches(sizes=(8,)), "model": lambda: nn.Linear(6, 4, bias=False)}
        made = trainer(compile_step, optimizer=optimizer, **kwargs)
        made.train(0, 4)
        found.append(made.model.weight.detach())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_default_backend_equals_ordinary_steps_and_resumes_to_the_bit(make):
    overrides = ("SOLVER.COMPILE_STEP_ARGS.backend", "inductor")
    whole = make("whole", *overrides)
    whole.train()
    until(make("parts", *overrides), 7)
    resumed = make("parts", *overrides, resume=True)
    resumed.train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    compiled = make("compiled", *overrides, "MODEL.ARGS.dropout", 0.0)
    plain = make("plain", "MODEL.ARGS.dropout", 0.0, compile_step=False)
    for one in (compiled, plain):
        one.train()
    torch.testing.assert_close(compiled.model.state_dict(), plain.model.state_dict(), rtol=1e-3, atol=1e-4)
