"""What people write in scripts and configs, as for detectron2: all of it trains as it is."""

import argparse
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from legitimate import CONFIG, Trainer, check, merged, set_up, set_up_and_train, train, usual

from hookline.config import CfgNode as CN
from hookline.config import get_cfg, set_global_cfg
from hookline.engine import comm, default_argument_parser, default_setup, launch
from hookline.engine.setup.utils import collect_env_info, setup_logger


def test_the_usual_script(args):
    check(usual(args))


# ---------------------------------------------------------------------------- loggers


def test_makes_a_logger_of_the_project(args):
    setup_logger(distributed_rank=comm.get_rank(), name="my_project", abbrev_name="mp")
    logging.getLogger("my_project.data").info("ready")
    check(usual(args))


def test_sets_up_the_logger_if_there_is_none(args):
    logger = logging.getLogger("detectron2")
    if not logger.isEnabledFor(logging.INFO):
        setup_logger()
    cfg = merged(args)
    default_setup(cfg, args)
    logger.info("Running with full config:\n%s", cfg.dump())
    logger.info("Environment info:\n%s", collect_env_info())
    check(train(cfg, args.resume))


def test_sets_up_the_logger_with_the_folder_first(args):
    cfg = merged(args)
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank())
    cfg.freeze()
    set_up_and_train(cfg, args)


def test_logs_into_log_txt_with_a_handler(args):
    cfg = merged(args)
    os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
    handler = logging.FileHandler(os.path.join(cfg.OUTPUT_DIR, "log.txt"))
    logging.getLogger("my_project").addHandler(handler)
    logging.getLogger("my_project").warning("begins")
    default_setup(cfg, args)
    try:
        check(train(cfg, args.resume))
    finally:
        handler.close()


# ---------------------------------------------------------------------------- the config


def test_changes_the_config_after_the_setup(args):
    cfg = set_up(args)
    cfg.defrost()
    cfg.SOLVER.BASE_LR = 0.01
    cfg.TEST.EVAL_PERIOD = 0
    cfg.freeze()
    check(train(cfg, args.resume))


def test_adds_keys_of_the_project(args):
    cfg = get_cfg()
    cfg.MODEL.MY_HEAD = CN()
    cfg.MODEL.MY_HEAD.DIM = 256
    cfg.SOLVER.BACKBONE_MULTIPLIER = 0.1
    cfg.INPUT = CN({"MIN_SIZE_TRAIN": (640,)})
    merged(args, cfg)
    cfg.merge_from_list(["MODEL.MY_HEAD.DIM", 128, "INPUT.MIN_SIZE_TRAIN", "(480, 640)"])
    cfg.freeze()
    set_up_and_train(cfg, args)


def test_allows_new_keys(args):
    cfg = get_cfg()
    cfg.set_new_allowed(True)
    cfg.merge_from_file(args.config_file, allow_unsafe=True)
    cfg.merge_from_list(args.opts)
    cfg.MY_KEY = "x"
    set_up_and_train(cfg, args)


def test_shares_a_global_config(args):
    cfg = merged(args)
    set_global_cfg(cfg)
    cfg = cfg.clone()
    cfg.freeze()
    default_setup(cfg, args)
    assert not cfg.TEST.AUG.ENABLED
    check(train(cfg, args.resume))


def test_names_the_folder_by_a_path_object(args):
    cfg = merged(args)
    cfg.OUTPUT_DIR = Path("runs") / "first"
    set_up_and_train(cfg, args)


LINES = {
    "an empty section": "TEST:\nCHECKPOINT:\n  # PERIOD: 100",
    "a fraction of the run as warm-up": "SOLVER: {WARMUP_ITERS: 0.5}",
    "momentum of the base beside AdamW": "SOLVER: {OPTIMIZER: {NAME: AdamW}, MOMENTUM: 0.9, GAMMA: 0.5}",
    "early stopping on the training loss": "HOOKS: [{NAME: EarlyStopping, ARGS: {metric: total_loss, patience: 9}}]",
    "no test sets over a base with a best metric": "DATASETS: {TEST: []}",
    "lists without a value": "HOOKS:\nSOLVER: {STEPS: null}\nDATASETS: {TEST: }",
}


@pytest.mark.parametrize("name", LINES)
def test_writes_a_config_over_a_base(name, args):
    best = "TEST: {METRICS: [Accuracy]}\nCHECKPOINT: {BEST: {METRIC: synthetic/accuracy}}\n"
    Path("base.yaml").write_text(CONFIG + (best if "best" in name else ""))
    Path("mine.yaml").write_text(f"_BASE_: base.yaml\n{LINES[name]}\n")
    check(usual(args))


# ---------------------------------------------------------------------------- the command line


def test_adds_options_to_the_parser(args):
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
    check(train(cfg, resume=bool(args.resume)))


def test_puts_a_parser_around_the_default_one(args):
    parser = argparse.ArgumentParser(parents=[default_argument_parser()], add_help=False)
    parser.add_argument("--dataset", default="synthetic")
    args = parser.parse_args()
    cfg = merged(args)
    cfg.DATASETS.TRAIN = (args.dataset,)
    set_up_and_train(cfg, args)


def test_writes_a_parser(args):
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-file", default="")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("opts", nargs=argparse.REMAINDER)
    check(train(set_up(parser.parse_args())))


def test_starts_by_launch(args):
    machines = {"num_machines": args.num_machines, "machine_rank": args.machine_rank, "dist_url": args.dist_url}
    check(launch(usual, args.num_gpus, **machines, args=(args,)))


# ---------------------------------------------------------------------------- files of the script


def test_dumps_the_config_after_the_trainer_is_built(args):
    cfg = merged(args)
    default_setup(cfg, args)
    trainer = Trainer(cfg)
    with open(os.path.join(cfg.OUTPUT_DIR, "config.yaml"), "w") as file:
        file.write(cfg.dump())
    trainer.resume_or_load(resume=args.resume)
    check(trainer.train())


def test_writes_files_after_the_setup(args):
    cfg = set_up(args)
    if comm.is_main_process():
        os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
        with open(os.path.join(cfg.OUTPUT_DIR, "args.json"), "w") as file:
            json.dump(vars(args), file)
        shutil.copy(args.config_file, os.path.join(cfg.OUTPUT_DIR, "config.yaml"))
    comm.synchronize()
    check(train(cfg, args.resume))
