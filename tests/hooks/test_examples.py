"""The example hooks, each in a short training run."""

import ast
import csv
import importlib.util
import inspect
import itertools
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline.hooks
from hookline.config import CfgNode, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer
from hookline.hooks import EvalHook, HookBase, JSONWriter, PeriodicWriter, off

EXAMPLES = Path(__file__).parent / "examples"
DOCS = Path(__file__).parents[2] / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(f"hook_examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where inspect looks for its source
    spec.loader.exec_module(module)
    return module


checking, evaluating, reporting, steering, stopping, watching = map(
    load, ("checking", "evaluating", "reporting", "steering", "stopping", "watching")
)
off(reporting.note_the_epoch)  # so that it does not join trainers of other tests


class Classifier(nn.Module):
    """Returns its loss on batches (x, y) while training, scores of x otherwise."""

    def __init__(self, features=8):
        super().__init__()
        self.body = nn.Linear(features, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 4)

    def scores(self, x):
        return self.head(self.norm(self.body(x.flatten(1))).relu())

    def forward(self, batch):
        x, y = batch
        return {"loss": F.cross_entropy(self.scores(x), y)} if self.training else self.scores(x)


def batches(count=5, shape=(8,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(12, *shape, generator=generator), torch.arange(12) % 4)  # three of each class
        for _ in range(count)
    ]


def simple_trainer(*hooks, data=None, lr=0.05, **kwargs):
    data = data or batches()
    torch.manual_seed(0)
    model = Classifier(data[0][0][0].numel())
    trainer = SimpleTrainer(model, data, torch.optim.SGD(model.parameters(), lr=lr), **kwargs)
    trainer.register_hooks(hooks)
    return trainer


def default_trainer(tmp_path, *hooks, **keys):
    cfg = get_cfg()
    cfg.MODEL.NAME, cfg.MODEL.ARGS = "MLP", CfgNode({"in_features": 8, "num_classes": 4, "hidden": [8]})
    cfg.MODEL.LOSS.NAME, cfg.MODEL.DEVICE = "CrossEntropyLoss", "cpu"
    cfg.DATASETS.TRAIN = [{"NAME": "synthetic", "ARGS": {"size": 64, "seed": 0}}]
    cfg.DATASETS.TEST = [{"NAME": "synthetic", "ARGS": {"size": 32, "seed": 1}}]
    cfg.DATALOADER.BATCH_SIZE, cfg.TEST.METRICS, cfg.TEST.EVAL_PERIOD = 16, ["Accuracy"], "1ep"
    cfg.LOG.WRITERS, cfg.SEED = ["JSONWriter"], 1
    cfg.merge_from_list([item for key, value in keys.items() for item in (key.replace("__", "."), value)])
    cfg.OUTPUT_DIR, cfg.SOLVER.STEPS, cfg.SOLVER.WARMUP_ITERS = str(tmp_path), (), 0
    torch.manual_seed(1)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks(hooks)
    return trainer


def values(trainer, name):
    return {iteration: value for value, iteration in trainer.storage.history(name).values()}


def weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


# ---------------------------------------------------------------------- all examples


def example_hooks():
    modules = (checking, evaluating, reporting, steering, stopping, watching)
    return [hook for module in modules for hook in vars(module).values() if _is_example(hook, module)]


def _is_example(hook, module):
    return isinstance(hook, type) and issubclass(hook, HookBase) and hook.__module__ == module.__name__


@pytest.mark.parametrize("hook", example_hooks(), ids=lambda hook: hook.__name__)
def test_an_example_is_short_and_documented(hook):
    assert len(inspect.getsource(hook).strip().splitlines()) < 30
    assert hook.__doc__
    assert not re.findall(r"self\.trainer\._\w+", inspect.getsource(hook))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_import_only_public_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("hookline"):
            assert node.module == "hookline.hooks"
            assert {alias.name for alias in node.names} <= set(hookline.hooks.__all__)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("hookline") for alias in node.names)


