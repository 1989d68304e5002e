"""The example hooks, each in a short training run."""

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest
from small_runs import config_trainer, labelled_batches, make_trainer
from torch.nn.functional import cross_entropy

import hookline.hooks
from hookline.hooks import HookBase

EXAMPLES = Path(__file__).parent / "examples"
DOCS = Path(__file__).parents[2] / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(f"hook_examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where inspect looks for its source
    spec.loader.exec_module(module)
    return module


checking, evaluating, reporting, stopping = map(load, ("checking", "evaluating", "reporting", "stopping"))


def test_examples_use_only_public_names():
    for path in EXAMPLES.glob("*.py"):
        assert not re.findall(r"trainer\._\w+", path.read_text())
        for names in re.findall(r"^from hookline\S* import (.*)$", path.read_text(), re.M):
            assert set(names.split(", ")) <= set(hookline.hooks.__all__)


def test_the_docs_list_every_example():
    row = r"^- \[(\w+)\.py\]\(\.\./tests/hooks/examples/\1\.py\): (.*)$"
    rows = re.findall(row, (DOCS / "hooks.md").read_text(), re.M)
    listed = {(name, file) for file, names in rows for name in re.findall(r"`(\w+)`", names)}
    definition = re.compile(r"^(?:class|def) (\w+)", re.M)
    assert listed == {
        (name, path.stem) for path in EXAMPLES.glob("*.py") for name in definition.findall(path.read_text())
    }


def test_validation_loss_uses_eval_mode():
    def loss(model, batch):
        assert not model.training
        return cross_entropy(model(batch), batch[1])

    trainer = make_trainer(evaluating.ValidationLoss(labelled_batches(2, seed=7), loss, period=4))
    trainer.train(0, 10)
    assert [at for _, at in trainer.storage.history("validation/loss").values()] == [3, 7, 9]
    assert trainer.model.training


def test_a_config_names_an_example_which_stops_the_run(tmp_path, monkeypatch):
    (tmp_path / "my_stopping.py").write_text((EXAMPLES / "stopping.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    hook = {"NAME": "my_stopping:TargetReached", "ARGS": {"dataset": "synthetic", "metric": "accuracy", "target": 0.0}}
    result = config_trainer(tmp_path / "run", "HOOKS", [hook], "TEST.EVAL_PERIOD", 4, "SOLVER.MAX_ITER", 40).train()
    assert (result.reason, result.iteration) == ("accuracy has reached 0.0", 4)
    assert (tmp_path / "run" / "model_final.pth").is_file()


def test_a_stalled_loss_stops_the_run():
    hook = stopping.LossStalls(patience=3)
    result = make_trainer(hook, lr=0.0).train(0, 100)
    assert result.reason == "the loss has not gone down for 3 epochs"
    assert result.iteration == 4 * 4  # one epoch sets the best
    assert hook.state_dict()["age"] == 3


def test_the_notifier_reports_the_end_or_an_error_and_its_place():
    class Broken(HookBase):
        def after_step(self):
            if self.trainer.iter == 2:
                raise ValueError("no more")

    sent = []
    make_trainer(reporting.Notifier(sent.append)).train(0, 5)
    with pytest.raises(ValueError, match="no more"):
        make_trainer(reporting.Notifier(sent.append), Broken()).train(0, 5)
    assert sent == [
        "ended at iteration 5 of 5",
        "failed on rank 0: ValueError: no more (in hook Broken.after_step, at iteration 2)",
    ]


def test_a_custom_event_reaches_another_hook_and_an_error_names_it():
    data = labelled_batches()
    data[3][0][1, 2] = math.nan
    with pytest.raises(FloatingPointError):  # the batch is the fourth
        make_trainer(checking.VerifyBatches(steps=3), checking.FiniteInputs(), data=data).train(0, 5)
    with pytest.raises(ValueError, match="1 values that are not finite") as caught:
        make_trainer(checking.VerifyBatches(), checking.FiniteInputs(), data=data).train(0, 5)
    assert caught.value.__notes__[0] == "(in hook FiniteInputs.verify_batch, at iteration 3)"
