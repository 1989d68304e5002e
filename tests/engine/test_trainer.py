import functools
import gc
import json
import logging
import os
import re
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hookline
from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, Trainer, default_setup
from hookline.engine.data import ArrayDataset
from hookline.engine.evaluation import MeanMetric
from hookline.engine.program.look import looking
from hookline.hooks import CallbackHook, EarlyStopping, HookBase

QUIET = {"MODEL.DEVICE": "cpu", "LOG.WRITERS": ["JSONWriter"], "LOG.PERIOD": 1, "LOG.PROGRESS_BAR": False}


@pytest.fixture(autouse=True)
def logging_is_put_back():
    loggers = [logging.getLogger(name) for name in ("hookline", "fvcore")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, 3))

    def forward(self, x):
        return self.layers(x)


class OwnLoss(Net):
    def forward(self, batch):
        outputs = self.layers(batch[0])
        return {"cls": nn.functional.cross_entropy(outputs, batch[1])} if self.training else outputs


def points(size=24, seed=0):
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return ArrayDataset(x, x[:, :3].argmax(1))


@pytest.fixture
def make(tmp_path):
    def make(model=Net, train=points, test=None, folder="run", config=None, **options):
        given = {"loss": nn.CrossEntropyLoss(), "length": 6, "batch_size": 8, "seed": 1, **options}
        return Trainer(model, train, test, output_dir=tmp_path / folder, config={**QUIET, **(config or {})}, **given)

    return make


def weights(trainer):
    return torch.cat([value.flatten() for value in trainer.model.state_dict().values()])


def test_it_trains_evaluates_and_predicts(make, tmp_path):
    trainer = make(test=points(10, 1), metrics=["Accuracy"], length="10ep", lr=0.1, eval_period="5ep")
    result = trainer.train()
    assert result.reason == "completed"
    assert result.iteration == 30
    accuracy = result.metrics["test/accuracy"]
    assert trainer.evaluate() == {"test": {"accuracy": accuracy}}
    outputs = trainer.predict()
    assert outputs.shape == (10, 3)
    assert (outputs.argmax(1) == points(10, 1).tensors[1]).double().mean() == pytest.approx(accuracy)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.json").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "test/accuracy" in row] == [14, 30]
    assert {"config.yaml", "log.txt", "model_final.pth"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_it_is_exported_at_the_top():
    assert hookline.Trainer is Trainer
    assert issubclass(Trainer, DefaultTrainer)
    with pytest.raises(AttributeError, match="Trainr"):
        hookline.Trainr  # noqa: B018


def test_it_trains_as_a_config_does(make, tmp_path):
    names = {
        "MODEL.NAME": "MLP",
        "MODEL.ARGS": {"in_features": 8, "num_classes": 4},
        "MODEL.LOSS.NAME": "CrossEntropyLoss",
        "DATASETS.TRAIN": [{"NAME": "synthetic", "ARGS": {"size": 40}}],
        "DATALOADER.BATCH_SIZE": 8,
        "SOLVER.MAX_ITER": 7,
        "SOLVER.OPTIMIZER.NAME": "AdamW",
        "SOLVER.BASE_LR": 0.01,
        "SOLVER.LR_SCHEDULER_NAME": "ConstantLR",
        "SOLVER.WARMUP_ITERS": 0,
        "SEED": 3,
        "OUTPUT_DIR": str(tmp_path / "config"),
    }
    cfg = get_cfg()
    cfg.merge_from_list([part for pair in {**QUIET, **names}.items() for part in pair])
    by_config = DefaultTrainer(cfg)
    by_config.train()
    call = make(
        {"NAME": "MLP", "ARGS": names["MODEL.ARGS"]},
        {"NAME": "synthetic", "ARGS": {"size": 40}},
        optimizer="AdamW",
        lr=0.01,
        loss="CrossEntropyLoss",
        length=7,
        seed=3,
    )
    call.train()
    assert torch.equal(weights(call), weights(by_config))
    texts = [(tmp_path / folder / "config.yaml").read_text() for folder in ("config", "run")]
    assert texts[0].replace(str(tmp_path / "config"), "") == texts[1].replace(str(tmp_path / "run"), "")


def adam(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr)


@pytest.mark.parametrize(
    "optimizer",
    [
        "Adam",
        torch.optim.Adam,
        {"NAME": torch.optim.Adam, "ARGS": {"lr": 0.05}},
        functools.partial(torch.optim.Adam, lr=0.05),
        adam,
        "object",
    ],
)
def test_forms_of_an_optimizer(make, optimizer):
    torch.manual_seed(0)
    model, options = Net(), {"lr": 0.05}
    if optimizer == "object":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if not isinstance(optimizer, str | type) and optimizer is not adam:
        options = {}
    trainer = make(model, optimizer=optimizer, config={"SOLVER.WEIGHT_DECAY": 0.0001}, **options)
    assert trainer.cfg.SOLVER.BASE_LR == 0.05
    before = weights(trainer)
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.Adam)
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.05}
    assert not torch.equal(weights(trainer), before)


