"""Wrong arguments of ``Trainer(...)``, and what only the first batch or a checkpoint shows: one message for each."""

from pathlib import Path

import numpy as np
import pytest
import torch
import wrong_parts
from loggers import unchanged_logging
from refusing import BASE, assert_refused, contents
from run_tools import run_command
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from hookline.config import ConfigError, get_cfg
from hookline.engine import Trainer
from hookline.hooks import HookBase

OTHER = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
X, Y = torch.zeros(32, 8), torch.arange(32) % 4
PYTHON = [
    ({"callbacks": []}, "Trainer() takes no argument 'callbacks': it is called hooks, Trainer(..., hooks=...)"),
    ({"max_epochs": 3}, "Trainer() takes no argument 'max_epochs': it is called length, Trainer(..., length='3ep')"),
    ({"max_steps": 3}, "it is called length, Trainer(..., length=3)"),
    ({"early_stopping": 3}, "it is called hooks, Trainer(..., hooks=...)"),
    ({"resume_from_checkpoint": "last"}, "it is called resume, train(resume='last')"),
    ({"devices": 1}, "processes are started by torchrun, by launch(), or by --num-gpus"),
    ({"val_data": 3}, "it is called test_data"),
    ({"precision": 16}, "Trainer(precision=...): 16 is not one of 'bf16', 'fp16'"),
    ({"max_grad_norm": 1}, "it is called clip_norm, Trainer(..., clip_norm=...)"),
    ({"clip_norm": 0}, "SOLVER.CLIP_GRADIENTS.CLIP_VALUE: must be greater than 0"),
    ({"warmup": 2.5}, "Trainer(warmup=...): SOLVER.WARMUP_ITERS: 2.5 is not a duration"),
    ({"weight_decay": -1}, "Trainer(weight_decay=...): SOLVER.WEIGHT_DECAY: must be at least 0"),
    ({"ema": 1.0}, "HOOKS[0] (EMA): EMA: decay must be at least 0 and less than 1, not 1.0"),
    ({"zzz": 3}, "Trainer() takes no argument 'zzz'. It takes: model, train_data, test_data, optimizer"),
    ({"bacth_size": 3}, "did you mean 'batch_size'?"),
    ({"length": None}, 'length: is missing; give a number of epochs or iterations, such as "10ep" or 1000'),
    ({"length": "10 weeks"}, "Trainer(length=...): SOLVER.MAX_ITER: '10 weeks' is not a duration"),
    ({"model": 3}, "cannot be the model: it is of type int, not a Module"),
    ({"train_data": 3}, "cannot be the dataset: it is of type int"),
    ({"train_data": [X, Y]}, "Trainer(train_data=...): a list is not a data set: pass a tuple of tensors (x, y)"),
    ({"train_data": {"x": np.zeros(3)}}, "a dict is not a data set: pass a tuple of tensors (x, y)"),
    ({"train_data": (X, [0, 1])}, "expected tensors of the same length, got [(32, 8), (2,)]"),
    ({"train_data": (X, ["cat", "dog"] * 16)}, "the labels are strings: number them"),
    ({"train_data": DataLoader([X], 800, drop_last=True)}, "its drop_last drops a batch of fewer than batch_size=800"),
    ({"train_data": DataLoader([X], 4), "num_workers": 2}, "a loader has its own num_workers"),
    (
        {"train_data": DataLoader([X], 4), "config": {"DATALOADER.TRAIN_COLLATE_FN": {"NAME": "pad_collate"}}},
        "DATALOADER.TRAIN_COLLATE_FN: the training data is a loader",
    ),
    ({"test_data": (X, Y), "metrics": [lambda: 0.0]}, "takes two arguments, outputs and targets"),
    ({"train_data": (X, Y[:3])}, "expected tensors of the same length, got [(32, 8), (3,)]"),
    ({"hooks": {"EMA": {"decay": 0.9}}}, 'Trainer(hooks=...): expected a list such as ["EMA"] or [{"NAME": "EMA"'),
    ({"train_data": (np.zeros((4, 8), "f4"), np.array(["cat", "dog"] * 2))}, "the labels are strings: number them"),
    ({"hooks": {HookBase()}}, "Trainer(hooks=...): expected a list: a set has no certain order"),
    ({"hooks": [3]}, "HOOKS[0].NAME: '<object builtins.int>' cannot be the hook"),
    ({"hooks": [lambda trainer: None]}, "HOOKS[0].ARGS.trainer: "),
    ({"optimizer": [1, 2]}, "SOLVER.OPTIMIZERS"),
    ({"optimizer": OTHER}, "parameter of the model"),
    ({"optimizer": torch.optim.LBFGS(nn.Linear(1, 1).parameters())}, "LBFGS calls the model several times in a step"),
    ({"lr_scheduler": StepLR(OTHER, 1)}, "another optimizer"),
    ({"optimizer": "AdamW", "config": {"SOLVER.OPTIMIZER.ARGS.amsgrd": 3}}, "did you mean 'amsgrad'?"),
    ({"optimizer": "AdamW", "lr": 0.1, "config": {"SOLVER.OPTIMIZER.ARGS.lr": 3}}, "give one of them"),
    ({"config": {"MODEL.ARGS.hidden": 3}}, "Trainer(model=...)"),
    ({"test_data": {"a/b": (X, Y)}}, "so it has no '/', not 'a/b'"),
    ({"train_data": DataLoader([(X, Y)], 4), "batch_size": 8}, "Trainer(train_data=...): "),
    ({"config": {"SOLVER.BASE_RL": 3}}, "Trainer(config=...): unknown key 'SOLVER.BASE_RL'; did you mean"),
]


