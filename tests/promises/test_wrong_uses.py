"""Wrong uses: each is refused with exit code 2 and one message that names key, place and cure; nothing changes on disk.

This table is the only place that asserts the texts of messages.
"""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import wrong_parts
from forker import forker
from loggers import unchanged_logging
from ranks import HOOKLINE
from run_folders import make_run
from run_tools import run_command, run_tool
from torch import nn
from torch.utils.data import DataLoader

from hookline.cli import main
from hookline.config import ConfigError, get_cfg
from hookline.engine import Trainer
from hookline.hooks import HookBase

ROOT = Path(__file__).parents[2]
BASE = """
MODEL: {NAME: MLP, ARGS: {in_features: 8, num_classes: 4, hidden: [4]}, LOSS: {NAME: CrossEntropyLoss}, DEVICE: cpu}
DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {size: 64}}], TEST: [{NAME: synthetic, ARGS: {size: 32}}]}
SOLVER: {MAX_ITER: 3, WARMUP_ITERS: 0, STEPS: []}
TEST: {METRICS: [Accuracy]}
LOG: {PROGRESS_BAR: False, WRITERS: [JSONWriter]}
OUTPUT_DIR: run
"""

# Each: a line of a config file, and what the message says. Files are named: sub/case.yaml.
KEYS = [
    ("SOLVRE: {BASE_LR: 1}", "case.yaml: unknown key 'SOLVRE.BASE_LR'; did you mean 'SOLVER.BASE_LR'?"),
    ("SOLVER: {BASE_RL: 1}", "unknown key 'SOLVER.BASE_RL'; did you mean 'SOLVER.BASE_LR'?"),
    ("SOLVER: {LR: 1}", "did you mean 'SOLVER.BASE_LR'?"),
    ("TRAINER: {MAX_EPOCHS: 3}", "unknown key 'TRAINER.MAX_EPOCHS'"),
    ("EVAL_PERIOD: 1ep", "did you mean 'TEST.EVAL_PERIOD'?"),
    ("SOLVER.BASE_LR: 1", "write it nested"),
    ("SOLVER: {OPTIMIZER.ARGS: {betas: [0.8, 0.9]}}", "unknown key 'SOLVER.OPTIMIZER.ARGS'; write it nested"),
    ("SOLVER: {CLIP_GRADIENTS: 2.5}", 'CLIP_GRADIENTS: {ENABLED: True, CLIP_TYPE: "norm", CLIP_VALUE: 2.5}'),
    ("SOLVER: {IMS_PER_BATCH: 16}", "SOLVER.IMS_PER_BATCH was renamed to DATALOADER.BATCH_SIZE"),
    ("VERSION: 2", "VERSION: this hookline reads version 1, not 2 (detectron2's number: leave it out)"),
    ("SOLVER: 3", "SOLVER: expected a mapping of keys, got 3 (int)"),
    ("SOLVER: {MAX_ITER: 2h}", "'2h' is a time; write an int (iterations), '500it' or '2ep'. SOLVER.TIME_LIMIT stops"),
    ("SOLVER: {MAX_ITER: 3 weeks}", "'3 weeks' is not a duration; write an int (iterations), '500it' or '2ep'"),
    ("SOLVER: {MAX_ITER: -1ep}", "SOLVER.MAX_ITER: '-1ep' is negative; write an int (iterations), '500it' or '2ep'"),
    ("SOLVER: {TIME_LIMIT: 2ep}", "SOLVER.TIME_LIMIT: '2ep' is not a time; write '45s', '30min' or '2h'"),
    ("SEED: !!python/name:os.system x", "could not determine a constructor for the tag"),
    ("MODEL:\n\tNAME: MLP", "indent with spaces, not with a tab"),
    ("SEED: 1\nSEED: 2", "the key 'SEED' appears twice"),
    (f"SEED: {'[' * 400}{']' * 400}", "case.yaml: nested too deep"),
    ("# a comment\n" * 200_000, "case.yaml: larger than 1 MB"),
    (f"SEED: {10**30}", "SEED: must be at most "),
    ("SOLVER: {BASE_LR: nan}", "SOLVER.BASE_LR: expected float, got 'nan'"),
    ("SOLVER: {BASE_LR: .inf}", "SOLVER.BASE_LR: must be a finite number, not inf"),
    ("LOG: {GATHER_METRIC_PERIOD: 0}", "LOG.GATHER_METRIC_PERIOD: must be at least 1"),
]
MODEL = [
    ("MODEL: {NAME: MPL}", "MODEL.NAME: unknown model 'MPL'; did you mean 'MLP'? Known: "),
    ("MODEL: {NAME: 'wrong_parts:Liner'}", "there is no 'Liner' in 'wrong_parts'; did you mean 'Linear'?"),
    ("MODEL: {NAME: 'wrong_prats:Linear'}", "there is no module 'wrong_prats'"),
    ("MODEL: {NAME: 'beside:Net'}\nOUTPUT_DIR: x", "start in "),
    ("MODEL: {NAME: 'wrong_import:Net'}", "importing 'wrong_import' fails: ModuleNotFoundError: No module named"),
    ("MODEL: {NAME: 'os:system'}", "'os:system' is in Python's standard library, which has no components"),
    ("MODEL: {NAME: 'wrong_parts:NotAModel'}", "MODEL.NAME: 'wrong_parts:NotAModel' cannot be the model: it is not a"),
    ("MODEL: {NAME: 'wrong_parts:a_string'}", "MODEL.NAME: 'wrong_parts:a_string' cannot be the model: it returned an"),
    ("MODEL: {NAME: 'wrong_parts:number'}", "it is of type int, not a class or a function written in Python"),
    ("MODEL: {ARGS: {hiden: [3]}}", "MODEL.ARGS.hiden: MLP takes no argument 'hiden'; did you mean 'hidden'?"),
    ("MODEL: {ARGS: {num_classes: four}}", "MODEL.ARGS.num_classes: expected int, got 'four' (str)"),
    ("MODEL: {NAME: 'wrong_parts:NeedsArgument'}", "MODEL.ARGS.width: NeedsArgument needs the argument 'width'"),
    ("MODEL: {NAME: 'wrong_parts:FailsToBuild'}", "ValueError: width must be even, not 7 (wrong_parts.py:"),
    ("MODEL: {NAME: 'wrong_parts:Frozen'}", "MODEL.NAME: Frozen has no parameter that requires a gradient"),
    ("MODEL: {NAME: 'wrong_parts:NoForward'}", 'Module [NoForward] is missing the required "forward" function'),
    ("MODEL: {NAME: 'wrong_parts:Multi'}", "Select one with MODEL.OUTPUT_MAPPING, such as {scores: input}"),
    (
        "MODEL: {NAME: 'wrong_parts:Multi', LOSS: {NAME: 'wrong_parts:loss_of_dict'}}",
        "the metric synthetic/accuracy takes one tensor, the model returned: scores, features. Select one with MODEL.",
    ),
    ("MODEL: {OUTPUT_MAPPING: {logits: input}}", "MODEL.OUTPUT_MAPPING needs outputs with names; the model returned a"),
    ("MODEL: {INPUT_MAPPING: {pixels: x}}", "MODEL.INPUT_MAPPING: MLP takes no 'x'. It takes: input"),
    ("MODEL: {NAME: 'wrong_parts:ReturnsNothing'}", "the model returned None: its forward() has no return statement"),
    ("MODEL: {LOSS: {NAME: CrossEntropy}}", "MODEL.LOSS.NAME: unknown loss 'CrossEntropy'; did you mean 'CrossEntrop"),
    ("MODEL: {LOSS: {ARGS: {smoothing: 0.1}}}", "takes no argument 'smoothing'; did you mean 'label_smoothing'?"),
    ("MODEL: {LOSS: CrossEntropyLoss}", "MODEL.LOSS: expected a mapping of keys, got 'CrossEntropyLoss' (str); set"),
    ("MODEL: {ACTIVATION_CHECKPOINTING: ['blocks.*']}", "MLP has no submodule and no class that matches 'blocks.*'"),
    ("MODEL: {DEVICE: gpu}", 'unknown device \'gpu\'; use "auto", "cpu", "cuda", "cuda:N" or "mps"'),
]
DATA = [
    ("DATASETS: {TRAIN: [synthetics]}", "unknown dataset 'synthetics'; did you mean 'synthetic'?"),
    ("DATASETS: {TRAIN: synthetic}", "expected a list of components, got 'synthetic'; write [synthetic]"),
    ("DATASETS: {TRAIN: []}", "DATASETS.TRAIN: is not set; give a --config-file that sets it"),
    ("DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {sise: 3}}]}", "takes no argument 'sise'; did you mean 'size'?"),
    ("DATASETS: {TRAIN: ['wrong_parts:MissingFile']}", "No such file or directory: 'no/such/file.csv' (wrong_"),
    ("DATASETS: {TRAIN: ['wrong_parts:Raises']}", "DATASETS.TRAIN[0] (wrong_parts:Raises): KeyError: \"no column 'lab"),
    ("DATASETS: {TRAIN: ['wrong_parts:NoLength']}", "NoLength has __getitem__() but no __len__(); it needs both"),
    ("DATASETS: {TRAIN: [{NAME: 'wrong_parts:rows', ARGS: {size: 0}}]}", "DATASETS.TRAIN[0]: the data set wrong"),
    ("DATASETS: {TEST: [synthetic, synthetic]}", 'give one of them another name, {NAME: "synthetic", AS: "other"}'),
    ("DATALOADER: {SAMPLER_TRAIN: EpochSampelr}", "did you mean 'EpochSampler'?"),
    ("DATALOADER: {COLLATE_FN: {NAME: padcollate}}", "did you mean 'pad_collate'?"),
    ("DATALOADER: {BATCH_SIZE: 100, DROP_LAST: True}", "no batch is left. Use smaller batches, or set DROP_LAST"),
]
SOLVER = [
    ("SOLVER: {OPTIMIZER: {NAME: AdamWW}}", "unknown optimizer 'AdamWW'; did you mean 'AdamW'?"),
    ("SOLVER: {OPTIMIZER: {NAME: AdamW, ARGS: {beta: 0.9}}}", "takes no argument 'beta'; did you mean 'betas'?"),
    ("SOLVER: {OPTIMIZER: {NAME: AdamW, ARGS: {betas: [2.0, 3.0]}}}", "Invalid beta parameter at index 0: 2.0"),
    ("SOLVER: {OPTIMIZER: {NAME: AdamW, ARGS: {lr: 0.9}}}", "set the learning rate with SOLVER.BASE_LR"),
    ("SOLVER: {LR_SCHEDULER_NAME: WarmupCosine}", "did you mean 'WarmupCosineLR'?"),
    ("SOLVER: {LR_SCHEDULER_NAME: 'torch.optim.lr_scheduler:ReduceLROnPlateau'}", "needs the name of a metric"),
    ("SOLVER: {STEPS: 30}", "30 is not a list; write lengths as (3000, 4000) or ('10ep', '15ep')"),
    ("SOLVER: {PARAM_GROUPS: [{PARAMS: backbone, LR_FACTOR: 0.1}]}", "no class that matches 'backbone'. Submodules:"),
    ("SOLVER: {PARAM_GROUPS: [{PARAM: '0', LR_FACTOR: 0.1}]}", "a rule takes no argument 'PARAM'; did you mean 'PAR"),
    ("SOLVER: {ACCUMULATION_STEPS: 17}", "a batch of 16 samples (DATALOADER.BATCH_SIZE) cannot be cut into 17"),
    ("SOLVER: {AMP: {ENABLED: True, DTYPE: fp16}}", "'fp16' is not one of 'bfloat16', 'float16'"),
]
HOOKS = [
    ("HOOKS: [EarlyStoping]", "HOOKS[0].NAME: unknown hook 'EarlyStoping'; did you mean 'EarlyStopping'?"),
    ("HOOKS: {EMA: {decay: 0.9}}", "expected a list of components, got {'EMA': {'decay': 0.9}}; write [{NAME: EMA, AR"),
    ("HOOKS: [{NAM: EMA}]", "a component has the keys NAME and ARGS, not 'NAM'; did you mean 'NAME'?"),
    ("HOOKS: [{NAME: EMA, ARGS: {deacy: 1}}]", "EMA takes no argument 'deacy'; did you mean 'decay'?"),
    ("HOOKS: [{NAME: EMA, ARGS: {decay: 2.0}}]", "HOOKS[0]: EMA: decay must be at least 0 and less than 1, not 2.0"),
    ("HOOKS: [{NAME: EvalHook, ARGS: {period: 3}}]", "HOOKS[0].ARGS.period: EvalHook takes no argument"),
    ("HOOKS: ['wrong_parts:Watcher']", "HOOKS[0].ARGS.every: Watcher needs the argument 'every', which is not given"),
    ("HOOKS: ['wrong_parts:NotAHook']", "'wrong_parts:NotAHook' cannot be the hook: it is not a subclass of HookBase"),
    ("HOOKS: ['wrong_parts:FailsToStart']", "HOOKS[0] (wrong_parts:FailsToStart): RuntimeError: no connection to the"),
    ("HOOKS: [IterationTimer]", "HOOKS[0]: every run already has one IterationTimer; remove this one"),
    ("HOOKS: [{NAME: TimeLimit, ARGS: {limit: 2h}}]\nSOLVER: {TIME_LIMIT: 1h}", "HOOKS[0]"),
    ("HOOKS: [{NAME: EarlyStopping, ARGS: {metric: synthetic/acuracy}}]", "did you mean 'synthetic/accuracy'?"),
    ("LOG: {WRITERS: [Tensorboard]}", "unknown writer 'Tensorboard'; did you mean 'TensorboardXWriter'?"),
    ("TEST: {METRICS: [Acuracy]}", "unknown metric 'Acuracy'; did you mean 'Accuracy'?"),
    ("TEST: {METRICS: []}", "TEST.METRICS is empty"),
    ("TEST: {EXPECTED_RESULTS: [[synthetic, accuracy, 0.9]]}", "is not [set, metric, expected value, tolerance]"),
    ("TEST: {EXPECTED_RESULTS: [[a, accuracy, 0.9, 0.1]]}", "there is no 'a/accuracy' among synthetic/"),
    ("TEST: {PREDICTIONS_FORMAT: xml}", "'xml' is not one of 'jsonl', 'csv', 'npz'"),
    ("CHECKPOINT: {BEST: {METRIC: synthetic/acc}}", "did you mean 'synthetic/accuracy'?"),
    ("CHECKPOINT: {BEST: {KEEP: 0}}", "CHECKPOINT.BEST.KEEP: must be at least 1"),
    ("CHECKPOINT: {LOAD_BEST_AT_END: True}", "CHECKPOINT.LOAD_BEST_AT_END: needs CHECKPOINT.BEST.METRIC"),
]
FILES_AND_RANKS = [
    ("MODEL: {WEIGHTS: bse.yaml}", "MODEL.WEIGHTS: there is no file bse.yaml; did you mean 'base.yaml'?"),
    ("MODEL: {WEIGHTS: base.yaml}", "base.yaml is corrupt, or is not a checkpoint"),
    ("MODEL: {WEIGHTS: mine}", "MODEL.WEIGHTS: mine is a folder without last_checkpoint"),
    ("MODEL: {WEIGHTS: /dev/null}", "there is no file /dev/null"),
    ("MODEL: {WEIGHTS: done, WEIGHTS_FROM: ema}", "MODEL.WEIGHTS_FROM: 'ema' is not one of "),
    ("MODEL: {WEIGHTS: done, WEIGHTS_STRICT: True, ARGS: {hidden: [5]}}", "done does not fit the model exactly"),
    ("MODEL: {WEIGHTS: other.pth}", "other.pth"),
    ("MODEL: {WEIGHTS_OPTIMIZER: True}", "MODEL.WEIGHTS_OPTIMIZER: needs MODEL.WEIGHTS, the checkpoint to load"),
    ("OUTPUT_DIR: ''", "OUTPUT_DIR: is empty; give the run a folder"),
    ("OUTPUT_DIR: base.yaml", "base.yaml is not a folder"),
    ("OUTPUT_DIR: base.yaml/run", "OUTPUT_DIR: "),
    ("OUTPUT_DIR: s3://bucket/run", "is a URI; a run writes to a local folder"),
    ("PARALLEL: {NAME: dpp}", "PARALLEL.NAME: unknown strategy 'dpp'; did you mean 'ddp'?"),
    ("PARALLEL: {NAME: ddp, ARGS: {find_unused: True}}", "did you mean 'find_unused_parameters'?"),
]
TRAIN = "train --config-file base.yaml"
# Each: the words after ``hookline``, and what the message says. done/ has a finished run.
COMMANDS = [
    ("trian --config-file base.yaml", "unknown command 'trian'; did you mean 'train'?"),
    ("frobnicate", "error: unknown command 'frobnicate'; hookline --help lists the commands"),
    ("--verison", "error: unknown option '--verison'; hookline --help lists the commands"),
    ("train --confg-file base.yaml", "did you mean '--config-file'?"),
    ("train --config-file bas.yaml", "bas.yaml: cannot read this config file: No such file or directory"),
    ("train --config-file digits/mpl.yaml", "did you mean 'digits/mlp.yaml'?"),
    ("train --config-file sub", "sub/config.yaml: cannot read this config file: No such file or directory"),
    ("train --config-file chain/0.yaml", "nested too deep"),
    ("train --config-file zero.yaml", "zero.yaml: larger than 1 MB"),
    ("train", "MODEL.NAME: is not set; give a --config-file that sets it"),
    (f"{TRAIN} SEED", "'SEED' at the end has no value; give pairs KEY VALUE, or KEY=VALUE"),
    (f"{TRAIN} SEED {'9' * 5000}", "SEED: expected int, got "),
    (f"{TRAIN} SOLVER.BASE_RL 0.1", "command line: unknown key 'SOLVER.BASE_RL'; did you mean 'SOLVER.BASE_LR'?"),
    (f"{TRAIN} SOLVER.BASE_LR=fast", "SOLVER.BASE_LR: expected float, got 'fast' (str)"),
    (f"{TRAIN} --SOLVER.BASE_LR 0.1", "write config keys without dashes: SOLVER.BASE_LR VALUE"),
    (f"{TRAIN} --lr 0.1", "write config keys without dashes: SOLVER.BASE_LR VALUE"),
    (f"{TRAIN} --epochs 3", 'SOLVER.MAX_ITER VALUE, such as "3ep" for 3 epochs'),
    (f"{TRAIN} --devices 2", "unrecognized arguments: --devices; did you mean '--num-gpus'?"),
    (f"{TRAIN} SOLVER.EPOCHS 3", """did you mean 'SOLVER.MAX_ITER', such as "3ep" for 3 epochs?"""),
    (f"{TRAIN} CHECKPOINT.PERIOD 3", "did you mean 'SOLVER.CHECKPOINT_PERIOD'?"),
    (f"{TRAIN} TEST.METRIC x", "did you mean 'TEST.METRICS'?"),
    ("train synthetic/mlp.yaml", "'synthetic/mlp.yaml' is a file: write --config-file synthetic/mlp.yaml"),
    ("check-data", "no data set is named; give a --config-file"),
    (f"{TRAIN} --eval-only", "unrecognized arguments: --eval-only"),
    (f"{TRAIN} --num-gpus 0", "--machine-rank 0: the numbers must be at least 1"),
    (f"{TRAIN} --num-gpus two", "argument --num-gpus: invalid int value: 'two'"),
    (f"{TRAIN} --num-gpus 2 MODEL.DEVICE cuda", "MODEL.DEVICE: 'cuda' is not available"),
    (f"{TRAIN} --num-machines 2 --machine-rank 2", "and the rank from 0 to --num-machines - 1"),
    (f"{TRAIN} --num-machines 2", "several machines need the address of machine 0, as tcp://"),
    (f"{TRAIN} --trainer wrong_parts:Liner", "there is no 'Liner' in 'wrong_parts'; did you mean"),
    (f"{TRAIN} --trainer wrong_parts:Linear", "--trainer: wrong_parts:Linear is no subclass of DefaultTrainer"),
    (f"{TRAIN} --resume OUTPUT_DIR done SOLVER.OPTIMIZER.NAME Adam", "holds the state of SGD; to resume, change it ba"),
    (f"{TRAIN} --resume OUTPUT_DIR done MODEL.ARGS.hidden [5]", "do not fit"),
    ("eval --config-file base.yaml", "MODEL.WEIGHTS: is not set; give the weights to evaluate: a file, or --resume"),
    ("eval --config-file base.yaml --resume", "OUTPUT_DIR: there is no checkpoint in run to evaluate"),
    ("eval --config-file base.yaml --resume OUTPUT_DIR done MODEL.ARGS.hidden [5]", "another model"),
    ("eval --config-file base.yaml DATASETS.TEST []", "DATASETS.TEST: is empty, so there is nothing to evaluate"),
    ("predict --config-file base.yaml DATASETS.TEST []", "DATASETS.TEST: is empty, so there is nothing to predict"),
    ("config", "error: "),
    ("config explain SOLVER.BASE_RL", "there is no config key 'SOLVER.BASE_RL'; did you mean 'SOLVER.BASE_LR'?"),
    ("config explain SEED HOOKS", "error: hookline config explain: wrong number of words"),
    ("config list modle", "there is no registry 'modle'; did you mean 'MODEL'? Known: MODEL, LOSS, "),
    ("config diff base.yaml none.yaml", "none.yaml: cannot read this config file: No such file or directory"),
    ("config diff fifo base.yaml", "fifo/config.yaml: is not a regular file"),
    ("config check base.yaml MODEL.NAME MPL", "did you mean 'MLP'?"),
    ("config exlpain SEED", "did you mean 'explain'?"),
    ("new", "error: the following arguments are required: FOLDER"),
    ("new mine", "error: "),
    ("new base.yaml/inside", "error: "),
    ("find-batch-size --max-memory 1", "error: unrecognized arguments: --max-memory"),
    ("inspect don", "error: there is no file don; did you mean 'done'"),
    ("inspect mine", "error: mine is a folder without last_checkpoint"),
    ("inspect done mine", "unrecognized arguments: mine"),
    ("export --output a.pth", "--checkpoint"),
    ("export --checkpoint don --output a.pth", "there is no file don; did you mean 'done'"),
    ("export --checkpoint done --output a.xyz", "the extension names no format"),
    ("export --checkpoint done --output a.pth --config-file base.yaml", "are for whole programs"),
    ("export --checkpoint done --output a.pth --weights best", "invalid choice"),
    ("export --checkpoint done --output a.pt2 --dtype float16", "--dtype"),
    ("export --checkpoint done --output a.pt2", "add --trust-config"),
    ("export --checkpoint done --output a.pt2 --trust-config SEEED 1", "did you mean 'SEED'"),
    ("export --checkpoint other.pth --output a.pt2 --trust-config", "name your own config with --config-file"),
    ("replay done --iter 3", "iterations 0 to 2"),
    ("replay nowhere --iter 1", "no run of hookline"),
    ("replay done --iter 1 --set SEED", "--set"),
    ("samples done --iter 3", "iterations 0 to 2"),
    ("plot", "error: no run is given; name its folder before the options"),
    ("plot swep", "error: swep: no such folder; did you mean 'sweep'?"),
    ("plot sweep/a --metrics accuracy", "did you mean 'test/accuracy'?"),
    ("plot sweep/a --out x.txt", "error: x.txt cannot be written (name a .png, .svg or .pdf)"),
    ("compare sweep --sort lost", "error: --sort: there is no metric 'lost'; did you mean 'loss'?"),
]
# Each: a script of tools/, its command line, and what the message says.
PLAIN, LAZY = "plain_train_net.py --config-file synthetic/mlp.yaml", "lazyconfig_train_net.py --config-file"
SCRIPTS = [
    ("train_net.py --config-fil base.yaml --rezume", "--rezume"),
    ("train_net.py --config-file base.yaml --eval-only", "MODEL.WEIGHTS: is not set; give the weights to evaluate"),
    ("train_net.py --config-file base.yaml --dry-run --resume OUTPUT_DIR done MODEL.ARGS.hidden [5]", "do not fit"),
    (f"{PLAIN} SOLVER.BASE_LRR 0.1", "did you mean 'SOLVER.BASE_LR'"),
    (f"{PLAIN} MODEL.WEIGHTS nowhere.pth", "MODEL.WEIGHTS: there is no file nowhere.pth"),
    (f"{PLAIN} --num-gpus 2", "in one process"),
    (f"{PLAIN} --predict", "--predict: this loop has no such option"),
    (f"{PLAIN} SOLVER.AMP.ENABLED True", "SOLVER.AMP.ENABLED: this loop does not follow the key"),
    (f"{LAZY} synthetic/mlp_lazy.py train.max_itr=3", "there is no such key; did you mean 'train.max_it"),
    (f"{LAZY} synthetic/mlp_lazy.py train.output_dir=mine +model.widht=3", "unexpected keyword argument 'widht'"),
    (f"{LAZY} synthetic/mlp_lazy.py --eval-only", "mlp_lazy.py: there is no train.init_checkpoint"),
    (f"{LAZY} synthetic/mlp_lazy.py --predict", "--predict: is for YAML configs and tools/train_net.py"),
    (f"{LAZY} bad_syntax.py", "bad_syntax.py:1: '(' was never closed"),
    (f"{LAZY} bad.py", "bad.py: there is no optimizer"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with configs, files of the user and finished runs. No test changes it."""
    folder = tmp_path_factory.mktemp("wrong_uses")
    (folder / "base.yaml").write_text(BASE)
    for name in ("mine/config.yaml", "mine/log.txt", "mine/model.py", "mine/model_best.pth", "sub/beside.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "fifo").mkdir()
    os.mkfifo(folder / "fifo/config.yaml")
    (folder / "wrong_import.py").write_text("import no_such_package_of_anyone\n")
    (folder / "chain").mkdir()
    for number in range(500):
        (folder / f"chain/{number}.yaml").write_text(f"_BASE_: {number + 1}.yaml\n")
    (folder / "zero.yaml").symlink_to("/dev/zero")
    (folder / "bad_syntax.py").write_text("model = (\n")
    (folder / "bad.py").write_text("from hookline.config import LazyCall as L\nmodel = L(dict)(x=1)\n")
    torch.save({"something": torch.ones(3)}, folder / "other.pth")
    make_run(folder / "sweep/a", config={})
    with contextlib.chdir(folder), unchanged_logging():
        assert main([*TRAIN.split(), "OUTPUT_DIR", "done", "SEED", "1"]) == 0
    return folder


def contents(folder):
    """All paths, with their times of change; that of a run's lock changes when somebody asks for it."""
    ignored = {"__pycache__", "lock"}
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*") if ignored.isdisjoint(path.parts)}


def assert_refused(folder, says, run):
    """Assert that a program ends with 2 and one message."""
    before = contents(folder)
    code, _, err = run()
    assert code == 2, err
    assert err.count("error: ") == 1, err
    assert "Traceback" not in err
    assert says in err
    assert contents(folder) == before


@pytest.mark.parametrize(("line", "says"), [*KEYS, *MODEL, *DATA, *SOLVER, *HOOKS, *FILES_AND_RANKS])
def test_a_wrong_config_is_refused(line, says, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    Path("sub/case.yaml").write_text(f"_BASE_: ../base.yaml\n{line}\n")
    assert_refused(folder, says, lambda: run_command(["train", "--config-file", "sub/case.yaml"], capsys))


@pytest.mark.parametrize(("words", "says"), COMMANDS)
def test_a_wrong_command_is_refused(words, says, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert_refused(folder, says, lambda: run_command(words.split(), capsys))


@pytest.mark.parametrize(("words", "says"), SCRIPTS)
def test_a_wrong_command_line_of_a_script_is_refused(words, says, folder, monkeypatch, capsys):
    if words.startswith(LAZY):
        pytest.importorskip("omegaconf")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    script, *arguments = words.replace("synthetic/", f"{ROOT}/configs/synthetic/").split()
    assert_refused(folder, says, lambda: run_tool(script, arguments, capsys))


@pytest.mark.parametrize("words", [f"{TRAIN} MODEL.NAME MPL", f"{TRAIN} --num-gpus 2 MODEL.NAME wrong_parts:Multi"])
def test_processes_of_their_own_refuse_it_too(words, folder):
    def run():
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        process = forker.start([HOOKLINE, *words.split()], folder, environment, apart=True)
        return process.wait(120), *process.communicate()

    assert_refused(folder, "MODEL.", run)


# ---------------------------------------------------------------------- found at the first training batch

LATE = [
    ("MODEL: {NAME: 'wrong_parts:Detached'}", "the loss does not depend on the model's parameters"),
    ("MODEL: {LOSS: {NAME: 'wrong_parts:not_a_scalar'}}", "MODEL.LOSS must return a scalar tensor"),
    ("MODEL: {ARGS: {num_classes: 2}}", "is not a class: the model's output has fewer classes (its num_classes"),
    ("DATASETS: {TRAIN: ['wrong_parts:Ragged']}", 'COLLATE_FN names what makes batches: "pad_collate", or a function'),
    ("DATASETS: {TRAIN: ['wrong_parts:Objects']}", "DATALOADER.COLLATE_FN names what makes batches"),
    ("DATASETS: {TRAIN: ['wrong_parts:Named']}", "The batch has: x, answer. MODEL.LOSS and targets need one"),
]


@pytest.mark.parametrize(("line", "says"), LATE)
def test_what_the_first_batch_shows_ends_the_run_with_one_message(line, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("case.yaml").write_text(f"{BASE}\n")
    Path("late.yaml").write_text(f"_BASE_: case.yaml\n{line}\n")
    code, _, err = run_command(["train", "--config-file", "late.yaml"], capsys)
    assert code == 2
    assert says in err[err.index("error: ") :]
    assert "Traceback" not in err


JUNK_STATES = [
    (3, "there is no intact checkpoint"),
    ({"iteration": -5}, "there is no intact checkpoint"),
    ({"hooks": 3}, "the state of the hooks in the checkpoint is 3, and a dict is needed"),
    ({"hooks": {"LRScheduler": 3}}, "the state of the hook LRScheduler in the checkpoint is 3, and a dict is needed"),
    ({"hooks": {"BestCheckpointer": {"best": [[0.1, "x"]], "outdated": []}}}, "lists of best and outdated weights are"),
    ({"optimizer": {"state": 3, "param_groups": "x"}}, "the optimizer's state['state'] is 3, and a dict is needed"),
    ({"storage": {"histories": 3}}, "the metrics in the checkpoint"),
]


@pytest.mark.parametrize(("junk", "says"), JUNK_STATES, ids=str)
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


# ---------------------------------------------------------------------- Python

X, Y = torch.zeros(32, 8), torch.arange(32) % 4
PYTHON = [
    ({"callbacks": []}, "Trainer() takes no argument 'callbacks': it is called hooks, hooks=..."),
    ({"max_epochs": 3}, "Trainer() takes no argument 'max_epochs': it is called length, length='3ep'"),
    ({"max_steps": 3}, "it is called length, length=3"),
    ({"early_stopping": 3}, 'it is called hooks, hooks=["EarlyStopping"]'),
    ({"resume_from_checkpoint": "last"}, "it is called resume, train(resume='last')"),
    ({"devices": 1}, "processes are started by torchrun, by launch(), or by --num-gpus"),
    ({"val_data": 3}, "it is called test_data"),
    ({"precision": 16}, 'it is a key, config={"SOLVER.AMP.ENABLED": ...}'),
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
    ({"test_data": (X, Y), "metrics": [lambda: 0.0]}, "takes two arguments, outputs and targets"),
    ({"train_data": (X, Y[:3])}, "expected tensors of the same length, got [(32, 8), (3,)]"),
    ({"hooks": {"EMA": {"decay": 0.9}}}, 'Trainer(hooks=...): expected a list such as ["EMA"] or [{"NAME": "EMA"'),
    ({"train_data": (np.zeros((4, 8), "f4"), np.array(["cat", "dog"] * 2))}, "the labels are strings: number them"),
    ({"hooks": {HookBase()}}, "Trainer(hooks=...): expected a list: a set has no certain order"),
    ({"hooks": [3]}, "HOOKS[0].NAME: <object builtins.int> cannot be the hook"),
    ({"config": {"SOLVER.BASE_RL": 3}}, "Trainer(config=...): unknown key 'SOLVER.BASE_RL'; did you mean"),
]


@pytest.mark.parametrize(("arguments", "says"), PYTHON)
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
    with pytest.raises(ConfigError, match=r"HOOKS: entry 0: .*trainer.register_hooks\(\[\.\.\.\]\)"):
        cfg.HOOKS = [HookBase()]
    with pytest.raises(ConfigError, match='Name a class or function as "module:Name"'):
        cfg.MODEL.NAME = wrong_parts.Linear