def test_an_optimizer_whose_step_needs_a_closure_is_refused_as_an_object_too(make, tmp_path):
    model = Net()
    with pytest.raises(ConfigError, match="LBFGS calls the model several times in a step"):
        make(model, optimizer=torch.optim.LBFGS(model.parameters()))
    assert list(tmp_path.iterdir()) == []


def test_rules_for_parameters_have_no_effect_on_an_optimizer_that_exists(make, log):
    model = Net()
    rules = {"SOLVER.PARAM_GROUPS": [{"PARAMS": "layers", "LR_FACTOR": 0.1}]}
    trainer = make(model, optimizer=torch.optim.Adam(model.parameters()), config=rules)
    assert len(trainer.optimizer.param_groups) == 1
    assert "SOLVER.PARAM_GROUPS: [{" in log.text
    assert "has no effect on" in log.text


@pytest.mark.parametrize(
    "schedule",
    [
        "WarmupCosineLR",
        {"NAME": "torch.optim.lr_scheduler:StepLR", "ARGS": {"step_size": "1ep"}},
        functools.partial(StepLR, step_size=2),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    ],
)
def test_forms_of_a_schedule(make, schedule, tmp_path):
    make(lr_scheduler=schedule, lr=0.1).train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.json").read_text().splitlines()]
    rates = [row["lr"] for row in rows]
    assert rates[0] == 0.1
    assert rates[-1] < 0.1


def test_a_schedule_of_an_optimizer_that_exists(make):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make(model, optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    trainer.train()
    assert trainer.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == 0.5**6


@pytest.mark.parametrize(
    "loss",
    [
        "CrossEntropyLoss",
        nn.CrossEntropyLoss,
        nn.CrossEntropyLoss(),
        nn.functional.cross_entropy,
        functools.partial(nn.functional.cross_entropy, label_smoothing=0.0),
        {"NAME": nn.CrossEntropyLoss, "ARGS": {"label_smoothing": 0.0}},
    ],
)
def test_forms_of_a_loss(make, loss):
    trainer = make(loss=loss, test=points(8, 1))
    results = trainer.train().metrics
    assert results["loss"] < 2
    assert results["test/loss"] == pytest.approx(
        nn.functional.cross_entropy(trainer.predict(), points(8, 1).tensors[1]).item(), abs=1e-6
    )


@pytest.mark.parametrize("optimizer", ["AdamW", torch.optim.AdamW, {"NAME": "AdamW", "ARGS": {"lr": 0.1}}])
def test_arguments_of_an_argument_may_stand_in_the_config(make, optimizer):
    trainer = make(optimizer=optimizer, config={"SOLVER.OPTIMIZER.ARGS": {"amsgrad": True}})
    assert type(trainer.optimizer) is torch.optim.AdamW
    assert trainer.optimizer.param_groups[0]["amsgrad"]
    args = {"MODEL.ARGS.hidden": 5, "MODEL.LOSS.ARGS.label_smoothing": 0.1, "SOLVER.LR_SCHEDULER_ARGS.step_size": 2}
    trainer = make(loss=nn.CrossEntropyLoss, lr_scheduler=StepLR, config=args)
    assert trainer.model.layers[0].out_features == 5
    assert trainer.adapter.loss.label_smoothing == 0.1
    assert trainer.cfg.SOLVER.LR_SCHEDULER_ARGS.step_size == 2


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"optimizer": "AdamW"}, "SOLVER.OPTIMIZER.ARGS.amsgrd", r"AdamW takes no argument 'amsgrd'; .* 'amsgrad'"),
        ({"lr_scheduler": StepLR}, "SOLVER.LR_SCHEDULER_ARGS.gama", r"StepLR takes no argument 'gama'; .* 'gamma'"),
        ({"loss": nn.CrossEntropyLoss}, "MODEL.LOSS.ARGS.label", r"CrossEntropyLoss takes no argument 'label'"),
        ({}, "MODEL.ARGS.hiden", r"Net takes no argument 'hiden'; did you mean 'hidden'"),
        ({"model": Net()}, "MODEL.ARGS.hidden", r"Trainer\(model=...\): an object is built already, .*MODEL.ARGS"),
        (
            {"optimizer": functools.partial(torch.optim.AdamW, amsgrad=True)},
            "SOLVER.OPTIMIZER.ARGS.amsgrad",
            r"Trainer\(optimizer=...\): amsgrad is given here, and as SOLVER.OPTIMIZER.ARGS.amsgrad in the config",
        ),
        ({"lr": 0.1, "optimizer": "AdamW"}, "SOLVER.OPTIMIZER.ARGS.lr", "give one of them"),
    ],
)
def test_arguments_in_the_config_that_do_not_fit_are_errors(make, options, key, message):
    with pytest.raises(ConfigError, match=message):
        make(**options, config={key: 3})


