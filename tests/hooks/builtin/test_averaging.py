"""EMA: the average, its evaluation, and that training is not affected."""

import contextlib

import pytest
import torch
from small_runs import (
    Classifier,
    Weights,
    assert_same,
    config_trainer,
    labelled_batches,
    load,
    make_trainer,
    weights_of,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hookline.config import ConfigError
from hookline.hooks import EMA, CallbackHook, EvalHook, StopTraining
from hookline.hooks.builtin.averaging import WeightAverage

pytestmark = pytest.mark.usefixtures("log")


def differs(weights, others, name="second.bias"):
    return not torch.equal(weights[name], others[name])


def saved(hook):
    return {name: value.clone() for name, value in hook.state_dict()["averaged_model"].items()}


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_follows_the_formula_and_buffers_are_copied_or_averaged(warmup):
    note, copy, average = Weights(), EMA(0.8, warmup), EMA(0.8, warmup, buffers="average", device="cpu")
    make_trainer(note, copy, average).train(0, 12)
    expected = note.seen[0]
    for n, weights in enumerate(note.seen[1:]):
        d = min(0.8, (1 + n) / (10 + n)) if warmup else 0.8
        expected = {name: d * expected[name] + (1 - d) * weights[name] for name in weights}
    for name in ("first.weight", "second.bias", "norm.weight"):
        torch.testing.assert_close(saved(copy)[name], expected[name])
        assert differs(saved(copy), note.seen[-1], name)
        assert torch.equal(saved(copy)[name], saved(average)[name])
    torch.testing.assert_close(saved(average)["norm.running_mean"], expected["norm.running_mean"])
    assert not differs(saved(copy), note.seen[-1], "norm.running_mean")
    assert saved(average)["norm.num_batches_tracked"] == saved(copy)["norm.num_batches_tracked"] == 12
    assert copy.updates == 12


def test_the_saved_average_is_a_full_state_dict_with_plain_names():
    model = Classifier()
    model.second = torch.compile(model.second, backend="eager")
    model.norm = checkpoint_wrapper(model.norm)
    ema = EMA()
    trainer = make_trainer(ema, model=nn.DataParallel(model))
    trainer.train(0, 2)
    ours = saved(ema)
    assert list(ours) == list(Classifier().state_dict())
    assert not torch.equal(ours["norm.weight"], model.norm.weight)  # the average, by the plain name
    assert torch.equal(ours["first.weight"], ours["second.weight"])
    Classifier().load_state_dict(ours)


def test_it_starts_with_the_weights_at_start_and_updates_every_period():
    note, ema = Weights(), EMA(decay=0.5, warmup=False, start="1ep", every=3)
    trainer = make_trainer(note, ema)  # 4 iterations an epoch
    trainer.train(0, 4)
    assert torch.equal(saved(ema)["second.bias"], note.seen[4]["second.bias"])
    trainer.train(4, 10)
    expected = note.seen[4]["second.bias"]
    for done in (6, 9):
        expected = 0.5 * expected + 0.5 * note.seen[done + 1]["second.bias"]
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
    model = Classifier()
    model.norm = nn.Identity()  # batch norm's statistics would be NaN
    trainer = make_trainer(ema, model=model, nonfinite="skip")
    data = labelled_batches()
    trainer.reset_data_loader(lambda: [data[0], (data[1][0] * float("nan"), data[1][1]), data[2]])
    trainer.train(0, 3)
    assert all(value.isfinite().all() for value in saved(ema).values())


def test_evaluations_use_the_average_and_training_is_not_affected():
    ema, note, plain = EMA(decay=0.5), Weights(), Weights()
    evaluated, after = [], []

    def evaluate():
        evaluated.append((weights_of(trainer.model), saved(ema)))
        return {"x": {"y": 1.0}}

    look = CallbackHook(after_eval=lambda t, results: after.append(weights_of(t.model)))
    trainer = make_trainer(look, EvalHook(4, evaluate), ema, note)
    trainer.train(0, 8)
    make_trainer(EvalHook(4, lambda: {}), plain).train(0, 8)
    for ours, theirs in zip(note.seen, plain.seen, strict=True):
        assert_same(ours, theirs)
    assert len(evaluated) == len(after) == 2
    for (weights, average), later, done in zip(evaluated, after, (4, 8), strict=True):
        assert_same(weights, average)
        assert_same(later, note.seen[done])
        assert differs(weights, later)
    # It includes the last step's update, though EvalHook comes before EMA.
    again = EMA(decay=0.5)
    make_trainer(again).train(0, 4)
    assert_same(evaluated[0][0], saved(again))


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopTraining])
def test_the_weights_are_restored_after_an_evaluation_that_raises(error):
    def fail():
        raise error("broken")

    note, ema = Weights(), EMA(0.5)
    trainer = make_trainer(note, EvalHook(3, fail), ema)
    with contextlib.nullcontext() if error is StopTraining else pytest.raises(error):
        assert trainer.train(0, 8).reason == "broken"
    assert not ema.average.is_in_use
    assert_same(weights_of(trainer.model), note.seen[3])
    assert differs(saved(ema), note.seen[3])


