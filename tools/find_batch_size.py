#!/usr/bin/env python
"""Find the largest batch that fits into memory, for the run that a config file describes.

    python tools/find_batch_size.py --config-file configs/digits/convnet.yaml
    python tools/find_batch_size.py --config-file configs/digits/convnet.yaml --memory 4GB MODEL.DEVICE cpu

Tries steps with growing batches, on a GPU until it is out of memory, on the CPU up to --memory. Nothing is written.
"""

import argparse

from hookline.command_line import ArgumentParser
from hookline.engine import DefaultTrainer, config_errors_exit
from hookline.engine.program.options import set_up_probe
from hookline.engine.setup.find_batch_size import find_batch_size


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML file of the run")
    parser.add_argument("--memory", help="on the CPU: what the process may use, such as 4GB (default: what is free)")
    parser.add_argument("--max-size", type=int, help="the largest size to try (default: the number of samples)")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values, as pairs")
    args = parser.parse_args()
    with config_errors_exit():
        trainer = DefaultTrainer(set_up_probe(args))
        print(f"DATALOADER.BATCH_SIZE {find_batch_size(trainer, args.memory, args.max_size)}")


if __name__ == "__main__":
    main()