def test_arguments_of_another_component_in_the_config_are_not_used(make, caplog):
    other = {"MODEL.NAME": "ConvNet", "MODEL.ARGS.width": 8}
    assert type(make(config=other).model) is Net
    assert "ConvNet of the config, and its arguments, are not used" in caplog.text


class Collator:
    def __call__(self, samples):
        return tuple(map(torch.stack, zip(*samples, strict=True)))


def collate(samples):
    return Collator()(samples)


@pytest.mark.parametrize(
    "config",
    [
        {"DATALOADER.COLLATE_FN": collate},
        {"DATALOADER.COLLATE_FN": Collator()},
        {"DATALOADER": {"COLLATE_FN": {"NAME": Collator}}},
        {"DATALOADER.SAMPLER_TRAIN": lambda size: range(size)},
        {"MODEL.INPUT_FUNCTION": lambda batch: batch, "LOG.TRAIN_METRICS": [lambda scores, y: 0.5]},
        {"SOLVER.OPTIMIZER": torch.optim.Adam, "SOLVER.LR_SCHEDULER_NAME": functools.partial(StepLR, step_size=2)},
        {"HOOKS": [{"NAME": EarlyStopping, "ARGS": {"metric": "loss", "period": 1, "patience": 9}}, CallbackHook()]},
    ],
)
def test_objects_in_the_config(make, config):
    assert make(config=config).train().iteration == 6


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss(), nn.CrossEntropyLoss])
@pytest.mark.parametrize("key", ["MODEL.LOSS", "MODEL.LOSS.NAME"])
def test_a_loss_in_the_config(make, loss, key):
    expected = make(folder="a").train().metrics["loss"]
    assert make(loss=None, config={key: loss}, folder="b").train().metrics["loss"] == expected


def test_an_object_where_the_config_needs_a_value_is_an_error(make):
    with pytest.raises(ConfigError, match=r"SOLVER.GAMMA: a config cannot hold torch.float32"):
        make(config={"SOLVER.GAMMA": torch.float32})


class LogitsAndLoss(Net):
    def forward(self, x, targets=None):
        logits = self.layers(x)
        return logits, None if targets is None else nn.functional.cross_entropy(logits, targets)


def test_a_model_that_returns_logits_and_loss(make):
    trainer = make(LogitsAndLoss, loss=None, test=points(10, 1), metrics=["Loss", "Accuracy"])
    results = trainer.train().metrics
    found = trainer.predict(metrics=True)
    assert found.outputs.shape == (10, 3)
    expected = nn.functional.cross_entropy(found.outputs, points(10, 1).tensors[1]).item()
    assert found.metrics["loss"] == results["test/loss"] == pytest.approx(expected)


def test_a_loss_of_several_terms(make):
    def loss(scores, y):
        return {"ce": nn.functional.cross_entropy(scores, y), "small": scores.square().mean()}

    results = make(loss=loss, test=points(8, 1)).train().metrics
    assert results["total_loss"] == pytest.approx(results["ce"] + results["small"])
    assert results["test/loss"] > 0


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*points().tensors, strict=True)


