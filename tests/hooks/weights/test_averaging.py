"""EMA: the average, its evaluation, and that training is not affected."""

import pytest
import torch
from small_runs import config_trainer, kill_at, load
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.hooks import EMA, BestCheckpointer, CallbackHook, EvalHook, HookBase
from hookline.hooks.weights import averaging
from hookline.hooks.weights.averaging import WeightAverage

pytestmark = pytest.mark.usefixtures("log")


class Net(nn.Module):
    """Tied weights, batch norm, a buffer that is not saved; a loss while training, scores otherwise."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, batch):
        x, y = batch
        scores = self.second(self.norm(self.first(x)))
        return {"loss": F.cross_entropy(scores, y)} if self.training else scores


def batches(count=4):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, generator=generator), torch.arange(6) % 4) for _ in range(count)]


def simple_trainer(*hooks, model=None, **kwargs):
    torch.manual_seed(0)
    model = model or Net()
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)
    trainer.register_hooks(hooks)
    return trainer


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Note(HookBase):
    """Records the weights before training and after each step."""

    def __init__(self):
        self.seen = []

    def before_train(self):
        self.seen.append(weights_of(self.trainer.model))

    after_step = before_train


def saved(hook):
    return {name: value.clone() for name, value in hook.state_dict()["averaged_model"].items()}


# ---------------------------------------------------------------------- the average


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_follows_the_formula(warmup):
    note, ema = Note(), EMA(decay=0.8, warmup=warmup)
    simple_trainer(note, ema).train(0, 12)
    expected = note.seen[0]
    for n, weights in enumerate(note.seen[1:]):
        d = min(0.8, (1 + n) / (10 + n)) if warmup else 0.8
        expected = {name: d * expected[name] + (1 - d) * weights[name] for name in weights}
    ours = saved(ema)
    for name in ("first.weight", "second.bias", "norm.weight"):
        torch.testing.assert_close(ours[name], expected[name])
        assert not torch.equal(ours[name], note.seen[-1][name])
    assert ema.updates == 12


def test_buffers_are_copied_or_averaged():
    note, copy, average = Note(), EMA(decay=0.5, warmup=False), EMA(0.5, False, buffers="average", evaluate=False)
    simple_trainer(note, copy, average).train(0, 5)
    expected = note.seen[0]["norm.running_mean"]
    for weights in note.seen[1:]:
        expected = 0.5 * expected + 0.5 * weights["norm.running_mean"]
    torch.testing.assert_close(saved(average)["norm.running_mean"], expected)
    assert torch.equal(saved(copy)["norm.running_mean"], note.seen[-1]["norm.running_mean"])
    assert saved(average)["norm.num_batches_tracked"] == saved(copy)["norm.num_batches_tracked"] == 5


def test_the_saved_average_is_a_full_state_dict_with_plain_names():
    model = Net()
    model.second = torch.compile(model.second, backend="eager")
    ema = EMA()
    trainer = simple_trainer(ema, model=nn.DataParallel(model))
    trainer.train(0, 2)
    ours = saved(ema)
    assert list(ours) == list(Net().state_dict())
    assert torch.equal(ours["first.weight"], ours["second.weight"])
    Net().load_state_dict(ours)


def test_it_starts_with_the_weights_at_start_and_updates_every_period():
    note, ema = Note(), EMA(decay=0.5, warmup=False, start="1ep", every=3)
    trainer = simple_trainer(note, ema)  # 4 iterations an epoch
    trainer.train(0, 4)
    assert torch.equal(saved(ema)["second.bias"], note.seen[4]["second.bias"])
    assert ema.updates == 0
    note, ema = Note(), EMA(decay=0.5, warmup=False, start=0.4, every=3)
    simple_trainer(note, ema).train(0, 10)
    expected = note.seen[4]["second.bias"]
    for done in (6, 9):
        expected = 0.5 * expected + 0.5 * note.seen[done]["second.bias"]
    torch.testing.assert_close(saved(ema)["second.bias"], expected)


def test_half_precision_weights_are_averaged_in_float32():
    model = nn.Linear(2, 2).to(torch.bfloat16)
    average = WeightAverage(model)
    with torch.no_grad():
        model.weight.zero_()
        average.update(get_ema_multi_avg_fn(0.0), 0)
        model.weight.fill_(1.0)
    for _ in range(100):
        average.update(get_ema_multi_avg_fn(0.999), 1)
    ours = average.state_dict()["weight"]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, torch.full((2, 2), 1 - 0.999**100))
    average.put()
    assert model.weight.dtype == torch.bfloat16
    torch.testing.assert_close(model.weight.float(), ours, atol=1e-3, rtol=0.01)
    average.restore()
    assert torch.equal(model.weight, torch.ones(2, 2, dtype=torch.bfloat16))


def test_a_skipped_update_leaves_no_nan_in_the_average():
    ema = EMA(decay=0.5)
    trainer = simple_trainer(ema, nonfinite="skip")
    data = batches()
    trainer.reset_data_loader(lambda: [data[0], (data[1][0] * float("nan"), data[1][1]), data[2]])
    trainer.train(0, 3)
    assert all(value.isfinite().all() for name, value in saved(ema).items() if "running" not in name)


def test_lazy_layers_are_averaged_once_they_have_a_shape():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LazyLinear(4)

        def forward(self, batch):
            return {"loss": F.cross_entropy(self.layer(batch[0]), batch[1])}

    ema = EMA()
    simple_trainer(ema, model=Lazy()).train(0, 3)
    assert saved(ema)["layer.weight"].shape == (4, 4)
    assert ema.updates == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 1.0}, "decay"),
        ({"decay": -0.1}, "decay"),
        ({"every": 0}, "every"),
        ({"every": "often"}, "often"),
        ({"start": "30min"}, "30min"),
        ({"buffers": "none"}, "buffers"),
        ({"device": "gpu"}, "gpu"),
    ],
)
def test_invalid_arguments_are_errors(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EMA(**arguments)


def test_of_two_averages_the_first_is_evaluated_and_both_are_saved(log):
    hooks, used = (EMA(0.5, warmup=False), EMA(0.9, warmup=False)), []
    trainer = simple_trainer(*hooks)
    trainer.register_hooks([EvalHook(3, lambda: used.append(trainer.model.first.weight.clone()))])
    assert "Evaluations use the average of the first EMA; that of another EMA is only kept and saved" in log.text
    trainer.train(0, 3)
    states = trainer.state_dict()["hooks"]
    assert [(key, states[key]["evaluate"]) for key in ("EMA", "EMA#2")] == [("EMA", True), ("EMA#2", False)]
    assert torch.equal(used[0], states["EMA"]["averaged_model"]["first.weight"])
    assert not torch.equal(used[0], states["EMA#2"]["averaged_model"]["first.weight"])


# ---------------------------------------------------------------------- evaluation


def test_evaluations_use_the_average_and_after_eval_sees_the_models_weights():
    ema, note = EMA(decay=0.5), Note()
    evaluated, after, own = [], [], []

    def evaluate():
        evaluated.append((weights_of(trainer.model), saved(ema)))
        return {"x": {"y": 1.0}}

    look = CallbackHook(after_eval=lambda t, results: after.append(weights_of(t.model)))
    trainer = simple_trainer(look, EvalHook(4, evaluate), ema, note)
    pointers = {name: value.data_ptr() for name, value in trainer.model.state_dict().items()}
    trainer.register_hooks([CallbackHook(after_step=lambda t: own.append(weights_of(t.model)))])
    trainer.train(0, 8)
    assert len(evaluated) == len(after) == 2
    for (weights, average), later, at in zip(evaluated, after, (3, 7), strict=True):
        for name in weights:
            assert torch.equal(weights[name], average[name]), name
            assert torch.equal(later[name], own[at][name]), name
        assert not torch.equal(weights["second.bias"], own[at]["second.bias"])
    # It includes the last step's update, though EvalHook comes before EMA.
    again = EMA(decay=0.5)
    simple_trainer(again).train(0, 4)
    assert torch.equal(evaluated[0][0]["second.bias"], saved(again)["second.bias"])
    assert pointers == {name: value.data_ptr() for name, value in trainer.model.state_dict().items()}


def test_training_is_not_affected():
    plain = simple_trainer(EvalHook(2, lambda: {}))
    plain.train(0, 7)
    trainer = simple_trainer(EvalHook(2, lambda: {}), EMA(0.5, buffers="average"))
    trainer.train(0, 7)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_weights_are_restored_after_an_evaluation_that_raises(error):
    def evaluate():
        raise error("broken")

    note, ema = Note(), EMA(0.5)
    trainer = simple_trainer(note, EvalHook(3, evaluate), ema)
    with pytest.raises(error):
        trainer.train(0, 8)
    assert not ema.average.is_in_use
    for name, value in note.seen[-1].items():
        assert torch.equal(trainer.model.state_dict()[name], value)
    assert not torch.equal(saved(ema)["second.bias"], note.seen[-1]["second.bias"])


def test_the_weights_are_restored_when_another_hook_fails_before_the_evaluation():
    class Fails(HookBase):
        def before_eval(self):
            raise RuntimeError("broken")

    note, ema = Note(), EMA(0.5)
    trainer = simple_trainer(note, EvalHook(3, lambda: {}), ema, Fails())
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 8)
    assert torch.equal(trainer.model.second.bias, note.seen[-1]["second.bias"])


def test_an_interrupt_during_the_swap_loses_nothing(monkeypatch):
    ema = EMA(0.5)
    trainer = simple_trainer(EvalHook(0, lambda: {}), ema)
    trainer.train(0, 4)
    before = weights_of(trainer.model)
    average = saved(ema)
    real = averaging._copy

    def half(targets, sources):
        real(targets[:1], sources[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(averaging, "_copy", half)
    with pytest.raises(KeyboardInterrupt), ema.averaged_weights():
        pass
    monkeypatch.setattr(averaging, "_copy", real)
    ema.on_exception(KeyboardInterrupt())
    assert all(torch.equal(trainer.model.state_dict()[name], value) for name, value in before.items())
    assert all(torch.equal(saved(ema)[name], value) for name, value in average.items())


def test_a_stop_during_an_evaluation_restores_the_weights():
    from hookline.hooks import StopTraining

    def evaluate():
        raise StopTraining("enough")

    note, ema = Note(), EMA(0.5)
    trainer = simple_trainer(EvalHook(3, evaluate), ema, note)
    assert trainer.train(0, 8).reason == "enough"
    assert torch.equal(trainer.model.second.bias, note.seen[3]["second.bias"])
    assert note.seen[3]["second.bias"].ne(saved(ema)["second.bias"]).any()


def test_evaluate_false_evaluates_the_models_weights():
    seen, note = [], Note()
    trainer = simple_trainer(
        note, EvalHook(3, lambda: seen.append(weights_of(trainer.model))), EMA(0.5, evaluate=False)
    )
    trainer.train(0, 3)
    assert torch.equal(seen[0]["second.bias"], note.seen[-1]["second.bias"])


def test_averaged_weights_can_be_used_directly():
    ema = EMA(0.5)
    trainer = simple_trainer(ema)
    with ema.averaged_weights():  # there is no average yet
        pass
    trainer.train(0, 5)
    own = weights_of(trainer.model)

    def fail():
        with ema.averaged_weights():
            assert torch.equal(trainer.model.second.bias, saved(ema)["second.bias"])
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert torch.equal(trainer.model.second.bias, own["second.bias"])


# ---------------------------------------------------------------------- checkpoints of a config's run


@pytest.fixture
def make(tmp_path):
    def make(*overrides, folder="run", resume=False, ema=None):
        hooks = [] if ema is None else [{"NAME": "EMA", "ARGS": ema}]
        settings = [
            *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {"size": 77, "shape": (1, 4, 4)}}]),
            *("SOLVER.MAX_ITER", 24, "TEST.EVAL_PERIOD", 5, "HOOKS", hooks),
            *("CHECKPOINT.BEST.METRIC", "synthetic/loss", "CHECKPOINT.BEST.MODE", "min"),
        ]
        return config_trainer(tmp_path / folder, *settings, *overrides, resume=resume)

    return make


def averaged(folder, name="model_final"):
    return load(folder, name)["trainer"]["hooks"]["EMA"]["averaged_model"]


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_run(make, tmp_path, buffers):
    ema = {"decay": 0.9, "buffers": buffers, "start": 3, "every": 2}
    make(folder="whole", ema=ema).train()
    kill_at(make(ema=ema), 12)
    kill_at(make(ema=ema, resume=True), 20)
    make(ema=ema, resume=True).train()
    whole, ours = load(tmp_path / "whole"), load(tmp_path / "run")
    for name, value in whole["model"].items():
        assert torch.equal(ours["model"][name], value), name
    theirs = averaged(tmp_path / "whole")
    assert theirs.keys() == whole["model"].keys()
    for name, value in averaged(tmp_path / "run").items():
        assert torch.equal(value, theirs[name]), name
    assert not torch.equal(theirs["classifier.weight"], whole["model"]["classifier.weight"])


@pytest.mark.parametrize("name", ["model_0000006", "model_best", "model_final"])
def test_the_model_in_a_checkpoint_is_never_the_average(make, tmp_path, name):
    note = []
    trainer = make(ema={"decay": 0.9})
    trainer.register_hooks([CallbackHook(after_step=lambda t: note.append(weights_of(t.model)))])
    trainer.train()
    checkpoint = load(tmp_path / "run", name)
    iteration = checkpoint["trainer"]["iteration"]
    assert torch.equal(checkpoint["model"]["classifier.weight"], note[iteration]["classifier.weight"])
    # The state of the average after this step.
    again = make(folder="again", ema={"decay": 0.9})
    again.register_hooks([CallbackHook(after_step=lambda t: t.request_stop("here") if t.iter == iteration else None)])
    again.train()
    for key, value in averaged(tmp_path / "again").items():
        assert torch.equal(averaged(tmp_path / "run", name)[key], value), key


def test_a_checkpoint_written_during_an_evaluation_has_the_models_weights(make, tmp_path):
    trainer = make(ema={"decay": 0.9})
    note, seen = [], []

    class Saves(HookBase):
        def before_eval_step(self, batch):
            if not seen:
                before = weights_of(self.trainer.model)
                self.trainer.emit("before_save", "x")
                self.trainer.checkpointer.save("middle", tag_last=False)
                self.trainer.emit("after_save", "x")
                seen.append((before, weights_of(self.trainer.model)))

    trainer.register_hooks([Saves(), CallbackHook(after_step=lambda t: note.append(weights_of(t.model)))])
    trainer.train()
    middle = load(tmp_path / "run", "middle")["model"]
    assert torch.equal(middle["classifier.weight"], note[4]["classifier.weight"])
    before, after = seen[0]
    assert torch.equal(before["classifier.weight"], after["classifier.weight"])
    assert not torch.equal(before["classifier.weight"], middle["classifier.weight"])


def test_an_evaluation_of_a_loaded_run_uses_its_average(make):
    trainer = make(ema={"decay": 0.9})
    trainer.train()
    last = dict(trainer._last_eval_results)
    again = make(ema={"decay": 0.9}, resume=True)
    weights = weights_of(again.model)
    assert again.evaluate() == last
    assert make(resume=True).evaluate() != last
    assert all(torch.equal(again.model.state_dict()[name], value) for name, value in weights.items())


def test_after_the_best_weights_are_loaded_they_are_evaluated_and_predict(make):
    best = ("CHECKPOINT.BEST.METRIC", "synthetic/loss", "CHECKPOINT.BEST.MODE", "max", "TEST.EVAL_PERIOD", 1)
    trainer = make(*best, "CHECKPOINT.LOAD_BEST_AT_END", True, ema={"decay": 0.9})
    trainer.train()
    hook = trainer.find_hook(BestCheckpointer)
    assert hook.best_iter < trainer.max_iter - 1
    results = trainer._last_eval_results["synthetic"]
    assert trainer.evaluate()["synthetic"] == results
    assert results["loss"] == pytest.approx(hook.best_metric)
    loader = trainer.build_test_loader(trainer.cfg, "synthetic")
    outputs, targets = torch.cat(list(trainer.predict(loader))), torch.cat([y for _, y in loader])
    assert F.cross_entropy(outputs, targets).item() == pytest.approx(results["loss"])


def test_a_resumed_run_uses_the_decay_of_the_config(make):
    trainer = make("SOLVER.MAX_ITER", 12, ema={"decay": 0.9, "warmup": False})
    trainer.train()
    start = trainer.find_hook(EMA).average.state_dict()["classifier.bias"].clone()
    again = make("SOLVER.MAX_ITER", 13, ema={"decay": 0.25, "warmup": False}, resume=True)
    again.train()
    expected = 0.25 * start + 0.75 * again.model.classifier.bias
    torch.testing.assert_close(again.find_hook(EMA).state_dict()["averaged_model"]["classifier.bias"], expected)


def test_an_average_added_on_a_resume_starts_with_the_loaded_weights(make, log):
    make("SOLVER.MAX_ITER", 12).train()
    again = make("SOLVER.MAX_ITER", 13, ema={"decay": 0.5, "warmup": False}, resume=True)
    start = weights_of(again.model)["classifier.bias"]
    again.train()
    expected = 0.5 * start + 0.5 * again.model.classifier.bias
    torch.testing.assert_close(again.find_hook(EMA).state_dict()["averaged_model"]["classifier.bias"], expected)
    assert "starts with the model's current weights" in log.text


def test_a_loaded_average_is_saved_again_before_training(make):
    make(ema={"decay": 0.9}).train()
    again = make(ema={"decay": 0.9}, resume=True).state_dict()["hooks"]["EMA"]
    assert again["updates"] == 24
    assert again["start"] == 0
    assert "classifier.bias" in again["averaged_model"]


def test_an_average_of_another_model_is_an_error(make):
    make(ema={"decay": 0.9}).train()
    trainer = make("SOLVER.MAX_ITER", 30, ema={"decay": 0.9}, resume=True)
    trainer.find_hook(EMA)._loaded.pop("classifier.bias")
    with pytest.raises(ConfigError, match=r"EMA: .*no classifier\.bias"):
        trainer.train()


def test_the_average_on_the_cpu_is_the_same(make):
    one = make(folder="one", ema={"decay": 0.9})
    one.train()
    other = make(folder="two", ema={"decay": 0.9, "device": "cpu"})
    other.train()
    ours = other.find_hook(EMA).state_dict()["averaged_model"]
    for name, value in one.find_hook(EMA).state_dict()["averaged_model"].items():
        assert torch.equal(ours[name], value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_average_of_a_gpus_weights(device):
    note, ema = Note(), EMA(decay=0.8, warmup=False, device=device, buffers="average")
    seen = []
    trainer = simple_trainer(note, EvalHook(3, lambda: seen.append(weights_of(trainer.model))), ema, model=Net().cuda())
    trainer.device = torch.device("cuda")
    trainer.train(0, 9)
    expected = note.seen[0]
    for weights in note.seen[1:]:
        expected = {name: 0.8 * expected[name] + 0.2 * weights[name] for name in weights}
    for name in ("first.weight", "norm.running_mean"):
        torch.testing.assert_close(saved(ema)[name].cuda(), expected[name])
        assert saved(ema)[name].device.type == (device or "cuda")
        torch.testing.assert_close(seen[-1][name], expected[name])
    assert torch.equal(trainer.model.first.weight, note.seen[-1]["first.weight"])


def test_an_invalid_state_is_an_error_when_it_is_loaded():
    state = {"averaged_model": {"w": torch.ones(1), "a._extra_state": 3}, "updates": 1, "start": None}
    EMA().load_state_dict(state)
    for junk in ({"averaged_model": 3}, {"averaged_model": {"w": 3}}, {"updates": "x"}, {"start": "x"}):
        with pytest.raises((ConfigError, ValueError)):
            EMA().load_state_dict({**state, **junk})


# ---------------------------------------------------------------------------- predictions


def trained_with_ema():
    trainer = simple_trainer(EMA(decay=0.5, warmup=False))
    trainer.train(0, 6)
    return trainer, trainer.find_hook(EMA)


def test_predictions_use_the_same_weights_as_evaluations():
    trainer, ema = trained_with_ema()
    own = weights_of(trainer.model)
    found = list(trainer.predict(batches()))
    trainer.model.eval()
    with ema.averaged_weights(), torch.no_grad():
        expected = [trainer.model(batch) for batch in batches()]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(weights_of(trainer.model), own, rtol=0, atol=0)


def test_failed_or_abandoned_predictions_restore_the_weights():
    trainer, _ = trained_with_ema()
    own = weights_of(trainer.model)
    outputs = trainer.predict(batches())
    next(outputs)
    outputs.close()
    torch.testing.assert_close(weights_of(trainer.model), own, rtol=0, atol=0)
    with pytest.raises(TypeError):
        list(trainer.predict([None]))
    torch.testing.assert_close(weights_of(trainer.model), own, rtol=0, atol=0)


def test_training_during_a_prediction_is_an_error():
    trainer, _ = trained_with_ema()
    own = weights_of(trainer.model)
    outputs = trainer.predict(batches())
    next(outputs)
    with pytest.raises(RuntimeError, match="EMA: a prediction has not ended"):
        trainer.train(6, 8)
    outputs.close()
    torch.testing.assert_close(weights_of(trainer.model), own, rtol=0, atol=0)