def test_the_docs_list_every_example():
    rows = re.findall(
        r"^\| \[(\w+)\.py\]\(\.\./tests/hooks/examples/\1\.py\) \| (.*) \|$", (DOCS / "hooks.md").read_text(), re.M
    )
    listed = [(name, file) for file, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert sorted(listed) == sorted(
        [(hook.__name__, hook.__module__.removeprefix("hook_examples_")) for hook in example_hooks()]
        + [("note_the_epoch", "reporting")]
    )


# ---------------------------------------------------------------------- evaluating


def test_validation_loss_uses_eval_mode():
    held_out = batches(2, seed=7)

    def loss(model, batch):
        return F.cross_entropy(model(batch), batch[1])

    trainer = simple_trainer(evaluating.ValidationLoss(held_out, loss, period=4))
    trainer.train(0, 10)
    losses = values(trainer, "validation/loss")
    assert list(losses) == [3, 7, 9]
    assert trainer.model.training
    trainer.model.eval()
    with torch.no_grad():
        assert losses[9] == pytest.approx(float(sum(loss(trainer.model, batch) for batch in held_out)) / 2)


def test_confusion_matrix_counts_the_test_set_once(tmp_path):
    hook = evaluating.ConfusionMatrix(4)
    trainer = default_trainer(tmp_path, hook, SOLVER__MAX_ITER=8, SOLVER__BASE_LR=0.1)
    accuracy = trainer.train().metrics["synthetic/accuracy"]
    assert hook.matrix.sum() == 32
    assert hook.matrix.trace() / 32 == pytest.approx(accuracy)
    truths = hook.matrix.sum(1)
    assert values(trainer, "recall/2")[8] == pytest.approx(float(hook.matrix[2, 2] / truths[2]))
    [*_, (name, image, iteration)] = trainer.storage._vis_data
    assert (iteration, name, tuple(image.shape)) == (8, "confusion", (1, 4, 4))
    assert trainer.evaluate()["synthetic"]["accuracy"] == pytest.approx(accuracy)  # also when nothing is training
    assert hook.matrix.sum() == 32


# ---------------------------------------------------------------------- stopping


def test_target_reached_stops_the_run(tmp_path):
    trainer = default_trainer(tmp_path, stopping.TargetReached("synthetic", "accuracy", 0.0), SOLVER__MAX_ITER=40)
    result = trainer.train()
    assert result.reason == "accuracy has reached 0.0"
    assert result.iteration == 4  # the first evaluation, after an epoch
    assert (tmp_path / "model_final.pth").is_file()


def test_a_stalled_loss_stops_the_run_and_the_count_is_resumed():
    hook = stopping.LossStalls(patience=3)
    result = simple_trainer(hook, lr=0.0).train(0, 100)
    assert result.reason == "the loss has not gone down for 3 epochs"
    assert result.iteration == 5 * 4  # one epoch sets the best
    fresh = stopping.LossStalls(patience=5)
    fresh.load_state_dict(hook.state_dict())
    assert simple_trainer(fresh, lr=0.0).train(0, 100).iteration == 5 * 2


def test_a_decreasing_loss_does_not_stop_the_run():
    assert simple_trainer(stopping.LossStalls(patience=1), lr=0.05).train(0, 20).reason == "completed"


@pytest.mark.parametrize(
    ("seconds", "iteration", "reason"), [(0.0, 5, "the time limit of 0 s is over"), (3600.0, 12, "completed")]
)
def test_a_run_stops_at_its_time_limit(seconds, iteration, reason):
    result = simple_trainer(stopping.TimeLimit(seconds, check_every=5)).train(0, 12)
    assert (result.iteration, result.reason) == (iteration, reason)


# ---------------------------------------------------------------------- watching


def test_gradient_norms_before_and_after_clipping():
    def clip(parameters):
        return nn.utils.clip_grad_norm_(parameters, 0.01)

    trainer = simple_trainer(watching.GradientNorm(), clip_gradients=clip)
    trainer.train(0, 3)
    assert values(trainer, "norm/gradient") == pytest.approx(values(trainer, "grad_norm"), rel=1e-5)
    assert all(norm > 0.01 for norm in values(trainer, "norm/gradient").values())
    assert values(trainer, "norm/clipped") == pytest.approx(dict.fromkeys(range(3), 0.01), rel=1e-3)


def test_histograms_of_all_weights():
    trainer = simple_trainer(watching.WeightHistogram("1ep"))
    trainer.train(0, 11)
    histograms = list(trainer.storage._histograms)
    assert [histogram["global_step"] for histogram in histograms] == [4] * 6 + [9] * 6
    last = {histogram["tag"]: histogram for histogram in histograms[:6]}
    assert last["weights/body.weight"]["num"] == 48
    assert sum(last["weights/body.weight"]["bucket_counts"]) == 48


def test_sample_images_are_from_the_batch():
    data = batches(shape=(1, 4, 4))
    trainer = simple_trainer(watching.SampleImages(count=2, period=3), data=data)
    trainer.train(0, 6)
    images = list(trainer.storage._vis_data)
    assert [(iteration, name) for name, _, iteration in images] == [
        (2, "input/0"),
        (2, "input/1"),
        (5, "input/0"),
        (5, "input/1"),
    ]
    shown, original = images[1][1], data[2][0][1]
    assert (float(shown.min()), float(shown.max())) == (0.0, 1.0)
    torch.testing.assert_close(shown * (original.max() - original.min()) + original.min(), original)


def test_sample_texts_are_written_in_eval_mode():
    def write(model, prompt):
        assert not model.training
        assert not torch.is_grad_enabled()
        return prompt + str(int(model((torch.ones(1, 8), None)).argmax()))

    trainer = simple_trainer(watching.SampleTexts(write, ["a", "b"], period="1ep"))
    trainer.train(0, 7)
    texts = list(trainer.storage._texts)
    assert [(iteration, name) for name, _, iteration in texts] == [
        (4, "sample/a"),
        (4, "sample/b"),
        (6, "sample/a"),
        (6, "sample/b"),
    ]
    assert all(re.fullmatch(r"[ab][0-3]", text) for _, text, _ in texts)
    assert trainer.model.training


def test_phases_are_timed_separately_and_summed_over_micro_batches(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(watching.time, "perf_counter", lambda: float(next(now)))  # a clock that ticks when read
    trainer = simple_trainer(watching.PhaseTimer(), accumulation_steps=2)
    trainer.train(0, 2)
    # The trainer reads the clock too, so each phase takes several ticks.
    phases = {name: values(trainer, f"time/{name}") for name in ("fetch", "forward", "backward", "optimizer")}
    assert all(list(times) == [0, 1] for times in phases.values())
    assert phases["forward"][1] == 2 * phases["optimizer"][1] > 0
    assert phases["backward"][1] == phases["forward"][1]


# ---------------------------------------------------------------------- steering


def test_the_overridden_learning_rate_is_used_and_logged(tmp_path):
    trainer = default_trainer(
        tmp_path, steering.OverrideLearningRate(0.007, start=4), SOLVER__MAX_ITER=8, SOLVER__BASE_LR=0.1
    )
    trainer.train()
    rates = values(trainer, "lr")
    assert all(rates[iteration] == 0.007 for iteration in range(4, 8))
    assert all(rates[iteration] == 0.1 for iteration in range(4))


def test_layers_stay_frozen_until_their_epoch():
    seen = {}

    class Watch(HookBase):
        def before_epoch(self):
            seen[self.trainer.epoch] = weights(self.trainer.model)

    trainer = simple_trainer(steering.FreezeUntil("body", epoch=2), Watch())
    trainer.train(0, 11)  # two epochs of 5, and the first step of a third
    assert torch.equal(seen[0]["body.weight"], seen[2]["body.weight"])
    assert not torch.equal(seen[0]["head.weight"], seen[2]["head.weight"])
    assert not torch.equal(seen[2]["body.weight"], trainer.model.body.weight)


def test_a_loss_spike_saves_a_checkpoint(tmp_path):
    class Spike(HookBase):
        def after_fetch(self, batch):
            if self.trainer.iter == 3:
                batch[0].mul_(1000)

    hooks = [Spike(), steering.SaveOnLossSpike()]
    trainer = default_trainer(tmp_path, *hooks, SOLVER__MAX_ITER=6, SOLVER__CHECKPOINT_PERIOD=0)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["model_0000003.pth", "model_final.pth"]
    [(name, text, iteration)] = trainer.storage._texts
    assert (iteration, name) == (3, "spike")
    assert text.startswith("loss ")


def test_the_average_is_evaluated_while_the_weights_are_trained(tmp_path):
    evaluated, expected = [], []

    class Watch(HookBase):
        """Recomputes the average, and records the evaluated weights."""

        average = None

        def after_optimizer_step(self):
            weight = self.trainer.model[1].weight.detach()
            self.average = weight.clone() if self.average is None else 0.5 * self.average + 0.5 * weight

        def before_eval_step(self, batch):
            evaluated.append(self.trainer.model[1].weight.detach().clone())
            expected.append(self.average)

    plain = default_trainer(tmp_path / "plain", SOLVER__MAX_ITER=8)
    plain.train()
    trainer = default_trainer(tmp_path / "ema", steering.AverageWeights(0.5), Watch(), SOLVER__MAX_ITER=8)
    trainer.train()
    assert len(evaluated) == 2 * math.ceil(32 / 16)
    torch.testing.assert_close(evaluated, expected)
    for name, weight in plain.model.state_dict().items():  # training is not disturbed by it
        assert torch.equal(weight, trainer.model.state_dict()[name])
    assert not torch.equal(evaluated[-1], trainer.model[1].weight)


def test_the_average_is_resumed_and_a_failed_evaluation_restores_the_weights(tmp_path):
    class Fails(HookBase):
        def before_eval_step(self, batch):
            raise RuntimeError("broken")

    whole, first = steering.AverageWeights(), steering.AverageWeights()
    default_trainer(tmp_path / "whole", whole, SOLVER__MAX_ITER=10).train()

    class Stop(HookBase):
        def after_step(self):
            if self.trainer.iter == 5:
                self.trainer.request_stop("for now", 75)

    default_trainer(tmp_path / "parts", first, Stop(), SOLVER__MAX_ITER=10).train()
    second = steering.AverageWeights()
    trainer = default_trainer(tmp_path / "parts", second, SOLVER__MAX_ITER=10)
    trainer.resume_or_load(resume=True)
    trainer.train()
    assert trainer.start_iter == 6
    assert whole.average.keys() == second.average.keys() == dict(trainer.model.named_parameters()).keys()
    for name, average in whole.average.items():
        assert torch.equal(average, second.average[name])

    broken = steering.AverageWeights()
    trainer = default_trainer(tmp_path / "broken", broken, Fails(), SOLVER__MAX_ITER=10)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert not broken.swapped
    assert not torch.equal(broken.average["1.weight"], trainer.model[1].weight)


def test_an_evaluation_without_training_uses_the_weights(tmp_path):
    trainer = default_trainer(tmp_path, steering.AverageWeights())
    before = weights(trainer.model)
    plain = default_trainer(tmp_path).evaluate()
    assert trainer.evaluate() == plain
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, before[name])


# ---------------------------------------------------------------------- reporting


class Broken(HookBase):
    def after_step(self):
        if self.trainer.iter == 2:
            raise ValueError("no more")


def test_the_notifier_reports_an_error_and_its_place():
    sent = []
    with pytest.raises(ValueError, match="no more"):
        simple_trainer(reporting.Notifier(sent.append), Broken()).train(0, 5)
    assert sent == ["failed on rank 0: ValueError: no more (in hook Broken.after_step, at iteration 2)"]


def test_the_notifier_reports_the_end_and_its_failure_does_not_hide_results():
    sent = []
    simple_trainer(reporting.Notifier(sent.append)).train(0, 5)
    assert sent == ["ended at iteration 5 of 5"]

    def send(text):
        raise ConnectionError("no network")

    with pytest.raises(ValueError, match="no more"):
        simple_trainer(reporting.Notifier(send), Broken()).train(0, 5)


def test_the_csv_has_a_row_for_every_write(tmp_path):
    path, json_path = tmp_path / "metrics.csv", tmp_path / "metrics.json"
    writer = PeriodicWriter([JSONWriter(str(json_path))], period=2)
    trainer = simple_trainer(reporting.CSVDump(str(path), ["total_loss", "absent"]), writer)
    trainer.train(0, 5)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    written = [json.loads(line) for line in json_path.read_text().splitlines()]
    assert [int(row["iteration"]) for row in rows] == [1, 3, 4]
    assert [float(row["total_loss"]) for row in rows] == [row["total_loss"] for row in written]
    assert {row["absent"] for row in rows} == {""}


def test_progress_goes_up_to_one():
    shown = []
    trainer = simple_trainer(reporting.Progress(shown.append))
    trainer.train(0, 4)
    assert shown == [0.25, 0.5, 0.75, 1.0]
    shown.clear()
    trainer.train(0, 400)
    assert shown == [percent / 100 for percent in range(101)]


def test_a_function_joins_trainers_by_name():
    module = load("reporting")  # which decorates it again
    try:
        mine, other = simple_trainer(), simple_trainer()
        mine.name = "my-experiment"
        mine.train(0, 11)
        other.train(0, 11)
    finally:
        off(module.note_the_epoch)
    assert [(iteration, text) for _, text, iteration in mine.storage._texts] == [
        (4, "epoch 0 is over at iteration 4"),
        (9, "epoch 1 is over at iteration 9"),
    ]
    assert not other.storage._texts


# ---------------------------------------------------------------------- checking


class Verifying(SimpleTrainer):
    """Emits the event itself, for every batch."""

    def fetch(self):
        batch = super().fetch()
        self.emit("verify_batch", batch)
        return batch


def test_a_bad_batch_raises_an_error_that_names_the_hook():
    data = batches()
    data[3][0][1, 2] = math.nan
    trainer = simple_trainer(checking.VerifyBatches(), checking.FiniteInputs(), data=data)
    with pytest.raises(ValueError, match="1 values that are not finite") as caught:
        trainer.train(0, 5)
    assert caught.value.__notes__[0] == "(in hook FiniteInputs.verify_batch, at iteration 3)"


@pytest.mark.parametrize("by_hook", [True, False])
def test_a_custom_event_reaches_every_hook_with_the_method(by_hook):
    count = checking.CountClasses(4)
    if by_hook:
        trainer = simple_trainer(checking.VerifyBatches(steps=2), checking.FiniteInputs(), count)
    else:
        model = Classifier()
        trainer = Verifying(model, batches(), torch.optim.SGD(model.parameters(), lr=0.05))
        trainer.register_hooks([checking.FiniteInputs(), count])
    trainer.train(0, 3)
    assert count.counts.tolist() == [3 * (2 if by_hook else 3)] * 4
    assert values(trainer, "data/rarest_class")[0] == 0.25


# ---------------------------------------------------------------------- in a config


def test_a_config_names_examples_by_module_and_class(tmp_path, monkeypatch):
    (tmp_path / "my_stopping.py").write_text((EXAMPLES / "stopping.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    hook = {"NAME": "my_stopping:TimeLimit", "ARGS": {"seconds": 0.0, "check_every": 3}}
    trainer = default_trainer(tmp_path / "run", HOOKS=[hook], SOLVER__MAX_ITER=8)
    assert trainer.train().iteration == 3


def test_examples_work_with_a_custom_evaluation():
    class Fixed(HookBase):
        def after_eval(self, results):
            self.trainer.storage.put_scalar("seen", results["val"]["accuracy"])

    trainer = simple_trainer(
        EvalHook(3, lambda: {"val": {"accuracy": 0.5}}), stopping.TargetReached("val", "accuracy", 0.4), Fixed()
    )
    assert trainer.train(0, 9).iteration == 3
    assert values(trainer, "seen") == {2: 0.5}