@pytest.mark.parametrize(
    "data",
    [
        points(),
        points,
        functools.partial(points, seed=0),
        TensorDataset(*points().tensors),
        list(zip(*points().tensors, strict=True)),
        {"NAME": points, "ARGS": {"size": 24}},
        points().tensors,
        tuple(tensor.numpy() for tensor in points().tensors),
        DataLoader(TensorDataset(*points().tensors), batch_size=8),
    ],
)
def test_forms_of_data(make, data):
    options = {"batch_size": None} if isinstance(data, DataLoader) else {}
    trainer = make(train=data, test=data, metrics=["Accuracy"], length="2ep", **options)
    assert trainer.train().iteration == 6
    assert trainer.predict(data, stream=False).shape == (24, 3)
    assert trainer.cfg.DATALOADER.BATCH_SIZE == 8


def test_the_first_batches_of_a_loader(make):
    loader = DataLoader(points(), batch_size=8, collate_fn=ArrayDataset.collate_fn)
    limits = {"DATALOADER.LIMIT_TRAIN_BATCHES": 2, "DATALOADER.LIMIT_TEST_BATCHES": 1}
    trainer = make(train=loader, test=loader, batch_size=None, length="3ep", config=limits)
    assert trainer.train().iteration == 6
    assert trainer.predict().shape == (8, 3)


def test_a_trial_run_writes_nothing(make, tmp_path):
    loader = DataLoader(points(), batch_size=8, collate_fn=ArrayDataset.collate_fn)
    trainer = make(train=loader, test=loader, batch_size=None, length="3ep", config={"FAST_DEV_RUN": 2})
    assert trainer.train().iteration == 2
    assert list(tmp_path.iterdir()) == []


def test_an_iterable_data_set(make):
    trainer = make(train=Stream(), test=Stream(), config={"DATALOADER.ITERS_PER_EPOCH": 3}, length="2ep")
    trainer.train()
    assert trainer.predict().shape == (24, 3)


def test_a_model_with_its_own_loss_trains_with_its_instance(make):
    model = OwnLoss()
    trainer = make(model, loss=None, test=points(8, 1))
    assert trainer.model is model
    results = trainer.train().metrics
    assert results["cls"] < 2
    assert results["test/loss"] < 2
    assert trainer.predict().shape == (8, 3)


def test_hooks_by_name_class_and_object(make):
    seen = []

    class Counting(HookBase):
        def after_step(self):
            seen.append(self.trainer.iter)

    stopping = EarlyStopping("test/loss", patience=1, mode="min")
    trainer = make(
        test=points(8, 1),
        eval_period=1,
        lr=0.0,
        hooks=[
            Counting,
            None,
            CallbackHook(after_train=lambda trainer: seen.append("end")),
            stopping,
            "GarbageCollection",
        ],
    )
    result = trainer.train()
    assert "EarlyStopping" in result.reason or "test/loss" in result.reason
    assert seen == [0, 1, "end"]
    assert stopping in trainer._hooks


def share(predictions, targets):
    return {"share": (predictions.argmax(1) == targets).double().mean().item()}


def test_functions_as_metrics(make):
    metrics = [share, "Accuracy", {"NAME": "Accuracy", "ARGS": {"top_k": 2}, "AS": "top2"}]
    trainer = make(test=points(8, 1), metrics=metrics)
    results = trainer.evaluate()["test"]
    assert results["share"] == results["accuracy"] <= results["top2"]
    assert make(test=points(8, 1), metrics={"mine": lambda p, t: 0.5}).evaluate() == {"test": {"mine": 0.5}}


def test_several_test_sets(make):
    metrics = {"acc": "Accuracy", "mse": MeanSquaredErrorOfScores}
    trainer = make(test={"near": points(8, 1), "far": points(8, 2)}, metrics=metrics)
    assert trainer.evaluate().keys() == {"near", "far"}
    assert trainer.predict("far").shape == (8, 3)
    assert trainer.evaluate("near").keys() == {"near"}
    assert trainer.evaluate({"other": points(8, 3)})["other"].keys() == {"acc", "mse"}
    with pytest.raises(ConfigError, match=r"pass one data set; the test data is near, far"):
        trainer.predict()


class MeanSquaredErrorOfScores(MeanMetric):
    def update(self, preds, target):
        self.add((preds - nn.functional.one_hot(target, 3)).square().sum(), preds.numel())


def test_other_data_leaves_early_stopping_and_results_alone(make):
    seen = []
    listener = CallbackHook(
        after_eval=lambda trainer, results: seen.append(results), before_eval=lambda trainer: seen.append("before")
    )
    trainer = make(test=points(8, 1), hooks=[listener])
    trainer.evaluate(points(4, 3))
    assert seen == ["before"]
    results = trainer.evaluate()
    assert seen == ["before", "before", results]


