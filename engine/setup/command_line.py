"""The command line of the tools."""

import argparse
import sys
from typing import Any, NoReturn

from ...config import suggest

__all__ = ["ArgumentParser", "default_argument_parser"]


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """Return the command-line parser of the tools, with detectron2's options.

    Args:
        epilog: text at the end of ``--help``. Default: examples.
    """
    parser = ArgumentParser(
        epilog=epilog or _EXAMPLES.format(prog=sys.argv[0]), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML file of the run")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in OUTPUT_DIR")
    parser.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS on DATASETS.TEST and exit")
    parser.add_argument(
        "--predict", action="store_true", help="write the predictions of MODEL.WEIGHTS for DATASETS.TEST"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what a run would do, then exit; writes nothing, but imports and builds what the config names",
    )
    parser.add_argument(
        "--fast-dev-run",
        action="store_true",
        help="try a run: one training batch and one batch of each test set (or FAST_DEV_RUN of them); writes nothing",
    )
    parser.add_argument(
        "--num-gpus", type=int, default=1, help="processes on each machine: one per GPU, or CPU processes"
    )
    parser.add_argument("--num-machines", type=int, default=1, help="machines that train together")
    parser.add_argument("--machine-rank", type=int, default=0, help="index of this machine, from 0")
    parser.add_argument("--dist-url", default="auto", help="tcp://host:port of machine 0, for several machines")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values, as pairs")
    return parser


class ArgumentParser(argparse.ArgumentParser):
    """Accepts options between and after the KEY VALUE pairs, and suggests the nearest option for an unknown one."""

    def error(self, message: str) -> NoReturn:
        unknown = [word for word in message.split() if word.startswith("--")]
        hint = suggest(unknown[0], self._option_string_actions) if "unrecognized" in message and unknown else ""
        self.exit(2, f"error: {message}{hint}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)


_EXAMPLES = """examples:
  train:            {prog} --config-file configs/digits/convnet.yaml
  change some keys: {prog} --config-file configs/digits/convnet.yaml SOLVER.BASE_LR 0.01 SEED 7
  resume:           {prog} --config-file configs/digits/convnet.yaml --resume
  two processes:    {prog} --config-file configs/digits/convnet.yaml --num-gpus 2
                    torchrun --nproc-per-node 2 {prog} --config-file configs/digits/convnet.yaml
  evaluate:         {prog} --config-file configs/digits/convnet.yaml --eval-only MODEL.WEIGHTS path/to/model.pth
  predict:          {prog} --config-file configs/digits/convnet.yaml --predict MODEL.WEIGHTS path/to/model.pth
"""