def test_evaluate_false_evaluates_the_models_weights():
    seen, note, ema = [], Weights(), EMA(0.5, evaluate=False)
    trainer = make_trainer(note, EvalHook(3, lambda: seen.append(weights_of(trainer.model))), ema)
    trainer.train(0, 3)
    assert_same(seen[0], note.seen[-1])
    ema.put()
    assert_same(weights_of(trainer.model), saved(ema))
    ema.average.restore()
    assert_same(weights_of(trainer.model), note.seen[-1])


@pytest.fixture
def make(tmp_path):
    def make(*overrides, resume=False, ema=None):
        hooks = [] if ema is None else [{"NAME": "EMA", "ARGS": ema}]
        settings = [
            *("SOLVER.MAX_ITER", 24, "SOLVER.CHECKPOINT_PERIOD", 5, "TEST.EVAL_PERIOD", 5, "HOOKS", hooks),
            *("CHECKPOINT.BEST.METRIC", "synthetic/loss", "CHECKPOINT.BEST.MODE", "min"),
        ]
        return config_trainer(tmp_path / "run", *settings, *overrides, resume=resume)

    return make


def test_checkpoints_have_the_models_weights_and_the_average(make, tmp_path):
    trainer, note = make(ema={"decay": 0.9}), Weights()
    trainer.register_hooks([note])
    trainer.train()
    average = saved(trainer.find_hook(EMA))
    for name in ("model_0000019", "model_best", "model_final"):  # the first two are saved beside evaluations
        checkpoint = load(tmp_path / "run", name)
        assert_same(checkpoint["model"], note.seen[checkpoint["trainer"]["iteration"] + 1])
        assert checkpoint["trainer"]["hooks"]["EMA"]["averaged_model"].keys() == average.keys()
    last = trainer.evaluate()
    again = make(ema={"decay": 0.9}, resume=True)
    assert again.evaluate() == last
    assert make(resume=True).evaluate() != last
    assert_same(weights_of(again.model), note.seen[-1])
    state = again.state_dict()["hooks"]["EMA"]
    assert state["updates"] == 24
    assert_same(state["averaged_model"], average)
    state["averaged_model"].pop("classifier.bias")  # of another model
    with pytest.raises(ConfigError, match=r"EMA: .*classifier\.bias"):
        trainer.find_hook(EMA).load_state_dict(state)


@pytest.mark.parametrize("before", [None, {"decay": 0.9, "warmup": False}], ids=["added", "of another decay"])
def test_a_resumed_run_has_the_average_of_its_config(make, before):
    """An average that is added starts with the loaded weights."""
    trainer = make("SOLVER.MAX_ITER", 12, ema=before)
    trainer.train()
    start = saved(trainer.find_hook(EMA)) if before else weights_of(trainer.model)
    again = make("SOLVER.MAX_ITER", 13, ema={"decay": 0.25, "warmup": False}, resume=True)
    again.train()
    expected = 0.25 * start["classifier.bias"] + 0.75 * again.model.classifier.bias
    torch.testing.assert_close(saved(again.find_hook(EMA))["classifier.bias"], expected)


def test_predictions_use_the_average_and_restore_the_weights_also_if_they_fail():
    ema = EMA(decay=0.5, warmup=False)
    trainer = make_trainer(ema)
    trainer.train(0, 6)
    own = weights_of(trainer.model)
    trainer.model.eval()
    ema.put()
    with torch.no_grad():
        expected = [trainer.model(batch) for batch in labelled_batches()]
    ema.average.restore()
    torch.testing.assert_close(list(trainer.predict(labelled_batches())), expected, rtol=0, atol=0)
    assert_same(weights_of(trainer.model), own)
    outputs = trainer.predict(labelled_batches())
    next(outputs)
    with pytest.raises(RuntimeError, match="EMA: an evaluation or prediction has not ended"):
        trainer.train(6, 8)
    outputs.close()
    assert_same(weights_of(trainer.model), own)
    with pytest.raises(TypeError):
        list(trainer.predict([None]))
    assert_same(weights_of(trainer.model), own)