def test_an_evaluation_outside_of_training_leaves_the_run_alone(make, caplog):
    stopping = EarlyStopping("test/loss", patience=2, mode="min")
    trainer = make(
        test=points(8, 1),
        metrics=None,
        hooks=[stopping],
        monitor="test/loss",
        eval_period=2,
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        config={"SOLVER.LR_SCHEDULER_INTERVAL": "evaluation"},
    )
    trainer.evaluate()
    trainer.train()
    before = stopping.best, stopping.count, trainer.optimizer.param_groups[0]["lr"]
    for _ in range(3):
        trainer.evaluate()
    assert (stopping.best, stopping.count, trainer.optimizer.param_groups[0]["lr"]) == before
    assert "BestCheckpointer watches" not in caplog.text


@pytest.mark.parametrize("length", ["20ep", -1, None, 1.5, True, float("nan")])
def test_a_length_that_is_no_number_of_iterations_is_an_error(make, length):
    trainer = make()
    with pytest.raises(ConfigError, match=r"max_iter: expected a number of iterations, not .*iters_per_epoch"):
        trainer.max_iter = length


def test_predictions_with_targets_and_metrics(make):
    trainer = make(metrics=["Accuracy"])
    data = points(10, 1)
    found = trainer.predict(data, targets=True, metrics=True)
    assert torch.equal(found.targets, data.tensors[1])
    assert found.metrics == trainer.evaluate(data)["test"]
    batches = list(trainer.predict(data, stream=True, targets=True))
    assert [len(outputs) for outputs, _ in batches] == [8, 2]
    assert torch.equal(torch.cat([outputs for outputs, _ in batches]), found.outputs)
    with pytest.raises(ConfigError, match="stream"):
        trainer.predict(data, stream=True, metrics=True)


def error_rate(predictions, targets):
    return (predictions.argmax(1) != targets).float().mean()


def test_metrics_of_functions_and_of_the_models_own_loss(make):
    trainer = make(OwnLoss, test=points(10, seed=1), loss=None, metrics=["Loss", error_rate, "Accuracy"])
    results = trainer.train().metrics
    found = trainer.predict(metrics=True).metrics
    assert found == {name: results[f"test/{name}"] for name in ("loss", "error_rate", "accuracy")}
    assert found["error_rate"] == pytest.approx(1 - found["accuracy"])


def test_outputs_in_dicts_and_lists(make):
    class Several(Net):
        def forward(self, x):
            return {"logits": self.layers(x), "words": ["a"] * len(x), "extra": (x, x)}

    trainer = make(Several)
    outputs = trainer.predict([(x, 0) for x in points(10).tensors[0]])
    assert outputs.shape == (10, 3)  # a loss of torch takes the logits
    trainer = make(Several, loss=lambda outputs, y: outputs["logits"].sum(), folder="b")
    outputs = trainer.predict(points(10))
    assert outputs["logits"].shape == (10, 3)
    assert outputs["words"] == ["a"] * 10
    assert outputs["extra"][1].shape == (10, 4)
    assert trainer.predict(points(10), ignore_keys=["words", "extra"]).shape == (10, 3)


