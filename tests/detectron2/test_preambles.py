"""The first lines of scripts for detectron2: however they set up config, folder and loggers, the run trains.

Comments "folder" mark those that depend on what a run does with files that are in OUTPUT_DIR before it begins.
"""

import argparse
import datetime
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from hookline.config import CfgNode as CN
from hookline.config import get_cfg, set_global_cfg
from hookline.engine import DefaultTrainer, comm, default_argument_parser, default_setup, launch
from hookline.engine.compat.collect_env import collect_env_info
from hookline.engine.compat.env import seed_all_rng
from hookline.engine.compat.file_io import PathManager
from hookline.engine.compat.logger import setup_logger

CONFIG = """
MODEL: {NAME: MLP, ARGS: {in_features: 8, num_classes: 4}, LOSS: {NAME: CrossEntropyLoss}, DEVICE: cpu}
DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {size: 32}}]}
DATALOADER: {BATCH_SIZE: 8}
SOLVER: {MAX_ITER: 4, WARMUP_ITERS: 0, STEPS: []}
LOG: {PERIOD: 2}
OUTPUT_DIR: out
"""

PREAMBLES = []


def preamble(function):
    PREAMBLES.append(function)
    return function


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


@pytest.fixture
def args(tmp_path, monkeypatch):
    """The parsed command line of a script."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(CONFIG)
    monkeypatch.setattr(sys, "argv", ["train_net.py", "--config-file", "mine.yaml", "SEED", "3"])
    return default_argument_parser().parse_args()


# ---------------------------------------------------------------------------- the config


@preamble
def usual(args):
    cfg = merged(args)
    cfg.freeze()
    default_setup(cfg, args)
    return train(cfg, args.resume)


@preamble
def without_freeze(args):
    cfg = merged(args)
    default_setup(cfg, args)
    cfg.SOLVER.BASE_LR = 0.01
    return train(cfg, args.resume)


@preamble
def defrosted_after_the_setup(args):
    cfg = merged(args)
    cfg.freeze()
    default_setup(cfg, args)
    cfg.defrost()
    cfg.SOLVER.BASE_LR = 0.01
    cfg.TEST.EVAL_PERIOD = 0
    cfg.freeze()
    return train(cfg, args.resume)


@preamble
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


@preamble
def new_keys_allowed(args):
    cfg = get_cfg()
    cfg.set_new_allowed(True)
    cfg.merge_from_file(args.config_file, allow_unsafe=True)
    cfg.merge_from_list(args.opts)
    cfg.MY_KEY = "x"
    default_setup(cfg, args)
    return train(cfg)


@preamble
def global_config(args):
    cfg = merged(args)
    set_global_cfg(cfg)
    cfg = cfg.clone()
    cfg.freeze()
    default_setup(cfg, args)
    if cfg.TEST.AUG.ENABLED:
        raise AssertionError
    return train(cfg, args.resume)


@preamble
def seeded_by_the_script(args):
    cfg = merged(args)
    cfg.SEED = 42
    seed_all_rng(cfg.SEED)
    torch.backends.cudnn.benchmark = True
    cfg.freeze()
    default_setup(cfg, args)
    return train(cfg, args.resume)


# ---------------------------------------------------------------------------- loggers


@preamble
def logger_first(args):
    setup_logger()
    return usual(args)


@preamble
def logger_of_the_project(args):
    cfg = merged(args)
    cfg.freeze()
    default_setup(cfg, args)
    setup_logger(distributed_rank=comm.get_rank(), name="my_project", abbrev_name="mp")
    logging.getLogger("my_project.data").info("ready")
    return train(cfg, args.resume)


@preamble
def logger_if_there_is_none(args):
    logger = logging.getLogger("detectron2")
    if not logger.isEnabledFor(logging.INFO):
        setup_logger()
    cfg = merged(args)
    default_setup(cfg, args)
    logger.info("Running with full config:\n%s", cfg.dump())
    logger.info("Environment info:\n%s", collect_env_info())
    return train(cfg, args.resume)


@preamble  # folder
def logger_with_the_folder_first(args):
    cfg = merged(args)
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank())
    cfg.freeze()
    default_setup(cfg, args)
    return train(cfg, args.resume)


@preamble  # folder
def loggers_with_the_folder_after_the_setup(args):
    cfg = merged(args)
    cfg.freeze()
    default_setup(cfg, args)
    for name in ("fvcore", "my_project"):
        setup_logger(output=cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name=name)
    return train(cfg, args.resume)


@preamble  # folder
def logger_without_default_setup(args):
    cfg = merged(args)
    setup_logger(output=os.path.join(cfg.OUTPUT_DIR, "log.txt"), name="my_project")
    return train(cfg, args.resume)


@preamble  # folder
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


@preamble
def folder_made_first(args):
    cfg = merged(args)
    cfg.OUTPUT_DIR = os.path.join("runs", datetime.datetime.now().strftime("%Y%m%d_%H%M%S"))
    os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
    cfg.freeze()
    default_setup(cfg, args)
    return train(cfg, args.resume)


@preamble
def without_default_setup(args):
    cfg = merged(args)
    os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
    return train(cfg, args.resume)


@preamble  # folder
def config_dumped_first(args):
    cfg = merged(args)
    os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
    with open(os.path.join(cfg.OUTPUT_DIR, "config.yaml"), "w") as file:
        file.write(cfg.dump())
    cfg.freeze()
    default_setup(cfg, args)
    return train(cfg, args.resume)


@preamble  # folder
def config_dumped_after_the_setup(args):
    cfg = merged(args)
    cfg.freeze()
    default_setup(cfg, args)
    PathManager.mkdirs(cfg.OUTPUT_DIR)
    with PathManager.open(os.path.join(cfg.OUTPUT_DIR, "config.yaml"), "w") as file:
        file.write(cfg.dump())
    return train(cfg, args.resume)


@preamble  # folder
def config_dumped_after_the_trainer(args):
    cfg = merged(args)
    default_setup(cfg, args)
    trainer = Trainer(cfg)
    with open(os.path.join(cfg.OUTPUT_DIR, "config.yaml"), "w") as file:
        file.write(cfg.dump())
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


@preamble  # folder
def files_after_the_setup(args):
    cfg = merged(args)
    cfg.freeze()
    default_setup(cfg, args)
    if comm.is_main_process():
        os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
        with open(os.path.join(cfg.OUTPUT_DIR, "args.json"), "w") as file:
            json.dump(vars(args), file)
        shutil.copy(args.config_file, os.path.join(cfg.OUTPUT_DIR, "config.yaml"))
    comm.synchronize()
    return train(cfg, args.resume)


# ---------------------------------------------------------------------------- options


@preamble
def options_of_the_script(_):
    parser = default_argument_parser()
    parser.add_argument("--output-dir", default="own")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--eval-all", action="store_true")
    args = parser.parse_args()
    cfg = merged(args)
    cfg.OUTPUT_DIR = args.output_dir
    cfg.freeze()
    default_setup(cfg, args)
    return train(cfg, args.resume)


@preamble
def resume_is_a_path(_):
    parser = default_argument_parser()
    parser.add_argument("--resume", default="", metavar="PATH")
    args = parser.parse_args()
    cfg = merged(args)
    default_setup(cfg, args)
    return train(cfg, resume=bool(args.resume))


@preamble
def parser_around_the_default_one(_):
    parser = argparse.ArgumentParser(parents=[default_argument_parser()], add_help=False)
    parser.add_argument("--dataset", default="synthetic")
    args = parser.parse_args()
    cfg = merged(args)
    cfg.DATASETS.TRAIN = (args.dataset,)
    default_setup(cfg, args)
    return train(cfg, args.resume)


@preamble
def parser_of_the_script(_):
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-file", default="")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("opts", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    cfg = merged(args)
    cfg.freeze()
    default_setup(cfg, args)
    return train(cfg)


@preamble
def launched(args):
    return launch(
        usual,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )


# ---------------------------------------------------------------------------- tests


@pytest.mark.parametrize("start", PREAMBLES, ids=lambda start: start.__name__)
def test_a_script_trains_however_it_begins(start, args):
    result = start(args)
    assert (result.iteration, result.reason) == (4, "completed")
    (metrics,) = Path().rglob("metrics.json")
    assert [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()][-1] == 3
    assert (metrics.parent / "model_final.pth").exists()
    saved = get_cfg()
    saved.set_new_allowed(True)
    saved.merge_from_file(metrics.parent / "config.yaml")
    assert saved.SOLVER.MAX_ITER == 4
