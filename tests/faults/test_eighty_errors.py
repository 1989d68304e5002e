"""Wrong uses of the command and of Trainer: each message names the cause and the cure, and nothing changes on disk.

Messages about config files themselves, and about every key in turn, are in ``test_bad_input.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import wrong_parts
from loggers import unchanged_logging
from torch import nn

from hookline.cli import main
from hookline.config import ConfigError, get_cfg
from hookline.engine import Trainer
from hookline.hooks import HookBase

BASE = """
MODEL: {NAME: MLP, ARGS: {in_features: 8, num_classes: 4, hidden: [4]}, LOSS: {NAME: CrossEntropyLoss}, DEVICE: cpu}
DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {size: 64}}], TEST: [{NAME: synthetic, ARGS: {size: 32}}]}
SOLVER: {MAX_ITER: 3, WARMUP_ITERS: 0, STEPS: []}
TEST: {METRICS: [Accuracy]}
LOG: {PROGRESS_BAR: False}
OUTPUT_DIR: run
"""

# Each: a line of config, and what the message says.
CONFIG = [
    ("SOLVRE: {BASE_LR: 1}", "unknown key 'SOLVRE.BASE_LR'; did you mean 'SOLVER.BASE_LR'?"),
    ("SOLVER: {BASE_RL: 1}", "unknown key 'SOLVER.BASE_RL'; did you mean 'SOLVER.BASE_LR'?"),
    ("SOLVER: {LR: 1}", "did you mean 'SOLVER.BASE_LR'?"),
    ("TRAINER: {MAX_EPOCHS: 3}", "unknown key 'TRAINER.MAX_EPOCHS'"),
    ("EVAL_PERIOD: 1ep", "did you mean 'TEST.EVAL_PERIOD'?"),
    ("TEST: {PERIOD: 1ep}", "did you mean 'TEST.EVAL_PERIOD'?"),
    ("SOLVER: {EVAL_PERIOD: 1ep}", "did you mean 'TEST.EVAL_PERIOD'?"),
    ("BATCH_SIZE: 3", "did you mean 'DATALOADER.BATCH_SIZE'?"),
    ("SOLVER: {IMS_PER_BATCH: 16}", "SOLVER.IMS_PER_BATCH was renamed to DATALOADER.BATCH_SIZE"),
    ("VERSION: 2", "VERSION: this hookline reads version 1, not 2 (detectron2's number: leave it out)"),
    ("SOLVER: 3", "SOLVER: expected a mapping of keys, got 3 (int)"),
    ("SOLVER: {MAX_ITER: 2h}", "'2h' is a time; write an int (iterations), '500it' or '2ep'. SOLVER.TIME_LIMIT stops"),
    ("SOLVER: {MAX_ITER: 3 weeks}", "'3 weeks' is not a duration; write an int (iterations), '500it' or '2ep'"),
    ("SOLVER: {MAX_ITER: 0}", "SOLVER.MAX_ITER: is 0; give a length, such as 10000 or '20ep'"),
    ("SEED: !!python/name:os.system x", "the values of a config are plain data"),
    ("MODEL:\n\tNAME: MLP", "indent with spaces, not with a tab"),
    ("SEED: 1\nSEED: 2", "the key 'SEED' appears twice"),
]
MODEL = [
    ("MODEL: {NAME: MPL}", "MODEL.NAME: unknown model 'MPL'; did you mean 'MLP'? Known: ConvNet, GPT, MLP, "),
    ("MODEL: {NAME: 'wrong_parts:Liner'}", "there is no 'Liner' in 'wrong_parts'; did you mean 'Linear'?"),
    ("MODEL: {NAME: 'wrong_prats:Linear'}", "there is no module 'wrong_prats'"),
    ("MODEL: {NAME: 'beside:Net'}\nOUTPUT_DIR: x", "start in "),
    (
        "MODEL: {NAME: 'wrong_import:Net'}",
        "importing 'wrong_import' fails: ModuleNotFoundError: No module named 'no_such",
    ),
    ("MODEL: {NAME: 'os:system'}", "'os:system' is in Python's standard library, which has no components"),
    ("MODEL: {NAME: 'wrong_parts:NotAModel'}", "MODEL.NAME: 'wrong_parts:NotAModel' cannot be the model: it is not a"),
    ("MODEL: {NAME: 'wrong_parts:a_string'}", "MODEL.NAME: 'wrong_parts:a_string' cannot be the model: it returned an"),
    ("MODEL: {NAME: 'wrong_parts:number'}", "it is of type int, not a class or a function written in Python"),
    ("MODEL: {ARGS: {hiden: [3]}}", "MODEL.ARGS.hiden: MLP takes no argument 'hiden'; did you mean 'hidden'?"),
    ("MODEL: {ARGS: {num_classes: four}}", "MODEL.ARGS.num_classes: expected int, got 'four' (str)"),
    ("MODEL: {NAME: 'wrong_parts:NeedsArgument'}", "MODEL.ARGS.width: NeedsArgument needs the argument 'width'"),
    ("MODEL: {NAME: 'wrong_parts:FailsToBuild'}", "ValueError: width must be even, not 7 (wrong_parts.py:"),
    ("MODEL: {NAME: 'wrong_parts:Frozen'}", "MODEL.NAME: Frozen has no parameter that requires a gradient"),
    ("MODEL: {NAME: 'wrong_parts:NoForward'}", "NoForward has no forward(). Evaluation calls forward(), or the method"),
    ("MODEL: {NAME: 'wrong_parts:TrainingStep'}", "to train by training_step(batch), set MODEL.TRAIN_STEP to it"),
    ("MODEL: {TRAIN_STEP: trian}", "MODEL.TRAIN_STEP: MLP has no method 'trian'; did you mean 'train'?"),
    ("MODEL: {NAME: 'wrong_parts:Multi'}", "Select one with MODEL.OUTPUT_MAPPING, such as {scores: input}"),
    (
        "MODEL: {NAME: 'wrong_parts:Multi', LOSS: {NAME: 'wrong_parts:loss_of_dict'}}",
        "the metric synthetic/accuracy takes one tensor, the model returned: scores, features. Select one with MODEL.O",
    ),
    ("MODEL: {OUTPUT_MAPPING: {logits: input}}", "MODEL.OUTPUT_MAPPING needs outputs with names; the model returned a"),
    ("MODEL: {INPUT_MAPPING: {pixels: x}}", "MODEL.INPUT_MAPPING: MLP takes no 'x'. It takes: input"),
    ("MODEL: {INPUT_FUNCTION: 'wrong_parts:nothing'}", "MODEL.INPUT_FUNCTION: unknown function 'wrong_parts:nothing'"),
    ("MODEL: {NAME: 'wrong_parts:ReturnsNothing'}", "the model returned None: its forward() has no return statement"),
    (
        "MODEL: {LOSS: {NAME: CrossEntropy}}",
        "MODEL.LOSS.NAME: unknown loss 'CrossEntropy'; did you mean 'CrossEntropyL",
    ),
    ("MODEL: {LOSS: {ARGS: {smoothing: 0.1}}}", "takes no argument 'smoothing'; did you mean 'label_smoothing'?"),
    ("MODEL: {ACTIVATION_CHECKPOINTING: ['blocks.*']}", "MLP has no submodule and no class that matches 'blocks.*'"),
    ("MODEL: {DEVICE: gpu}", 'unknown device \'gpu\'; use "auto", "cpu", "cuda", "cuda:N" or "mps"'),
]
DATA = [
    ("DATASETS: {TRAIN: [synthetics]}", "unknown dataset 'synthetics'; did you mean 'synthetic'?"),
    ("DATASETS: {TRAIN: synthetic}", "expected a list of components, got 'synthetic'; write [synthetic]"),
    ("DATASETS: {TRAIN: []}", "DATASETS.TRAIN: is not set; give a --config-file that sets it"),
    ("DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {sise: 3}}]}", "takes no argument 'sise'; did you mean 'size'?"),
    (
        "DATASETS: {TRAIN: ['wrong_parts:MissingFile']}",
        "No such file or directory: 'no/such/file.csv' (wrong_parts.py:",
    ),
    ("DATASETS: {TRAIN: ['wrong_parts:Raises']}", "DATASETS.TRAIN[0] (wrong_parts:Raises): KeyError: \"no column 'lab"),
    ("DATASETS: {TRAIN: ['wrong_parts:NoLength']}", "NoLength has __getitem__() but no __len__(); it needs both"),
    (
        "DATASETS: {TRAIN: [{NAME: 'wrong_parts:rows', ARGS: {size: 0}}]}",
        "the data set wrong_parts:rows has no samples",
    ),
    ("DATASETS: {TEST: [synthetic, synthetic]}", 'give one of them another name, {NAME: "synthetic", AS: "other"}'),
    ("DATALOADER: {SAMPLER_TRAIN: EpochSampelr}", "did you mean 'EpochSampler'?"),
    ("DATALOADER: {COLLATE_FN: {NAME: padcollate}}", "did you mean 'pad_collate'?"),
    (
        "DATALOADER: {BATCH_SIZE: 100, DROP_LAST: True}",
        "no batch is left. Use smaller batches, or set DROP_LAST to False",
    ),
]
SOLVER = [
    ("SOLVER: {OPTIMIZER: {NAME: AdamWW}}", "unknown optimizer 'AdamWW'; did you mean 'AdamW'?"),
    ("SOLVER: {OPTIMIZER: {NAME: AdamW, ARGS: {beta: 0.9}}}", "takes no argument 'beta'; did you mean 'betas'?"),
    ("SOLVER: {OPTIMIZER: {NAME: AdamW, ARGS: {betas: [2.0, 3.0]}}}", "Invalid beta parameter at index 0: 2.0"),
    ("SOLVER: {OPTIMIZER: {NAME: AdamW, ARGS: {lr: 0.9}}}", "set the learning rate with SOLVER.BASE_LR"),
    ("SOLVER: {LR_SCHEDULER_NAME: WarmupCosine}", "did you mean 'WarmupCosineLR'?"),
    (
        "SOLVER: {LR_SCHEDULER_NAME: 'torch.optim.lr_scheduler:ReduceLROnPlateau'}",
        'needs the name of a metric, such as "digits_test/loss"',
    ),
    ("SOLVER: {STEPS: 30}", "30 is not a list; write lengths as (3000, 4000) or ('10ep', '15ep')"),
    ("SOLVER: {PARAM_GROUPS: [{PARAMS: backbone, LR_FACTOR: 0.1}]}", "no class that matches 'backbone'. Submodules:"),
    ("SOLVER: {PARAM_GROUPS: [{PARAM: '0', LR_FACTOR: 0.1}]}", "there is no such key; did you mean 'PARAMS'?"),
    ("SOLVER: {ACCUMULATION_STEPS: 17}", "a batch of 16 samples (DATALOADER.BATCH_SIZE) cannot be cut into 17"),
    ("SOLVER: {AMP: {ENABLED: True, DTYPE: fp16}}", "'fp16' is not one of 'bfloat16', 'float16'"),
]
HOOKS = [
    ("HOOKS: [EarlyStoping]", "HOOKS[0].NAME: unknown hook 'EarlyStoping'; did you mean 'EarlyStopping'?"),
    (
        "HOOKS: {EMA: {decay: 0.9}}",
        "expected a list of components, got {'EMA': {'decay': 0.9}}; write [{NAME: EMA, ARGS",
    ),
    ("HOOKS: [{NAM: EMA}]", "a component has the keys NAME and ARGS, not 'NAM'; did you mean 'NAME'?"),
    ("HOOKS: [{NAME: EMA, ARGS: {deacy: 1}}]", "EMA takes no argument 'deacy'; did you mean 'decay'?"),
    ("HOOKS: [{NAME: EMA, ARGS: {decay: 2.0}}]", "HOOKS[0]: EMA: decay must be at least 0 and less than 1, not 2.0"),
    ("HOOKS: ['wrong_parts:Watcher']", "HOOKS[0].ARGS.every: Watcher needs the argument 'every', which is not given"),
    ("HOOKS: ['wrong_parts:NotAHook']", "'wrong_parts:NotAHook' cannot be the hook: it is not a subclass of HookBase"),
    (
        "HOOKS: ['wrong_parts:FailsToStart']",
        "HOOKS[0] (wrong_parts:FailsToStart): RuntimeError: no connection to the s",
    ),
    ("HOOKS: [IterationTimer]", "HOOKS[0]: every run already has one IterationTimer; remove this one"),
    ("HOOKS: [{NAME: EarlyStopping, ARGS: {metric: synthetic/acuracy}}]", "did you mean 'synthetic/accuracy'?"),
    ("LOG: {WRITERS: [Tensorboard]}", "unknown writer 'Tensorboard'; did you mean 'TensorboardXWriter'?"),
    ("TEST: {METRICS: [Acuracy]}", "unknown metric 'Acuracy'; did you mean 'Accuracy'?"),
    ("TEST: {EXPECTED_RESULTS: [[synthetic, accuracy, 0.9]]}", "is not [set, metric, expected value, tolerance]"),
    (
        "TEST: {EXPECTED_RESULTS: [[synthetics, accuracy, 0.9, 0.1]]}",
        "there is no 'synthetics/accuracy' among synthetic/",
    ),
    ("TEST: {PREDICTIONS_FORMAT: xml}", "unknown format 'xml', not one of jsonl, csv, npz"),
    ("CHECKPOINT: {BEST: {METRIC: synthetic/acc}}", "did you mean 'synthetic/accuracy'?"),
    ("CHECKPOINT: {LOAD_BEST_AT_END: True}", "CHECKPOINT.LOAD_BEST_AT_END: needs CHECKPOINT.BEST.METRIC"),
]
FILES_AND_RANKS = [
    ("MODEL: {WEIGHTS: bse.yaml}", "MODEL.WEIGHTS: there is no file bse.yaml; did you mean 'base.yaml'?"),
    ("MODEL: {WEIGHTS: base.yaml}", "base.yaml is damaged, or is not a checkpoint"),
    ("MODEL: {WEIGHTS_OPTIMIZER: True}", "MODEL.WEIGHTS_OPTIMIZER: needs MODEL.WEIGHTS, the checkpoint to load"),
    ("OUTPUT_DIR: ''", "OUTPUT_DIR: is empty; give the run a folder"),
    ("OUTPUT_DIR: base.yaml", "OUTPUT_DIR: base.yaml exists and is not a folder"),
    ("OUTPUT_DIR: s3://bucket/run", "is a URI; a run writes to a local folder"),
    ("PARALLEL: {NAME: dpp}", "PARALLEL.NAME: unknown strategy 'dpp'; did you mean 'ddp'?"),
    ("PARALLEL: {NAME: ddp, ARGS: {find_unused: True}}", "did you mean 'find_unused_parameters'?"),
    ("PARALLEL: {TIMEOUT: 30}", "PARALLEL.TIMEOUT: 30 is not a time; write '45s', '30min' or '2h'"),
]
# Each: the words after ``hookline``, and what the message says.
COMMANDS = [
    ("trian --config-file base.yaml", "unknown command 'trian'; did you mean 'train'?"),
    ("train --confg-file base.yaml", "did you mean '--config-file'?"),
    ("train --config-file bas.yaml", "bas.yaml: cannot read this config file: No such file or directory"),
    (
        "train --config-file mine",
        "mine: cannot read this config file: Is a directory; did you mean 'mine/config.yaml'?",
    ),
    ("train", "MODEL.NAME: is not set; give a --config-file that sets it"),
    ("train --config-file base.yaml SEED", "'SEED' at the end has no value; give pairs KEY VALUE, or KEY=VALUE"),
    (
        "train --config-file base.yaml SOLVER.BASE_RL 0.1",
        "command line: unknown key 'SOLVER.BASE_RL'; did you mean 'SOLVE",
    ),
    ("train --config-file base.yaml SOLVER.BASE_LR=fast", "SOLVER.BASE_LR: expected float, got 'fast' (str)"),
    ("train --config-file base.yaml --SOLVER.BASE_LR 0.1", "write config keys without dashes: SOLVER.BASE_LR VALUE"),
    ("train --config-file base.yaml --num-gpus 0", "--num-gpus 0 --num-machines 1: each must be at least 1"),
    ("train --config-file base.yaml --num-gpus two", "argument --num-gpus: invalid int value: 'two'"),
    ("train --config-file base.yaml --num-gpus 2 MODEL.DEVICE cuda", "MODEL.DEVICE: 'cuda' is not available"),
    ("train --config-file base.yaml --num-machines 2 --machine-rank 2", "--machine-rank 2: must be from 0 to 1"),
    (
        "train --config-file base.yaml --num-machines 2",
        "several machines need the address of machine 0, such as tcp://",
    ),
    ("train --config-file base.yaml --trainer wrong_parts:Liner", "there is no 'Liner' in 'wrong_parts'; did you mean"),
    ("eval --config-file base.yaml", "MODEL.WEIGHTS: is not set; give the weights to evaluate: a file, or --resume"),
    ("eval --config-file base.yaml --resume", "OUTPUT_DIR: there is no checkpoint in run to evaluate"),
    ("predict --config-file base.yaml DATASETS.TEST []", "DATASETS.TEST: is empty, so there is nothing to predict"),
    ("config explain SOLVER.BASE_RL", "there is no config key 'SOLVER.BASE_RL'; did you mean 'SOLVER.BASE_LR'?"),
    ("config list modle", "there is no registry 'modle'; did you mean 'MODEL'? Known: MODEL, LOSS, "),
    ("config diff base.yaml none.yaml", "none.yaml: cannot read this config file: No such file or directory"),
    ("config check base.yaml MODEL.NAME MPL", "did you mean 'MLP'?"),
    ("config exlpain SEED", "did you mean 'explain'?"),
    ("config schema --import wrong_import", "importing 'wrong_import' fails: ModuleNotFoundError"),
]


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with base.yaml and some files of the user; the current one."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "mine").mkdir()
    for name in ("config.yaml", "log.txt", "model_best.pth"):
        (tmp_path / "mine" / name).write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(folder, words, capsys):
    """Run ``hookline``; return its only message."""
    before = contents(folder)
    capsys.readouterr()
    try:
        with unchanged_logging():
            code = main(words)
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2, err
    assert err.startswith("error: "), err
    assert "Traceback" not in err
    assert contents(folder) == before
    return err


@pytest.mark.parametrize(("line", "says"), [*CONFIG, *MODEL, *DATA, *SOLVER, *HOOKS, *FILES_AND_RANKS])
def test_a_wrong_config_is_refused(line, says, folder, capsys):
    (folder / "sub").mkdir()
    (folder / "sub/beside.py").touch()
    (folder / "sub/case.yaml").write_text(f"_BASE_: ../base.yaml\n{line}\n")
    error = refused(folder, ["train", "--config-file", "sub/case.yaml"], capsys)
    assert says.replace("{folder}", str(folder)) in error


@pytest.mark.parametrize(("words", "says"), COMMANDS)
def test_a_wrong_command_is_refused(words, says, folder, capsys):
    assert says in refused(folder, words.split(), capsys)


# ---------------------------------------------------------------------- found at the first training batch

LATE = [
    ("MODEL: {NAME: 'wrong_parts:Detached'}", "the loss does not depend on the model's parameters"),
    ("MODEL: {LOSS: {NAME: 'wrong_parts:not_a_scalar'}}", "MODEL.LOSS must return a scalar tensor"),
    ("MODEL: {ARGS: {num_classes: 2}}", "is not a class: the model's output has fewer classes (its num_classes"),
    ("DATASETS: {TRAIN: ['wrong_parts:Ragged']}", 'COLLATE_FN names what makes batches: "pad_collate", or a function'),
    ("DATASETS: {TRAIN: ['wrong_parts:Objects']}", "DATALOADER.COLLATE_FN names what makes batches"),
    (
        "DATASETS: {TRAIN: ['wrong_parts:Named']}",
        "The batch has: x, answer. MODEL.LOSS and targets need one: set MODEL.TA",
    ),
    (
        "MODEL: {NAME: 'wrong_parts:TrainingStep', TRAIN_STEP: training_step}\nDATASETS: {TEST: []}",
        "MODEL.TRAIN_STEP: training_step() needs batch, batch_idx, but it is called with the batch alone",
    ),
]


@pytest.mark.parametrize(("line", "says"), LATE)
def test_what_the_first_batch_shows_ends_the_run_with_one_message(line, says, folder, capsys):
    (folder / "case.yaml").write_text(f"_BASE_: base.yaml\n{line}\n")
    with unchanged_logging(), pytest.raises(SystemExit) as end:
        main(["train", "--config-file", "case.yaml"])
    err = capsys.readouterr().err
    message = err[err.index("error: ") :]
    assert end.value.code == 2
    assert says in message
    assert "Traceback" not in message


# ---------------------------------------------------------------------- Python

X, Y = torch.zeros(32, 8), torch.arange(32) % 4
PYTHON = [
    ({"callbacks": []}, "Trainer() takes no argument 'callbacks'. It takes: model, train_data, test_data, optimizer"),
    ({"bacth_size": 3}, "did you mean 'batch_size'?"),
    ({"length": None}, 'length: is missing; give a number of epochs or iterations, such as "10ep" or 1000'),
    ({"length": "10 weeks"}, "Trainer(length=...): SOLVER.MAX_ITER: '10 weeks' is not a duration"),
    ({"optimizer": "Adma"}, "unknown optimizer 'Adma'; did you mean 'Adam"),
    ({"loss": "CrossEntropy"}, "did you mean 'CrossEntropyLoss'?"),
    ({"model": 3}, "cannot be the model: it is of type int, not a Module"),
    ({"train_data": 3}, "cannot be the dataset: it is of type int"),
    ({"train_data": [X, Y]}, "Trainer(train_data=...): a list is not a data set: pass a tuple of tensors (x, y)"),
    ({"train_data": {"x": np.zeros(3)}}, "a dict is not a data set: pass a tuple of tensors (x, y)"),
    ({"train_data": (X, Y[:3])}, "expected tensors of the same length, got [(32, 8), (3,)]"),
    ({"hooks": HookBase()}, "Trainer(hooks=...): expected a list, not"),
    ({"hooks": [3]}, "HOOKS[0].NAME: <object builtins.int> cannot be the hook"),
    ({"metrics": "Accuracy"}, "Trainer(metrics=...): expected a list, not 'Accuracy'"),
    ({"config": {"SOLVER.BASE_RL": 3}}, "Trainer(config=...): unknown key 'SOLVER.BASE_RL'; did you mean"),
]


@pytest.mark.parametrize(("arguments", "says"), PYTHON)
def test_a_wrong_argument_of_trainer_is_refused(arguments, says, folder):
    before = contents(folder)
    right = {"model": wrong_parts.Linear(), "train_data": (X, Y), "loss": nn.CrossEntropyLoss(), "length": 2}
    with unchanged_logging(), pytest.raises(ConfigError) as error:
        Trainer(**{**right, **arguments})
    assert says in str(error.value)
    assert contents(folder) == before


def test_objects_in_a_config_say_where_objects_go():
    cfg = get_cfg()
    with pytest.raises(ConfigError, match=r"HOOKS: entry 0: .*trainer.register_hooks\(\[\.\.\.\]\)"):
        cfg.HOOKS = [HookBase()]
    with pytest.raises(ConfigError, match='Name a class or function as "module:Name"'):
        cfg.MODEL.NAME = wrong_parts.Linear


def test_a_loss_may_be_a_function_of_outputs_and_targets(folder):
    (folder / "case.yaml").write_text(
        "_BASE_: base.yaml\nMODEL: {LOSS: {NAME: 'torch.nn.functional:cross_entropy', ARGS: {label_smoothing: 0.1}}}\n"
    )
    with unchanged_logging():
        assert main(["train", "--config-file", "case.yaml"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train --config-file base.yaml MODEL.NAME MPL", "did you mean 'MLP'?"),
        ("train --config-file base.yaml --num-gpus 2 MODEL.NAME wrong_parts:Multi", "MODEL.OUTPUT_MAPPING"),
        ("config explain SOLVER.BASE_RL", "did you mean 'SOLVER.BASE_LR'?"),
    ],
)
def test_in_processes_of_their_own(words, says, folder):
    before = contents(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "hookline", *words.split()]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2, run.stderr
    assert says in run.stderr
    assert "Traceback" not in run.stderr
    assert contents(folder) == before
