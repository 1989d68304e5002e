"""A step of SimpleTrainer: what it computes, what it puts into the storage, and methods of a subclass."""

import pytest
import torch
from small_runs import Net, batches, net_trainer, same
from torch import nn

from hookline.config import ConfigError
from hookline.engine import AMPTrainer, SimpleTrainer, comm
from hookline.engine.modeling import ModelAdapter
from hookline.hooks import CallbackHook, get_event_storage


def by_hand(steps, dtype=None):
    torch.manual_seed(0)
    model, data = Net(3, 2), batches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(steps):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(data[i % len(data)])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_step_equals_a_handwritten_step(dtype):
    trainer = net_trainer(cls=AMPTrainer if dtype else SimpleTrainer, precision=dtype)
    assert trainer.grad_scaler is None
    trainer.train(0, 6)
    assert same(trainer.model.state_dict(), by_hand(6, dtype))


def test_a_batch_may_be_cut_into_more_parts_than_it_has_samples():
    whole, cut = net_trainer(batches(2, size=7)), net_trainer(batches(2, size=7), accumulation_steps=9)
    results = [trainer.train(0, 4) for trainer in (whole, cut)]
    torch.testing.assert_close(cut.model.state_dict(), whole.model.state_dict())
    assert results[0].metrics["loss"] == pytest.approx(results[1].metrics["loss"])


def test_several_optimizers_are_stepped_together_and_share_no_parameter():
    model = Net(3, 2)
    fc, before = model.fc, [value.clone() for value in model.state_dict().values()]
    SimpleTrainer(model, batches(), [torch.optim.SGD([fc.weight], 0.1), torch.optim.AdamW([fc.bias], 0.01)]).train(0, 3)
    assert not any(map(torch.equal, before, model.state_dict().values()))
    with pytest.raises(ValueError, match="share a parameter"):
        SimpleTrainer(model, batches(), [torch.optim.SGD([fc.bias], 0.1), torch.optim.SGD([fc.bias], 0.1)])


@pytest.mark.parametrize("cls", [SimpleTrainer, AMPTrainer])
@pytest.mark.parametrize("async_write_metrics", [False, True])
def test_the_storage_has_every_loss_and_a_nan_is_an_error_in_its_own_step(cls, async_write_metrics):
    options = {"precision": torch.bfloat16} if cls is AMPTrainer else {}
    poisoned = [*batches(6), torch.full((4, 3), float("nan")), *batches(6)]
    trainer = net_trainer(poisoned, cls, async_write_metrics=async_write_metrics, **options)
    with pytest.raises(FloatingPointError, match="iteration 6"):
        trainer.train(0, 9)
    assert [iteration for _, iteration in trainer.storage.history("loss").values()][:6] == list(range(6))
    assert all(p.isfinite().all() and p.dtype == torch.float32 for p in trainer.model.parameters())


def test_losses_are_gathered_at_a_period():
    trainer = net_trainer(gather_metric_period=4)
    trainer.train(0, 12)
    assert [iteration for _, iteration in trainer.storage.history("loss").values()] == [3, 7, 11]


def test_no_step_waits_for_the_device():
    # Tensors on "meta" have no values, and reading one is an error. Only the end of the run reads some.
    clip = lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0)  # noqa: E731
    trainer = net_trainer([batch.to("meta") for batch in batches()], device="meta", clip_gradients=clip)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        trainer.train(0, 6)
    assert trainer.finished_iter == 5


def test_modules_among_the_attributes_are_moved_to_the_device():
    trainer = net_trainer(device="meta")
    trainer.metric = nn.Linear(1, 1)
    with pytest.raises(RuntimeError):  # losses on the meta device have no values
        trainer.train(0, 1)
    assert trainer.metric.weight.is_meta
    trainer.metric = nn.Linear(1, 1)
    trainer.predict([])  # also without training
    assert trainer.metric.weight.is_meta


