"""What people do with hookline and its folders, and with scripts for detectron2: all of it trains, as it is.

Each use is a function that trains four steps, named after what the person does. A file that the person made,
:func:`mine`, still has its content at the end: under its name, under ``<name>.old``, or, for a log, at its beginning.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline
from hookline.cli import main
from hookline.config import CfgNode as CN
from hookline.config import get_cfg, global_cfg, set_global_cfg
from hookline.engine import DefaultTrainer, comm, default_argument_parser, default_setup, launch
from hookline.engine.checkpoint import save_weights
from hookline.engine.compat.utils import collect_env_info, setup_logger
from hookline.hooks import EMA, CallbackHook, EarlyStopping, HookBase

CONFIG = """
MODEL: {NAME: MLP, ARGS: {in_features: 8, num_classes: 4}, LOSS: {NAME: CrossEntropyLoss}, DEVICE: cpu}
DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {size: 32}}]}
DATALOADER: {BATCH_SIZE: 8}
SOLVER: {MAX_ITER: 4, WARMUP_ITERS: 0, STEPS: []}
LOG: {PERIOD: 2}
OUTPUT_DIR: out
"""

USES = []
MINE = {}


def use(function):
    USES.append(function)
    return function


def mine(path, content="mine"):
    """Write a file of the person, which must be unharmed at the end."""
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return keep(path)


def keep(path):
    """Make an existing file one that must be unharmed at the end."""
    MINE[Path(path).absolute()] = Path(path).read_bytes()
    return path


class Trainer(DefaultTrainer):
    pass


def train(cfg, resume=False):
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=resume)
    return trainer.train()


def merged(args, cfg=None):
    cfg = cfg or get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    return cfg


def set_up(args):
    cfg = merged(args)
    cfg.freeze()
    default_setup(cfg, args)
    return cfg


@pytest.fixture
def args(tmp_path, monkeypatch):
    """The parsed command line of a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "MINE", {})
    Path("mine.yaml").write_text(CONFIG)
    monkeypatch.setattr(sys, "argv", ["train_net.py", "--config-file", "mine.yaml", "SEED", "3"])
    yield default_argument_parser().parse_args()
    global_cfg.clear()


def check(result):
    """Check that a run trained four steps, wrote its files, and harmed none of the person's."""
    assert (result.iteration, result.reason) == (4, "completed")
    (metrics,) = (path for path in Path().rglob("metrics.json") if "previous_" not in str(path))
    assert json.loads(metrics.read_text().splitlines()[-1])["iteration"] in (3, 4)  # 4: the evaluation at the end
    assert (metrics.parent / "model_final.pth").exists()
    saved = get_cfg()
    saved.set_new_allowed(True)
    saved.merge_from_file(metrics.parent / "config.yaml")
    assert saved.SOLVER.MAX_ITER == 4
    for path, content in MINE.items():
        moved = path.parent.glob(f"previous_*/{path.name}")  # it has a name of a run's files
        places = [place for place in (path, *moved) if place.exists()]
        assert any(place.read_bytes() == content for place in places) or (
            path.name == "log.txt" and path.read_bytes().startswith(content)
        ), path


# ---------------------------------------------------------------------------- the config


@use
def usual(args):
    cfg = set_up(args)
    return train(cfg, args.resume)


@use
def logger_of_the_project(args):
    setup_logger(distributed_rank=comm.get_rank(), name="my_project", abbrev_name="mp")
    logging.getLogger("my_project.data").info("ready")
    return usual(args)


@use
def defrosted_after_the_setup(args):
    cfg = set_up(args)
    cfg.defrost()
    cfg.SOLVER.BASE_LR = 0.01
    cfg.TEST.EVAL_PERIOD = 0
    cfg.freeze()
    return train(cfg, args.resume)