@dataclass
class Output:
    """As transformers' ``ModelOutput``."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None


class Labeled(Net):
    def forward(self, x, labels=None):
        logits = self.layers(x)
        return Output(logits, None if labels is None else nn.functional.cross_entropy(logits, labels))


def test_the_loss_beside_outputs_is_no_prediction(make):
    data = [{"x": x, "labels": y} for x, y in zip(*points().tensors, strict=True)]
    trainer = make(Labeled, data, data, loss=None, metrics=["Accuracy", "Loss"])
    results = trainer.train().metrics
    outputs = trainer.predict()
    assert outputs.shape == (24, 3)
    assert (outputs.argmax(1) == points().tensors[1]).double().mean() == results["test/accuracy"]
    assert torch.equal(trainer.predict([{"x": x} for x in points().tensors[0]]), outputs)
    assert next(trainer.predict(stream=True)).shape == (8, 3)


def test_outputs_that_do_not_fit_together(make):
    class Growing(Net):
        def forward(self, x):
            return x.new_zeros(len(x), len(x))

    with pytest.raises(ConfigError, match="stream=True"):
        make(Growing).predict(points(10))


def test_a_trainer_without_test_data_evaluates_the_loss(make):
    assert make().evaluate(points(8))["test"]["loss"] == pytest.approx(1.1, abs=0.3)


def test_evaluation_and_prediction_write_nothing(make, tmp_path):
    trainer = make(train=None, test=points(8, 1), metrics=["Accuracy"], length=None)
    trainer.evaluate()
    trainer.predict()
    assert list((tmp_path / "run").iterdir()) == []
    with pytest.raises(ConfigError, match="train_data"):
        trainer.train()


def test_a_trained_model_is_evaluated_from_its_file(make, tmp_path):
    trainer = make(test=points(8, 1))
    trainer.train()
    again = make(
        train=None, test=points(8, 1), length=None, folder="b", config={"MODEL.WEIGHTS": str(tmp_path / "run")}
    )
    assert again.evaluate() == trainer.evaluate()


def test_other_keys_come_from_a_config_or_a_file(make, tmp_path):
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


# ---------------------------------------------------------------------------- resume


@pytest.mark.parametrize("seed", [1, None])
@pytest.mark.parametrize("model", [Net, "object"])
def test_a_resumed_run_ends_with_the_same_weights(make, seed, model, tmp_path):
    def build():
        torch.manual_seed(5)
        return Net() if model == "object" else model

    options = {"optimizer": torch.optim.AdamW, "lr": 0.01, "length": "4ep", "config": {"SOLVER.CHECKPOINT_PERIOD": 4}}
    whole = make(build(), seed=seed, **options)
    whole.train()
    seed = whole.cfg.SEED if seed is None else seed

    class Stop(HookBase):
        def after_step(self):
            if self.trainer.iter == 4:
                self.trainer.request_stop("half", 75)

    stopped = make(build(), seed=seed, folder="b", hooks=[Stop], **options)
    assert stopped.train().reason == "half"
    # A new process does not know the seed of the run it resumes.
    resumed = make(build(), seed=None, folder="b", **options)
    result = resumed.train(resume=True)
    assert result.iteration == 12
    assert resumed.start_iter == 5
    assert seed == resumed.cfg.SEED
    assert torch.equal(weights(resumed), weights(whole))
    assert f"SEED: {seed}\n" in (tmp_path / "b" / "config.yaml").read_text()


def test_a_new_run_moves_the_earlier_one_away(make, tmp_path):
    make().train()
    make().train()
    assert (tmp_path / "run" / "previous_001" / "model_final.pth").exists()


def test_train_again_continues_a_longer_run(make):
    trainer = make()
    trainer.train()
    trainer.max_iter = 9
    assert trainer.train().iteration == 9


@pytest.mark.parametrize("length", [100, "10ep", 1])
def test_train_takes_no_length(make, length):
    with pytest.raises(ConfigError, match=rf"resume is True or False, not {length!r}.*length={length!r}.*max_iter"):
        make().train(length)


def test_two_trainers_in_one_process(make):
    first, second = make(), make(folder="b")
    first.train()
    second.train()
    assert torch.equal(weights(second), weights(make(folder="c"))) is False
    again = make(folder="d")
    again.train()
    assert torch.equal(weights(first), weights(again))


@pytest.mark.parametrize("trains", [True, False])
def test_a_trainer_that_is_gone_frees_its_objects(make, trains):
    model, data = Net(), points()
    trainer = make(model, data, points(8, 1))
    if trains:
        trainer.train()
    trainer.evaluate()
    alive = [weakref.ref(model), weakref.ref(data)]
    del trainer, model, data
    gc.collect()
    assert [one() for one in alive] == [None, None]


# ---------------------------------------------------------------------------- the config file


def test_ten_trainers_leave_no_threads_files_or_handlers(make):
    def run(number):
        trainer = make(folder=f"run{number}")
        trainer.train()
        trainer.max_iter += 3
        trainer.train()

    def left():
        handlers = [len(logging.getLogger(name).handlers) for name in ("hookline", "fvcore")]
        files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        return threading.active_count(), files, handlers

    run(0)
    before = left()
    for number in range(1, 10):
        run(number)
    assert left() == before


def test_the_config_shows_objects_and_cannot_repeat_the_run(make, tmp_path):
    model = Net()
    make(model, test=points(8, 1), optimizer=torch.optim.AdamW, hooks=[EarlyStopping("test/loss")]).train()
    path = tmp_path / "run" / "config.yaml"
    text = path.read_text()
    assert f"  NAME: <object {Net.__module__}.Net>\n" in text
    assert "- <object hookline.hooks.control.early_stopping.EarlyStopping>\n" in text
    assert "NAME: <object torch.optim.adamw.AdamW>\n" in text
    cfg = get_cfg()
    cfg.merge_from_file(path)
    message = rf"^MODEL.NAME: <object {re.escape(Net.__module__)}.Net> is an object that the Python script of this run"
    with pytest.raises(ConfigError, match=message):
        default_setup(cfg)


# ---------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": None}, r'length: is missing; give a number of epochs or iterations, such as "10ep" or 1000'),
        ({"length": "10eps"}, r"^Trainer\(length=...\): SOLVER.MAX_ITER: .*10eps"),
        ({"model": 3}, r"MODEL.NAME: <object builtins.int> cannot be the model: it is of type int, not a Module"),
        ({"model": "Mlp"}, r"MODEL.NAME: unknown model 'Mlp'; did you mean 'MLP'"),
        ({"optimizer": "AdamV"}, r"unknown optimizer 'AdamV'; did you mean 'Adam'"),
        ({"optimizer": [1, 2]}, r"SOLVER.OPTIMIZERS"),
        ({"optimizer": torch.optim.SGD(Net().parameters(), lr=0.1)}, r"does not update any parameter of the model"),
        ({"optimizer": torch.optim.SGD(Net().parameters(), lr=0.1), "lr": 0.2}, r"give one of them"),
        ({"test": points(4), "metrics": ["Acuracy"]}, r"TEST.METRICS.*did you mean 'Accuracy'"),
        ({"test": points(4), "metrics": "Accuracy"}, r"expected a list, not 'Accuracy'"),
        ({"hooks": [EarlyStopping("test/acc")], "test": points(4)}, r"there is no metric 'test/acc' among test/loss"),
        ({"hooks": [lambda trainer: None]}, r"Trainer\(hooks=...\): <lambda> is a function of the trainer, not a hook"),
        ({"train": (torch.ones(2), torch.ones(3))}, r"Trainer\(train_data=...\): .*same length"),
        ({"lr_scheduler": StepLR(torch.optim.SGD(Net().parameters()), 1)}, r"it belongs to another optimizer"),
        ({"hooks": [3]}, r"HOOKS\[0\].*<object builtins.int> cannot be the hook"),
        ({"train": DataLoader(points(), 4)}, r"Trainer\(train_data=...\): a loader has its own batch size"),
        ({"config": {"SOLVER.BASE_RL": 1}}, r"Trainer\(config=...\): .*did you mean 'SOLVER.BASE_LR'"),
        ({"config": 3}, r"expected a mapping of keys, a config or a YAML file, not a int"),
        ({"test": {"a b": points(4)}}, r"Trainer\(test_data=...\): .*'a b'"),
    ],
)
def test_errors_come_at_once_and_write_nothing(make, tmp_path, options, message):
    if "config" in options and options["config"] == 3:
        with pytest.raises(ConfigError, match=message):
            Trainer(Net, points(), length=3, config=3)
        return
    with pytest.raises(ConfigError, match=message):
        make(**options)
    assert list(tmp_path.iterdir()) == []


def test_unknown_arguments_are_errors():
    with pytest.raises(TypeError, match="epochs"):
        Trainer(Net, points(), epochs=3)


class NoParameters(nn.Module):
    def forward(self, x):
        return x[:, :3]


@pytest.mark.parametrize("model", [lambda: Net().requires_grad_(False), NoParameters])
def test_a_model_without_trainable_parameters_is_evaluated_and_predicts(make, model):
    trainer = make(model(), train=None, test=points(10, 1), metrics=["Accuracy"], length=None)
    assert 0 <= trainer.evaluate()["test"]["accuracy"] <= 1
    assert trainer.predict(points(4)).shape == (4, 3)
    with pytest.raises(ConfigError, match="train_data: this trainer has none, so it can only evaluate"):
        trainer.train()
    with pytest.raises(ConfigError, match="has no parameter that requires a gradient, and there is training data"):
        make(model())


def test_a_frozen_model_is_evaluated_by_the_commands(make):
    cfg = make(model := Net(), test=points(10, 1), metrics=["Accuracy"]).cfg
    model.requires_grad_(False)
    assert "accuracy" in looking(DefaultTrainer)(cfg).evaluate()["test"]
