"""Wrong command lines: each is refused with exit code 2 and one message, and nothing changes on disk."""

import sys
from pathlib import Path

import pytest
from ranks import HOOKLINE, ROOT, finish, fork
from refusing import TRAIN, assert_refused
from run_tools import run_command, run_tool

STEPS = "torch.optim.lr_scheduler:StepLR SOLVER.LR_SCHEDULER_ARGS.step_size 3"
OPTIMIZER = f"{TRAIN} MODEL.WEIGHTS done MODEL.WEIGHTS_OPTIMIZER True"
EXPORT = "export --checkpoint done --output"
# Each: the words after ``hookline``, and what the message says. done/ has a finished run.
COMMANDS = [
    ("trian --config-file base.yaml", "unknown command 'trian'; did you mean 'train'?"),
    ("frobnicate", "error: unknown command 'frobnicate'; hookline --help lists the commands"),
    ("--verison", "error: unknown option '--verison'; hookline --help lists the commands"),
    ("train --confg-file base.yaml", "did you mean '--config-file'?"),
    ("train --config-file bas.yaml", "bas.yaml: cannot read this config file: No such file or directory"),
    ("train --config-file digits/mpl.yaml", "did you mean 'digits/mlp.yaml'?"),
    ("train --config-file sub", "sub/config.yaml: cannot read this config file: No such file or directory"),
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
    (f"{TRAIN} --num-gpus 2 --dist-url file:///tmp/x", "--dist-url file:///tmp/x: several machines need the address"),
    (f"{TRAIN} --num-machines 2", "several machines need the address of machine 0, as tcp://"),
    (f"{TRAIN} --trainer wrong_parts:Liner", "there is no 'Liner' in 'wrong_parts'; did you mean"),
    (f"{TRAIN} --trainer wrong_parts:Linear", "--trainer: wrong_parts:Linear is no subclass of DefaultTrainer"),
    (f"{TRAIN} --resume OUTPUT_DIR done SOLVER.OPTIMIZER.NAME Adam", "holds the state of SGD; to resume, change it ba"),
    (f"{TRAIN} --resume OUTPUT_DIR done MODEL.ARGS.hidden [5]", "do not fit"),
    (f"{TRAIN} --resume OUTPUT_DIR done SOLVER.LR_SCHEDULER_NAME {STEPS}", "holds the state of LRMultiplier; to resu"),
    (f"{TRAIN} --resume OUTPUT_DIR done SOLVER.WEIGHT_DECAY_BIAS 0.3", "holds the optimizer's state of parameters in"),
    (f"{TRAIN} --resume FAST_DEV_RUN 1", "FAST_DEV_RUN: tries a new run, so leave out --resume"),
    (f"{TRAIN} FAST_DEV_RUN 1 CHECKPOINT.BEST.METRIC synthetic/acuracy", "did you mean 'synthetic/accuracy'?"),
    (f"{OPTIMIZER} SOLVER.OPTIMIZER.NAME AdamW", "the optimizer in done/model_final.pth does not fit AdamW: 'step'"),
    (f"{OPTIMIZER} SOLVER.WEIGHT_DECAY_BIAS 0.3", "loaded state dict has a different number of parameter groups"),
    (f"{OPTIMIZER} MODEL.ARGS.hidden [5]", "does not fit SGD: it has {(4, 8)} for a parameter of (5, 8)"),
    ("eval --config-file base.yaml", "MODEL.WEIGHTS: is not set; give the weights to evaluate: a file, or --resume"),
    ("eval --config-file base.yaml --resume", "OUTPUT_DIR: there is no complete checkpoint in run; copies of"),
    ("eval --config-file base.yaml --resume OUTPUT_DIR done MODEL.ARGS.hidden [5]", "another model"),
    ("eval --config-file base.yaml DATASETS.TEST []", "DATASETS.TEST: is empty, so there is nothing to evaluate"),
    ("predict --config-file base.yaml DATASETS.TEST []", "DATASETS.TEST: is empty, so there is nothing to predict"),
    ("config", "error: "),
    ("config explain SOLVER.BASE_RL", "there is no config key 'SOLVER.BASE_RL'; did you mean 'SOLVER.BASE_LR'?"),
    ("config explain SEED HOOKS", "error: hookline config explain: wrong number of words"),
    ("config list", "argument TOOL: invalid choice: 'list' (choose from 'explain', 'diff', 'check')"),
    ("config diff base.yaml none.yaml", "none.yaml: cannot read this config file: No such file or directory"),
    ("config check base.yaml MODEL.NAME MPL", "did you mean 'MLP'?"),
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
    (f"{EXPORT} base.yaml/net.pth", "base.yaml/net.pth: its folder cannot be created: File exists"),
    (f"{EXPORT} mine --format pth", "mine is a folder"),
    (f"{EXPORT} a.pth --weights averaged", "holds no averaged weights of the hooks EMA and SWA"),
    (f"{EXPORT} mine --max-shard-size 5GB", "mine: shards are written to a new or empty folder"),
    (f"{EXPORT} mine/log.txt --max-shard-size 5GB", "mine/log.txt: shards are written to a new or empty folder"),
    (f"{EXPORT} a.safetensors --max-shard-size 5GB", "a.safetensors: shards are written to a new or empty folder"),
    (f"{EXPORT} a --max-shard-size 5GiB", "'5GiB' is not the size of a shard; write, for example, 500MB or 5GB"),
    (f"{EXPORT} a --max-shard-size 0GB", "'0GB' is not the size of a shard"),
    (
        f"{EXPORT} a --max-shard-size 5GB --format pth",
        "only safetensors files are written in shards, not the format pth",
    ),
    (f"{EXPORT} a --max-shard-size 5GB --format torch-export", "written in shards, not the format torch-export"),
    ("export --checkpoint other.pth --output a.pt2 --trust-config", "name your own config with --config-file"),
    ("replay done --iter 3", "iterations 0 to 2"),
    ("replay done --iter -1", "iterations 0 to 2"),
    ("replay nowhere --iter 1", "no run of hookline"),
    ("replay done --iter 1 --set SEED", "--set"),
    ("diverge done run", "run: there is no run to compare (it has no config.yaml)"),
    ("diverge done mine", "mine: there is no run to compare (it has no metrics.json)"),
    ("diverge done sweep/a", "done and sweep/a have nothing to compare"),
    ("diverge done done --trainer os:path", "os:path is no subclass of DefaultTrainer"),
    ("find-lr --config-file base.yaml --min-lr 0", "find_lr: min_lr must be positive and less than max_lr"),
    ("find-lr --config-file base.yaml --min-lr 1 --max-lr 0.1", "less than max_lr; got 1.0 and 0.1"),
    ("find-lr --config-file base.yaml --num-iter 2", "find_lr: num_iter must be at least 3"),
    ("find-batch-size --config-file base.yaml", "the run's device is the CPU"),
    ("samples done --iter 3", "iterations 0 to 2"),
    ("plot", "error: no run is given; name its folder before the options"),
    ("plot swep", "error: swep: no such folder; did you mean 'sweep'?"),
    ("plot mine", "error: mine: no run, since no metrics.json, is in it or below it; a run writes the file"),
    ("plot other.pth", "error: other.pth: is not a run; name its folder, or its metrics.json"),
    ("compare wrong_config", "error: wrong_config/config.yaml:2: expected ',' or ']', but got "),
    ("plot sweep/a --out nowhere/x.png", "error: nowhere/x.png"),
    ("plot sweep/a --metrics accuracy", "did you mean 'test/accuracy'?"),
    ("plot sweep/a --out x.txt", "error: x.txt cannot be written (name a .png, .svg or .pdf)"),
    ("compare sweep --sort lost", "error: --sort: there is no metric 'lost'; did you mean 'loss'?"),
]
# Each: a script of tools/, its command line, and what the message says.
PLAIN, LAZY = "plain_train_net.py --config-file synthetic/mlp.yaml", "lazyconfig_train_net.py --config-file"
SCRIPTS = [
    ("train_net.py --config-fil base.yaml --rezume", "--rezume"),
    ("train_net.py --config-file base.yaml --eval-only --predict", "--eval-only and --predict"),
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


@pytest.mark.parametrize(("words", "says"), COMMANDS, ids=[words[:70] for words, _ in COMMANDS])
def test_a_wrong_command_is_refused(words, says, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert_refused(folder, says, lambda: run_command(words.split(), capsys))


@pytest.mark.parametrize(("words", "says"), SCRIPTS, ids=[words[:70] for words, _ in SCRIPTS])
def test_a_wrong_command_line_of_a_script_is_refused(words, says, folder, monkeypatch, capsys):
    if words.startswith(LAZY):
        pytest.importorskip("omegaconf")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    script, *arguments = words.replace("synthetic/", f"{ROOT}/configs/synthetic/").split()
    assert_refused(folder, says, lambda: run_tool(script, arguments, capsys))


@pytest.mark.parametrize("words", [f"{TRAIN} MODEL.NAME MPL", f"{TRAIN} --num-gpus 2 MODEL.NAME wrong_parts:Multi"])
def test_processes_of_their_own_refuse_it_too(words, folder):
    command = [sys.executable, HOOKLINE, *words.split()]
    path = str(Path(__file__).parent)
    assert_refused(folder, "MODEL.", lambda: finish(fork(command, folder, apart=True, PYTHONPATH=path)))