@use
def keys_of_the_project(args):
    cfg = get_cfg()
    cfg.MODEL.MY_HEAD = CN()
    cfg.MODEL.MY_HEAD.DIM = 256
    cfg.SOLVER.BACKBONE_MULTIPLIER = 0.1
    cfg.INPUT = CN({"MIN_SIZE_TRAIN": (640,)})
    merged(args, cfg)
    cfg.merge_from_list(["MODEL.MY_HEAD.DIM", 128, "INPUT.MIN_SIZE_TRAIN", "(480, 640)"])
    cfg.freeze()
    default_setup(cfg, args)
    return train(cfg, args.resume)


@use
def new_keys_allowed(args):
    cfg = get_cfg()
    cfg.set_new_allowed(True)
    cfg.merge_from_file(args.config_file, allow_unsafe=True)
    cfg.merge_from_list(args.opts)
    cfg.MY_KEY = "x"
    default_setup(cfg, args)
    return train(cfg)


@use
def logger_if_there_is_none(args):
    logger = logging.getLogger("detectron2")
    if not logger.isEnabledFor(logging.INFO):
        setup_logger()
    cfg = merged(args)
    default_setup(cfg, args)
    logger.info("Running with full config:\n%s", cfg.dump())
    logger.info("Environment info:\n%s", collect_env_info())
    return train(cfg, args.resume)


@use
def logger_with_the_folder_first(args):
    cfg = merged(args)
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank())
    cfg.freeze()
    default_setup(cfg, args)
    return train(cfg, args.resume)


@use
def handler_of_the_script(args):
    cfg = merged(args)
    os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
    handler = logging.FileHandler(os.path.join(cfg.OUTPUT_DIR, "log.txt"))
    logging.getLogger("my_project").addHandler(handler)
    logging.getLogger("my_project").warning("begins")
    default_setup(cfg, args)
    try:
        return train(cfg, args.resume)
    finally:
        handler.close()


# ---------------------------------------------------------------------------- files in OUTPUT_DIR


@use
def config_dumped_after_the_trainer(args):
    cfg = merged(args)
    default_setup(cfg, args)
    trainer = Trainer(cfg)
    with open(os.path.join(cfg.OUTPUT_DIR, "config.yaml"), "w") as file:
        file.write(cfg.dump())
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


@use
def files_after_the_setup(args):
    cfg = set_up(args)
    if comm.is_main_process():
        os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
        with open(os.path.join(cfg.OUTPUT_DIR, "args.json"), "w") as file:
            json.dump(vars(args), file)
        shutil.copy(args.config_file, os.path.join(cfg.OUTPUT_DIR, "config.yaml"))
    comm.synchronize()
    return train(cfg, args.resume)


@use
def options_of_the_script(_):
    parser = default_argument_parser()
    parser.add_argument("--output-dir", default="own")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--eval-all", action="store_true")
    parser.add_argument("--resume", default="", metavar="PATH")
    args = parser.parse_args()
    cfg = merged(args)
    cfg.OUTPUT_DIR = args.output_dir
    cfg.freeze()
    default_setup(cfg, args)
    return train(cfg, resume=bool(args.resume))


@use
def parser_around_the_default_one(_):
    parser = argparse.ArgumentParser(parents=[default_argument_parser()], add_help=False)
    parser.add_argument("--dataset", default="synthetic")
    args = parser.parse_args()
    cfg = merged(args)
    cfg.DATASETS.TRAIN = (args.dataset,)
    default_setup(cfg, args)
    return train(cfg, args.resume)


@use
def parser_of_the_script(_):
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-file", default="")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("opts", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    cfg = set_up(args)
    return train(cfg)


@use
def launched(args):
    return launch(
        usual,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )


# ---------------------------------------------------------------------------- a folder with the person's files


@use
def output_of_the_shell_in_log_txt(args):
    """``python train_net.py > out/log.txt``."""
    os.mkdir("out")
    with open("out/log.txt", "a") as file, contextlib.redirect_stdout(file):
        print("begins", flush=True)
        keep("out/log.txt")
        return usual(args)


@use
def config_of_the_person_in_the_folder(args):
    mine("out/config.yaml", CONFIG)
    args.config_file = "out/config.yaml"
    return usual(args)


