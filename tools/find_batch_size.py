#!/usr/bin/env python
"""Find the largest batch that fits into memory, for the run that a config file describes.

    python tools/find_batch_size.py --config-file configs/digits/convnet.yaml
    python tools/find_batch_size.py --config-file configs/digits/convnet.yaml --memory 4GB MODEL.DEVICE cpu

Tries steps with growing batches, on a GPU until it is out of memory, on the CPU up to --memory. Nothing is written.
"""

import argparse

from hookline.config import CfgNode, ConfigError, get_cfg
from hookline.engine import DefaultTrainer, config_errors_exit, default_setup
from hookline.engine.setup.command_line import ArgumentParser
from hookline.engine.setup.find_batch_size import find_batch_size


def setup(args: argparse.Namespace) -> CfgNode:
    """Build the config: defaults, then the file, then the command line."""
    cfg = get_cfg()
    if args.config_file:
        cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    for key, value in {"MODEL.NAME": cfg.MODEL.NAME, "DATASETS.TRAIN": cfg.DATASETS.TRAIN}.items():
        if not value:
            raise ConfigError(f"{key}: is not set; give a --config-file that sets it, such as configs/digits/mlp.yaml")
    default_setup(cfg, argparse.Namespace(dry_run=True))
    return cfg


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML file of the run")
    parser.add_argument("--memory", help="on the CPU: what the process may use, such as 4GB (default: what is free)")
    parser.add_argument("--max-size", type=int, help="the largest size to try (default: the number of samples)")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values, as pairs")
    args = parser.parse_args()
    with config_errors_exit():
        trainer = DefaultTrainer(setup(args))
        print(f"DATALOADER.BATCH_SIZE {find_batch_size(trainer, args.memory, args.max_size)}")


if __name__ == "__main__":
    main()
