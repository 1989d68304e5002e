"""``Trainer(...)``: a run in one call, from objects. Evaluations are in test_trainer_evaluation.py."""

import functools
import logging
import os
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from one_call import QUIET, Net, X, Y, one_call, points, trained, weights
from ranks import rows
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hookline
from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, Trainer
from hookline.hooks import CallbackHook, EarlyStopping, HookBase


@pytest.fixture
def make(tmp_path):
    return lambda *parts, folder="run", **options: one_call(tmp_path / folder, *parts, **options)


def test_it_trains_evaluates_and_predicts(make, tmp_path):
    assert hookline.Trainer is Trainer
    trainer = make(test=points(10, 1), metrics=["Accuracy"], length="10ep", lr=0.1, eval_period="5ep")
    result = trainer.train()
    assert (result.reason, result.iteration) == ("completed", 30)
    accuracy = result.metrics["test/accuracy"]
    assert trainer.evaluate() == {"test": {"accuracy": accuracy}}
    outputs = trainer.predict()
    assert outputs.shape == (10, 3)
    assert (outputs.argmax(1) == points(10, 1).tensors[1]).double().mean() == pytest.approx(accuracy)
    assert [row["iteration"] for row in rows(tmp_path / "run") if "test/accuracy" in row] == [14, 30]
    assert {"config.yaml", "log.txt", "model_final.pth"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert make(length=1, folder="b").evaluate(points(8))["test"]["loss"] == pytest.approx(1.1, abs=0.3)


def test_it_trains_as_a_config_does(make, tmp_path):
    names = {
        **{"MODEL.NAME": "MLP", "MODEL.ARGS": {"in_features": 8, "num_classes": 4}},
        **{"MODEL.LOSS.NAME": "CrossEntropyLoss", "DATASETS.TRAIN": [{"NAME": "synthetic", "ARGS": {"size": 40}}]},
        **{"DATALOADER.BATCH_SIZE": 8, "SOLVER.MAX_ITER": 7, "SOLVER.OPTIMIZER.NAME": "AdamW", "SOLVER.BASE_LR": 0.01},
        **{"SOLVER.LR_SCHEDULER_NAME": "ConstantLR", "SOLVER.WARMUP_ITERS": 0, "SEED": 3},
        "OUTPUT_DIR": str(tmp_path / "config"),
    }
    cfg = get_cfg()
    cfg.merge_from_list([part for pair in {**QUIET, **names}.items() for part in pair])
    by_config = trained(DefaultTrainer(cfg))
    model, data = {"NAME": "MLP", "ARGS": names["MODEL.ARGS"]}, {"NAME": "synthetic", "ARGS": {"size": 40}}
    call = trained(make(model, data, optimizer="AdamW", lr=0.01, loss="CrossEntropyLoss", length=7, seed=3))
    assert torch.equal(weights(call), weights(by_config))
    texts = [(tmp_path / folder / "config.yaml").read_text() for folder in ("config", "run")]
    assert texts[0].replace(str(tmp_path / "config"), "") == texts[1].replace(str(tmp_path / "run"), "")


# ---------------------------------------------------------------------------- forms of arguments


def net():
    torch.manual_seed(1)
    return Net()


def built(schedule=False):
    """Arguments that are objects: model and optimizer, and perhaps a schedule."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, **({"lr_scheduler": StepLR(optimizer, 2)} if schedule else {})}


ADAM = {"optimizer": "Adam", "lr": 0.05}
STEPS = {"NAME": "torch.optim.lr_scheduler:StepLR", "ARGS": {"step_size": 2}}
LOSS = {"NAME": nn.CrossEntropyLoss, "ARGS": {"label_smoothing": 0.0}}
# Each argument as a name first.
FORMS = {
    "optimizer": [
        lambda: ADAM,
        lambda: {**ADAM, "optimizer": torch.optim.Adam},
        lambda: {"optimizer": {"NAME": torch.optim.Adam, "ARGS": {"lr": 0.05}}},
        lambda: {"optimizer": functools.partial(torch.optim.Adam, lr=0.05)},
        built,
    ],
    "schedule": [
        lambda: {**ADAM, "lr_scheduler": STEPS},
        lambda: {**ADAM, "lr_scheduler": functools.partial(StepLR, step_size=2)},
        lambda: {**ADAM, "lr_scheduler": StepLR, "config": {"SOLVER.LR_SCHEDULER_ARGS.step_size": 2}},
        lambda: built(schedule=True),
    ],
    "loss": [
        lambda: {"loss": "CrossEntropyLoss"},
        lambda: {"loss": nn.CrossEntropyLoss},
        lambda: {"loss": nn.CrossEntropyLoss()},
        lambda: {"loss": functools.partial(nn.functional.cross_entropy, label_smoothing=0.0)},
        lambda: {"loss": LOSS},
        lambda: {"loss": None, "config": {"MODEL.LOSS.NAME": nn.CrossEntropyLoss}},
    ],
}


@pytest.mark.parametrize("argument", FORMS)
def test_all_forms_of_an_argument_train_to_the_same_weights(make, argument):
    found = []
    for form in FORMS[argument]:
        options = form()
        config = {"SOLVER.WEIGHT_DECAY": 0.0, **options.get("config", {})}
        trainer = make(**{"model": net(), **options, "test": points(8, 1), "config": config})
        results = trainer.train().metrics
        expected = nn.CrossEntropyLoss()(trainer.predict(), points(8, 1).tensors[1]).item()
        assert results["test/loss"] == pytest.approx(expected, abs=1e-6)
        found.append((trainer.optimizer.param_groups[0]["lr"], weights(trainer)))
    for rate, values in found[1:]:
        assert rate == pytest.approx(found[0][0])
        torch.testing.assert_close(values, found[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "data",
    [
        points(),
        functools.partial(points, seed=0),
        TensorDataset(X, Y),
        list(zip(X, Y, strict=True)),
        {"NAME": points, "ARGS": {"size": 24}},
        (X, Y),
        (X.numpy(), Y.numpy()),
        DataLoader(TensorDataset(X, Y), batch_size=8),
    ],
)
def test_forms_of_data(make, data):
    options = {"batch_size": None} if isinstance(data, DataLoader) else {}
    trainer = make(train=data, test=data, metrics=["Accuracy"], length="2ep", **options)
    assert trainer.train().iteration == 6
    assert trainer.predict(data).shape == (24, 3)
    assert trainer.cfg.DATALOADER.BATCH_SIZE == 8


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


def test_streams_with_and_without_a_length(make):
    trainer = make(train=Stream(), test=Stream(), config={"DATALOADER.ITERS_PER_EPOCH": 3}, length="2ep")
    assert trainer.train().iteration == 6
    assert trainer.predict().shape == (24, 3)
    trainer = make(train=DataLoader(Stream(), 8), test=DataLoader(Stream(), 8), length=5, batch_size=None, folder="b")
    assert (trainer.train().iteration, trainer.epoch) == (5, 1)


def test_hooks_by_name_class_and_object(make):
    seen = []

    class Counting(HookBase):
        def after_step(self):
            seen.append(self.trainer.iter)

    stopping, last = EarlyStopping("test/loss", patience=1, mode="min"), CallbackHook(after_train=seen.append)
    trainer = make(
        test=points(8, 1), eval_period=1, lr=0.0, hooks=[Counting, None, last, stopping, "GarbageCollection"]
    )
    assert "test/loss" in trainer.train().reason
    assert [one if isinstance(one, int) else "end" for one in seen] == [0, 1, "end"]
    assert trainer.find_hook(EarlyStopping) is stopping


def test_arguments_of_an_argument_and_other_keys_may_stand_in_a_config_or_a_file(make, tmp_path):
    trainer = make(optimizer=torch.optim.AdamW, config={"SOLVER.OPTIMIZER.ARGS": {"amsgrad": True}})
    assert trainer.optimizer.param_groups[0]["amsgrad"]
    args = {"MODEL.ARGS.hidden": 5, "MODEL.LOSS.ARGS.label_smoothing": 0.1, "SOLVER.LR_SCHEDULER_ARGS.step_size": 2}
    trainer = make(loss=nn.CrossEntropyLoss, lr_scheduler=StepLR, config=args)
    assert (trainer.model.layers[0].out_features, trainer.adapter.loss.label_smoothing) == (5, 0.1)
    assert trainer.cfg.SOLVER.LR_SCHEDULER_ARGS.step_size == 2
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.MAX_ITER", 4, "SOLVER.WEIGHT_DECAY", 0.5, "MODEL.DEVICE", "cpu"])
    cfg.freeze()
    path = tmp_path / "base.yaml"
    path.write_text("SOLVER: {MAX_ITER: 4, WEIGHT_DECAY: 0.5, WARMUP_ITERS: 2}\nMODEL: {DEVICE: cpu}\n")
    for config, warmup in ((cfg, 0), (path, 2)):
        trainer = Trainer(Net, points(), loss="CrossEntropyLoss", config=config, output_dir=tmp_path / "run", lr=0.1)
        solver = trainer.cfg.SOLVER
        assert (solver.MAX_ITER, solver.WEIGHT_DECAY, solver.BASE_LR) == (4, 0.5, 0.1)
        assert ("ConstantLR", warmup) == (solver.LR_SCHEDULER_NAME, solver.WARMUP_ITERS)
    assert cfg.SOLVER.LR_SCHEDULER_NAME == "WarmupMultiStepLR"


SETTINGS = {
    "weight_decay": (0.2, {"SOLVER.WEIGHT_DECAY": 0.2}),
    "warmup": ("1ep", {"SOLVER.WARMUP_ITERS": "1ep"}),
    "clip_norm": (1, {"SOLVER.CLIP_GRADIENTS": {"ENABLED": True, "CLIP_TYPE": "norm", "CLIP_VALUE": 1.0}}),
    "precision": ("bf16", {"SOLVER.AMP": {"ENABLED": True, "DTYPE": "bfloat16"}}),
    "accumulation_steps": (2, {"SOLVER.ACCUMULATION_STEPS": 2}),
    "num_workers": (1, {"DATALOADER.NUM_WORKERS": 1}),
    "ema": (0.9, {"HOOKS": [{"NAME": "EMA", "ARGS": {"decay": 0.9}}]}),
}


def test_settings_are_keys_of_the_config(make):
    keys = {key: value for _, pair in SETTINGS.values() for key, value in pair.items()}
    by_keys = trained(make(config=keys, test=points(8, 1)))
    trainer = trained(make(**{name: value for name, (value, _) in SETTINGS.items()}, test=points(8, 1), folder="b"))
    assert by_keys.cfg.diff(trainer.cfg).keys() == {"OUTPUT_DIR"}
    assert torch.equal(weights(trainer), weights(by_keys))
    assert trainer.storage.latest().keys() >= {"grad_norm", "test/loss"}


def test_a_setting_that_an_optimizer_has_itself_is_named_in_the_log(make, log):
    make(**built(), weight_decay=0.2)
    assert "SOLVER.WEIGHT_DECAY: 0.2 has no effect on" in log.text


def test_a_period_of_evaluations_without_test_data_is_named_in_the_log(make, log):
    make(eval_period="1ep", test=points(8, 1))
    assert "without test_data" not in log.text
    make(eval_period="1ep", folder="b")
    assert "Trainer(eval_period='1ep'): nothing is evaluated without test_data" in log.text


# ---------------------------------------------------------------------------- runs


def test_a_resumed_run_with_a_drawn_seed_ends_with_the_same_weights(make, tmp_path):
    options = {"optimizer": torch.optim.AdamW, "lr": 0.01, "length": "4ep", "config": {"SOLVER.CHECKPOINT_PERIOD": 4}}
    whole = trained(make(net(), seed=None, **options))
    seed = whole.cfg.SEED
    stop = CallbackHook(after_step=lambda trainer: trainer.iter == 4 and trainer.request_stop("half", 75))
    assert make(net(), seed=seed, folder="b", hooks=[stop], **options).train().reason == "half"
    # A new process does not know the seed of the run it resumes.
    resumed = make(net(), seed=None, folder="b", **options)
    assert resumed.train(resume=True).iteration == 12
    assert (resumed.start_iter, resumed.cfg.SEED) == (5, seed)
    assert torch.equal(weights(resumed), weights(whole))
    assert f"SEED: {seed}\n" in (tmp_path / "b" / "config.yaml").read_text()
    assert "Resuming with SEED" not in (tmp_path / "b" / "log.txt").read_text()


def test_a_run_continues_from_a_named_checkpoint_in_its_folder_or_in_another(make, tmp_path):
    options = {"optimizer": "AdamW", "length": 8, "seed": None, "config": {"SOLVER.CHECKPOINT_PERIOD": 2}}
    whole = trained(make(folder="a", **options))
    table = rows(tmp_path / "a")
    last = tmp_path / "a/last_checkpoint"
    broken = make(folder="a", hooks=[CallbackHook(after_step=lambda trainer: 1 / (trainer.iter - 4))], **options)
    with pytest.raises(ZeroDivisionError):
        broken.train(resume=tmp_path / "a/model_0000003.pth")
    assert (broken.start_iter, last.read_text()) == (4, "model_0000003.pth")  # for --resume
    for folder, path in (("a", "model_0000001.pth"), ("b", str(tmp_path / "a/model_0000001.pth"))):
        trainer = make(folder=folder, **options)
        assert trainer.train(resume=path).iteration == 8
        assert (trainer.start_iter, trainer.cfg.SEED) == (2, whole.cfg.SEED)
        assert torch.equal(weights(trainer), weights(whole))
    assert [row["loss"] for row in rows(tmp_path / "a")] == [row["loss"] for row in table]
    assert rows(tmp_path / "b")[0]["iteration"] == 2
    make(folder="c", **options).train()
    make(folder="c", **options).train(resume=tmp_path / "a/model_0000003.pth")
    assert (tmp_path / "c/previous_001/model_0000001.pth").exists()
    torch.save(whole.model.state_dict(), tmp_path / "weights.pth")
    for path, problem in (("nothing.pth", "no file"), (tmp_path / "weights.pth", "set MODEL.WEIGHTS to it")):
        with pytest.raises(ConfigError, match=problem):
            make(folder="a", **options).train(resume=path)


def test_a_run_of_length_0_evaluates_and_ends(make):
    result = make(test=points(8, 1), length=0).train()
    assert (result.iteration, result.reason) == (0, "completed")
    assert "test/loss" in result.metrics


def test_the_length_is_an_argument_and_max_iter_a_number(make):
    trainer = make()
    with pytest.raises(TypeError, match=r"called length, Trainer\(\.\.\., length='3ep'\)"):
        trainer.train(epochs=3)
    with pytest.raises(TypeError, match=r"called resume, train\(resume='last'\)"):
        trainer.train(ckpt_path="last")
    with pytest.raises(AttributeError, match=r"global_step.*iter"):
        _ = trainer.global_step
    for length in (100, "10ep", 1):
        with pytest.raises(ConfigError, match=rf"length={length!r}.*max_iter"):
            trainer.train(length)
    for length in ("20ep", -1, None, 1.5, True, float("nan")):
        with pytest.raises(ConfigError, match="max_iter"):
            trainer.max_iter = length


def test_trainers_leave_no_threads_files_or_handlers(make):
    def run(number):
        trainer = make(folder=f"run{number}")
        trainer.train()
        trainer.max_iter += 3
        assert trainer.train().iteration == 9
        handlers = [len(logging.getLogger(name).handlers) for name in ("hookline", "fvcore")]
        files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        return threading.active_count(), files, handlers

    before = run(0)
    assert [run(number) for number in range(1, 3)] == [before] * 2


def test_the_config_shows_objects_and_cannot_repeat_the_run(make, tmp_path):
    make(Net(), test=points(8, 1), optimizer=torch.optim.AdamW, hooks=[EarlyStopping("test/loss")]).train()
    path = tmp_path / "run" / "config.yaml"
    text = path.read_text()
    assert f"  NAME: <object {Net.__module__}.Net>\n" in text
    assert "- <object hookline.hooks.builtin.early_stopping.EarlyStopping>\n" in text
    cfg = get_cfg()
    cfg.merge_from_file(path)
    with pytest.raises(ConfigError, match=r"^MODEL.NAME: <object"):
        DefaultTrainer(cfg)


def test_weights_that_a_script_loads_itself_are_named_in_the_log(make, tmp_path, log):
    first = trained(make())
    log.clear()
    trainer, path = make(folder="second", seed=2), str(tmp_path / "run" / "model_final.pth")
    trainer.checkpointer.load(path, checkpointables=[])
    assert torch.equal(weights(trainer), weights(first))
    trainer.train()
    assert f"the model keeps the weights of {path}" in log.text
    assert "from scratch" not in log.text


# ---------------------------------------------------------------------------- batches of any kind


@dataclass
class Fields:
    """A batch of a person's own, as a graph's."""

    x: torch.Tensor
    label: torch.Tensor


class Opaque(SimpleNamespace):
    """A batch of which only the model knows what is in it."""


def stacked(samples):
    x, y = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y)


COLLATE = {
    "dataclass": lambda samples: Fields(*stacked(samples)),
    "object": lambda samples: Opaque(x=stacked(samples)[0], label=stacked(samples)[1]),
    "constants": lambda samples: dict(zip(("x", "label", "scales"), (*stacked(samples), [1.0] * 8), strict=True)),
    "list of dicts": lambda samples: [{"x": x, "label": y} for x, y in samples],
    "time first": lambda samples: (stacked(samples)[0].T, stacked(samples)[1]),
    "nested": lambda samples: (torch.nested.nested_tensor([x for x, _ in samples]), stacked(samples)[1]),
}


class OfAny(Net):
    """Returns its own loss for any of these batches."""

    def forward(self, batch):
        if isinstance(batch, list):
            x, y = stacked([(one["x"], one["label"]) for one in batch])
        elif isinstance(batch, tuple):
            x = batch[0].to_padded_tensor(0.0) if batch[0].is_nested else batch[0]
            x, y = (x.T if len(x) == 4 and x.shape[1] != 4 else x), batch[1]
        else:
            x, y = (batch["x"], batch["label"]) if isinstance(batch, dict) else (batch.x, batch.label)
        return {"loss": nn.functional.cross_entropy(self.layers[0](x)[:, :3], y)}


@pytest.mark.parametrize("kind", COLLATE)
def test_any_batch_is_counted_and_cut_by_its_samples(make, kind):
    samples = list(zip(*points(23).tensors, strict=True))
    config = {"DATALOADER.COLLATE_FN": COLLATE[kind], "SOLVER.OPTIMIZER.NAME": "SGD"}
    found = []
    for parts in (1, 3):
        trainer = make(
            OfAny, samples, samples, loss=None, metrics=["Loss"], config={**config, "SOLVER.ACCUMULATION_STEPS": parts}
        )
        metric = trainer.train().metrics["test/loss"]
        scores = trainer.model.layers[0](points(23).tensors[0])[:, :3]
        assert metric == pytest.approx(nn.functional.cross_entropy(scores, points(23).tensors[1]).item(), rel=1e-5)
        found.append(weights(trainer))
    torch.testing.assert_close(*found)


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3))

    def forward(self, x):
        return self.layers(x)


def test_lazy_modules_get_their_weights_from_a_batch_and_are_resumed(make):
    config = {"HOOKS": [{"NAME": "EMA", "ARGS": {"decay": 0.9}}], "SOLVER.WEIGHT_DECAY_NORM": 0.0}
    whole = trained(make(Lazy, optimizer="AdamW", lr=0.1, config=config, folder="whole"))
    trained(make(Lazy, optimizer="AdamW", lr=0.1, config=config, length=3))
    resumed = make(Lazy, optimizer="AdamW", lr=0.1, config=config)
    resumed.train(resume=True)
    assert torch.equal(weights(resumed), weights(whole))


class LossAlone(Trainer):
    def forward(self, batch):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1], ignore_index=0)


class Logits(Trainer):
    def forward(self, batch):
        return self.model(batch[0])


@pytest.mark.parametrize("parts", [1, 2])
def test_forward_of_a_subclass_may_return_one_loss_alone(tmp_path, parts):
    def run(kind, **options):
        options |= {"accumulation_steps": parts, "output_dir": tmp_path / kind.__name__}
        return weights(trained(kind(Net, points, length=6, batch_size=8, seed=1, config=QUIET, **options)))

    torch.testing.assert_close(run(LossAlone), run(Trainer, loss=nn.CrossEntropyLoss(ignore_index=0)))
    with pytest.raises(ConfigError, match=r"must return its losses.*It returned a float32 tensor \(\d, 3\)"):
        run(Logits)