@use
def best_weights_of_a_hook_of_the_person(args):
    class SavesBest(HookBase):
        def after_step(self):
            save_weights(self.trainer.model, os.path.join(self.trainer.cfg.OUTPUT_DIR, "model_best.pth"))
            if self.trainer.iter == 3:
                keep("out/model_best.pth")

    trainer = Trainer(merged(args))
    trainer.register_hooks([SavesBest()])
    trainer.resume_or_load(resume=False)
    return trainer.train()


@use
def notes_and_code_beside_the_run(args):
    for name in ("notes.md", "metrics.csv.bak", "code/model.py", "previous_001/notes.md", "model_final.pth.mine"):
        mine(f"out/{name}")
    mine("out/model_final.pth", b"weights of a zoo")
    usual(args)
    return usual(args)


@use
def a_file_opened_after_the_trainer_is_built(args):
    trainer = Trainer(merged(args))
    mine(os.path.join(trainer.cfg.OUTPUT_DIR, "results.csv"), "step,loss\n")
    trainer.resume_or_load(resume=False)
    return trainer.train()


# ---------------------------------------------------------------------------- a folder of another run


@use
def weights_of_the_earlier_run_in_the_same_folder(args):
    usual(args)
    weights = Path("out/model_final.pth").read_bytes()
    args.opts += ["MODEL.WEIGHTS", "out/model_final.pth"]
    result = usual(args)
    assert Path("out/previous_001/model_final.pth").read_bytes() == weights
    return result


@use
def a_copy_of_a_running_run(args):
    """``cp -r running out``, and ``--resume`` in the copy while the other run goes on."""
    results = []

    def copy(trainer):
        if trainer.iter == 2:
            shutil.copytree("running", "out")
            cfg = merged(args)
            cfg.merge_from_list(["OUTPUT_DIR", "out"])
            results.append(train(cfg, resume=True))

    cfg = merged(args)
    cfg.merge_from_list(["OUTPUT_DIR", "running", "SOLVER.CHECKPOINT_PERIOD", 2, "SOLVER.MAX_ITER", 6])
    trainer = Trainer(cfg)
    trainer.register_hooks([CallbackHook(after_step=copy)])
    trainer.resume_or_load(resume=False)
    assert trainer.train().iteration == 6
    shutil.rmtree("running")
    return results[0]


@use
def a_run_without_its_records(args):
    """Copied by a pattern that leaves hidden files out."""
    stop_at_2(args)
    shutil.rmtree("out/.hookline")
    return train(merged(args), resume=True)


@use
def a_new_run_over_one_without_records(args):
    usual(args)
    shutil.rmtree("out/.hookline")
    result = usual(args)
    assert Path("out/previous_001/model_final.pth").exists()
    return result


def stop_at_2(args):
    trainer = Trainer(merged(args))
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.iter == 1 and t.request_stop("enough", 75))])
    trainer.resume_or_load(resume=False)
    with contextlib.suppress(SystemExit):
        trainer.train()
    mine("out/notes.md")


@use
def a_path_object_as_the_folder(args):
    cfg = merged(args)
    cfg.OUTPUT_DIR = Path("runs") / "first"
    default_setup(cfg, args)
    return train(cfg)


@use
def a_change_of_the_folder_after_the_trainer_is_built(args):
    trainer = Trainer(merged(args))
    trainer.resume_or_load(resume=False)
    os.mkdir("elsewhere")
    here = os.getcwd()
    os.chdir("elsewhere")
    result = trainer.train()
    assert os.listdir() == []
    os.chdir(here)
    return result


@use
def global_config(args):
    cfg = merged(args)
    set_global_cfg(cfg)
    cfg = cfg.clone()
    cfg.freeze()
    default_setup(cfg, args)
    if cfg.TEST.AUG.ENABLED:
        raise AssertionError
    return train(cfg, args.resume)