class Skips(nn.Module):
    """Skips batches whose first number is negative."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)

    def train_step(self, x):
        return None if x[0, 0] < 0 else self.layer(x).square().mean()


def test_a_train_step_that_returns_none_skips_its_batch(caplog):
    good, bad = torch.rand(4, 2), -torch.rand(4, 2)

    def weight(batches, steps, **options):
        model = Skips()
        trainer = SimpleTrainer(model, batches, torch.optim.SGD(model.parameters(), 0.1), **options)
        trainer.train(0, steps)
        assert trainer.iter == steps
        return model.layer.weight

    expected = weight([good], 1)
    assert torch.equal(weight([bad, good, bad], 3), expected)
    assert [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()] == [
        "train_step() returned None at iteration 0: such batches are skipped"
    ]
    torch.testing.assert_close(weight([torch.cat([good, bad])], 1, accumulation_steps=2), expected)
    with pytest.raises(FloatingPointError, match=r"returned None.*NONFINITE_LIMIT"):
        weight([bad], 5, nonfinite_limit=3)


def test_predict_yields_outputs_in_eval_mode_and_emits_events():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer, events = torch.optim.SGD(model.parameters(), 0.1), []
    trainer = SimpleTrainer(model, batches(), optimizer, adapter=ModelAdapter(nn.CrossEntropyLoss()))
    names = ("before_predict", "on_predict_end", "after_predict")
    trainer.register_hooks([CallbackHook(**{name: lambda t, *args, name=name: events.append(name) for name in names})])
    trainer.register_hooks([CallbackHook(after_predict=lambda trainer, results: events.append(results))])
    outputs = list(trainer.predict(batches(3)))
    assert model.training
    assert not outputs[0].requires_grad
    model.eval()
    assert all(torch.equal(out, model(x)) for out, x in zip(outputs, batches(3), strict=True))
    assert events == [*names, {"batches": 3}]


def test_a_batch_on_the_cpu_is_predicted_as_it_is():
    batch = type("Batch", (list,), {})(batches(2))
    [(given, outputs)] = net_trainer(device="cpu").predict([batch], with_batches=True, predict=lambda model, x: x[1])
    assert given is batch
    assert outputs is batch[1]


def test_gather_and_print_of_one_process(capsys, monkeypatch):
    trainer = net_trainer()
    assert torch.equal(trainer.gather(torch.tensor(2.0)), torch.tensor([2.0]))
    gathered = trainer.gather({"x": torch.ones(2, 3), "ids": ["a"]})
    assert (gathered["x"].shape, gathered["ids"]) == ((2, 3), ["a"])
    trainer.print("hello", 1, sep="-")
    monkeypatch.setattr(comm, "get_rank", lambda: 1)
    trainer.print("again")
    assert capsys.readouterr().out == "hello-1\n"


def test_the_state_of_a_trainer_of_detectron2_is_refused():
    trainer = net_trainer()
    inner = {"iteration": 4, "optimizer": trainer.optimizer.state_dict()}
    with pytest.raises(ConfigError, match=r"detectron2.*MODEL\.WEIGHTS"):
        trainer.load_state_dict({"iteration": 4, "hooks": {}, "_trainer": inner})


def test_a_model_left_in_eval_mode_by_a_hook_is_an_error():
    trainer = net_trainer(hooks=[CallbackHook(after_step=lambda trainer: trainer.model.eval() and None)])
    with pytest.raises(AssertionError, match="eval mode"):
        trainer.train(0, 3)
    assert trainer.iter == 1


def test_a_model_that_was_evaluated_between_two_calls_trains():
    modes = []
    note = CallbackHook(before_step=lambda t: modes.extend(module.training for module in t.model.modules()))
    trainer = net_trainer(hooks=[note])
    trainer.train(0, 1)
    trainer.model.eval()
    trainer.train(1, 2)
    next(trainer.model.children()).eval()
    trainer.train(2, 3)
    assert sorted(modes) == [False] + [True] * (len(modes) - 1)


# ---------------------------------------------------------------------------- methods and parts of a subclass


def test_a_subclass_that_sets_its_parts_itself_is_completed():
    class Bare(SimpleTrainer):
        def __init__(self, model, loader, optimizer):
            self.model, self.data_loader, self.optimizer = model, loader, optimizer

    model = Net(3, 2)
    trainer = Bare(model, batches(2), torch.optim.SGD(model.parameters(), 0.1))
    before = trainer.model.fc.weight.clone()
    assert trainer.train(0, 3).iteration == 3
    assert not torch.equal(trainer.model.fc.weight, before)
    assert (trainer.epoch, trainer.iters_per_epoch) == (1, 2)


class Old(SimpleTrainer):
    """Written for early versions of detectron2."""

    written, checked = (), ()

    def _write_metrics(self, metrics_dict: dict):
        self.written = (*self.written, sorted(metrics_dict))
        super()._write_metrics(metrics_dict)

    def _detect_anomaly(self, losses, loss_dict):
        self.checked = (*self.checked, self.iter)

    def run_step(self):
        losses = self.model(next(self._data_loader_iter))
        self._detect_anomaly(sum(losses.values()), losses)
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        self._write_metrics({**losses, "data_time": 0.5, "boxes": 3})
        self.optimizer.step()


def test_methods_of_early_versions_are_called():
    trainer = net_trainer(cls=Old)
    trainer.train(0, 3)
    assert trainer.checked == (0, 1, 2)
    assert trainer.written == (["boxes", "data_time", "loss"],) * 3
    assert {"loss", "total_loss"} <= set(trainer.storage.histories())
    assert trainer.storage.history("data_time").latest() == 0.5
    assert trainer.storage.history("boxes").latest() == 3


class OwnWrite(SimpleTrainer):
    @staticmethod
    def write_metrics(loss_dict, data_time, cur_iter=None, prefix=""):
        get_event_storage().put_scalar(prefix + "own", sum(loss_dict.values()), cur_iter=cur_iter)


def test_a_write_metrics_of_ones_own_is_called_as_in_detectron2():
    trainer = net_trainer(cls=OwnWrite)
    trainer.train(0, 3)
    assert [iteration for _, iteration in trainer.storage.history("own").values()] == [0, 1, 2]


class Tolerant(SimpleTrainer):
    seen = ()

    def _detect_anomaly(self, losses, loss_dict):
        self.seen = (*self.seen, (losses.item(), {name: loss.item() for name, loss in loss_dict.items()}))
        if losses.item() > 1e6:
            super()._detect_anomaly(losses * torch.inf, loss_dict)


class TwoLosses(Net):
    """Its gradients are finite, whatever is added to its losses."""

    added = 0.0

    def forward(self, x):
        return {"a": super().forward(x)["loss"] + self.added, "b": self.fc(x).abs().mean()}


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"gather_metric_period": 2}])
def test_a_trainers_own_check_of_the_losses_replaces_ours(options, monkeypatch):
    def make():
        model = TwoLosses(3, 2)
        return Tolerant(model, batches(), torch.optim.SGD(model.parameters(), 1e-3), **options)

    trainer = make()
    trainer.train(0, 3)
    assert [total for total, _ in trainer.seen] == pytest.approx([sum(losses.values()) for _, losses in trainer.seen])
    assert [sorted(losses) for _, losses in trainer.seen] == [["a", "b"]] * 3
    monkeypatch.setattr(TwoLosses, "added", torch.inf)
    trainer = make()
    with pytest.raises(FloatingPointError, match="iteration 0"):
        trainer.train(0, 3)
    monkeypatch.setattr(Tolerant, "_detect_anomaly", lambda self, losses, loss_dict: None)
    assert trainer.train(0, 3).iteration == 3