@pytest.mark.parametrize(("arguments", "says"), PYTHON, ids=[", ".join(arguments) for arguments, _ in PYTHON])
def test_a_wrong_argument_of_trainer_is_refused(arguments, says, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = contents(folder)
    right = {"model": wrong_parts.Linear(), "train_data": (X, Y), "loss": nn.CrossEntropyLoss(), "length": 2}
    with unchanged_logging(), pytest.raises(ConfigError) as error:
        Trainer(**{**right, **arguments})
    assert says in str(error.value)
    assert contents(folder) == before


def test_objects_in_a_config_say_where_objects_go():
    cfg = get_cfg()
    with pytest.raises(ConfigError, match=r"HOOKS: .*trainer.register_hooks\(\[\.\.\.\]\)"):
        cfg.HOOKS = [HookBase()]
    with pytest.raises(ConfigError, match='Name a class or function as "module:Name"'):
        cfg.MODEL.NAME = wrong_parts.Linear


# ---------------------------------------------------------------------- found at the first training batch

LATE = [
    ("MODEL: {NAME: 'wrong_parts:Detached'}", "the loss does not depend on the model's parameters"),
    ("MODEL: {LOSS: {NAME: 'wrong_parts:not_a_scalar'}}", "MODEL.LOSS must return a scalar tensor"),
    ("MODEL: {ARGS: {num_classes: 2}}", "is not a class: the model's output has fewer classes (its num_classes"),
    ("DATASETS: {TRAIN: ['wrong_parts:Ragged']}", 'COLLATE_FN names what makes batches: "pad_collate", or a function'),
    ("DATASETS: {TRAIN: ['wrong_parts:Objects']}", "DATALOADER.COLLATE_FN names what makes batches"),
    ("DATASETS: {TRAIN: ['wrong_parts:Named']}", "The batch has: x, answer. MODEL.LOSS and targets need one"),
]


@pytest.mark.parametrize(("line", "says"), LATE, ids=[line for line, _ in LATE])
def test_what_the_first_batch_shows_ends_the_run_with_one_message(line, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("case.yaml").write_text(f"{BASE}\n")
    Path("late.yaml").write_text(f"_BASE_: case.yaml\n{line}\n")
    code, _, err = run_command(["train", "--config-file", "late.yaml"], capsys)
    assert code == 2
    assert says in err[err.index("error: ") :]
    assert "Traceback" not in err


# ---------------------------------------------------------------------- found in a checkpoint

JUNK_STATES = [
    (3, "there is no intact checkpoint"),
    ({"iteration": -5}, "there is no intact checkpoint"),
    ({"hooks": 3}, "the state of 'trainer' in it cannot be loaded"),
    ({"hooks": {"LRScheduler": 3}}, "the state of the hook LRScheduler in the checkpoint cannot be loaded"),
    (
        {"hooks": {"BestCheckpointer": {"best": [[0.1, "x"]], "written": []}}},
        "the hook BestCheckpointer in",
    ),
    ({"optimizer": {"state": 3, "param_groups": "x"}}, "the checkpoint's optimizer (of another model or parameter"),
    ({"storage": {"histories": 3}}, "the metrics in the checkpoint"),
]


@pytest.mark.parametrize(("junk", "says"), JUNK_STATES, ids=[str(junk) for junk, _ in JUNK_STATES])
def test_a_resume_from_an_invalid_trainer_state_is_refused(junk, says, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("done").mkdir()
    content = torch.load(folder / "done/model_final.pth", weights_only=True)
    content["trainer"] = {**content["trainer"], **junk} if isinstance(junk, dict) else junk
    torch.save(content, "done/model_final.pth")
    Path("done/last_checkpoint").write_text("model_final.pth")
    words = f"train --resume --config-file {folder}/base.yaml OUTPUT_DIR done SOLVER.MAX_ITER 5"
    words += " CHECKPOINT.BEST.METRIC synthetic/accuracy"
    assert_refused(tmp_path, says, lambda: run_command(words.split(), capsys))