LINES = {
    "an empty section": "TEST:\nCHECKPOINT:\n  # PERIOD: 100",
    "a fraction of the run as warm-up": "SOLVER: {WARMUP_ITERS: 0.5}",
    "momentum of the base beside AdamW": "SOLVER: {OPTIMIZER: {NAME: AdamW}, MOMENTUM: 0.9, GAMMA: 0.5}",
    "early stopping on the training loss": "HOOKS: [{NAME: EarlyStopping, ARGS: {metric: total_loss, patience: 9}}]",
    "no test sets over a base with a best metric": "DATASETS: {TEST: []}",
    "lists without a value": "HOOKS:\nSOLVER: {STEPS: null}\nDATASETS: {TEST: }",
}


@pytest.mark.parametrize("name", LINES)
def test_a_config_over_a_base_trains(name, args):
    best = "TEST: {METRICS: [Accuracy]}\nCHECKPOINT: {BEST: {METRIC: synthetic/accuracy}}\n"
    Path("base.yaml").write_text(CONFIG + (best if "best" in name else ""))
    Path("mine.yaml").write_text(f"_BASE_: base.yaml\n{LINES[name]}\n")
    check(usual(args))


@use
def a_project_in_a_fresh_git_repository(args):
    os.makedirs("out/.git")
    mine("out/.git/HEAD", "ref: refs/heads/main")
    assert main(["new", "out"]) == 0
    return usual(args)


# ---------------------------------------------------------------------------- models, losses and hooks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x)


class NetWithLoss(Net):
    """Returns scores and loss, as models of transformers do."""

    def forward(self, x, targets=None):
        scores = self.layer(x)
        return scores, None if targets is None else F.cross_entropy(scores, targets)


def named_terms(scores, targets):
    return {"loss_class": F.cross_entropy(scores, targets), "loss_size": 0.1 * scores.pow(2).mean()}


def one_call(**arguments):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(32, 8, generator=generator), torch.randint(4, (32,), generator=generator)
    usual = {"model": Net, "loss": nn.CrossEntropyLoss(), "length": 4, "batch_size": 8, "seed": 1, "output_dir": "out"}
    return hookline.Trainer(train_data=data, test_data=data, **{**usual, **arguments}).train()


CALLS = {
    "a model that returns logits and loss": {"model": NetWithLoss, "loss": None, "metrics": ["Accuracy"]},
    "a loss with named terms": {"loss": named_terms},
    "a function in the config": {"loss": None, "config": {"MODEL.LOSS": named_terms}},
    "a class in the config": {"config": {"SOLVER.OPTIMIZER.NAME": torch.optim.Adam}},
    "two averages": {"hooks": [EMA(0.9), EMA(0.99)]},
    "one hook and one metric": {"hooks": EMA(0.9), "metrics": "Accuracy"},
    "numbers of numpy": {"length": np.int64(4), "lr": np.float32(0.1), "config": {"SOLVER.MOMENTUM": np.float64(0.5)}},
    "early stopping by a lambda": {
        "hooks": [EarlyStopping(lambda metrics: metrics["test/loss"], patience=9, mode="min")],
        "eval_period": 2,
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_one_call_trains(name, args):
    result = one_call(**CALLS[name])
    assert result.metrics.keys() >= ({"loss_class", "loss_size"} if named_terms in CALLS[name].values() else set())
    check(result)


@use
def hook_objects_in_a_second_trainer(_):
    hooks = [EMA(0.9), CallbackHook(after_step=lambda trainer: None)]
    one_call(hooks=hooks)
    return one_call(hooks=hooks)


@use
def an_evaluation_after_the_training(args):
    usual(args)
    args.opts += ["DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {"size": 16}}], "TEST.METRICS", ["Accuracy"]]
    cfg = merged(args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    result = trainer.train()
    assert "accuracy" in str(Trainer.test(cfg, trainer.model))
    return result


# ---------------------------------------------------------------------------- the test


@pytest.mark.parametrize("start", USES, ids=lambda start: start.__name__)
def test_a_legitimate_use_trains_and_leaves_the_persons_files_alone(start, args):
    check(start(args))
