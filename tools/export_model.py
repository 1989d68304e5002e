#!/usr/bin/env python
"""Export a trained model: only its weights, or the whole model as a torch.export program.

    python tools/export_model.py --checkpoint output/digits_convnet --output model.safetensors
    python tools/export_model.py --checkpoint output/digits_convnet --output model.pth --weights averaged
    python tools/export_model.py --checkpoint output/digits_convnet --output model.pt2 --trust-config

Exporting a program builds the model and data that a config names, which runs their code. The config in the
checkpoint's folder is used only with --trust-config.

Exit codes: 0, or 2 for bad input, in which case nothing is written.
"""

import argparse
import os

from hookline.config import CfgNode, ConfigError, get_cfg
from hookline.engine import config_errors_exit
from hookline.engine.checkpoint.weights import find_checkpoint
from hookline.engine.export.export import FORMATS, Exported, check_output, export_program, export_weights


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="a file, or a run's folder")
    parser.add_argument("--output", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--weights", choices=("auto", "model", "averaged"), default="auto", help="see WEIGHTS_FROM")
    parser.add_argument("--format", choices=tuple(FORMATS), default="", help="default: from the extension")
    parser.add_argument("--dtype", default="", help="convert to float16, bfloat16, float32 or float64")
    config = parser.add_mutually_exclusive_group()
    config.add_argument("--config-file", default="", metavar="FILE", help="for torch-export: the run's config")
    config.add_argument(
        "--trust-config",
        action="store_true",
        help="for torch-export: use config.yaml beside the checkpoint, which runs code",
    )
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="for torch-export: config keys and their values")
    return parser.parse_intermixed_args()


def run_config(args: argparse.Namespace) -> CfgNode:
    """Return the config of the checkpoint's run."""
    path = args.config_file or os.path.join(os.path.dirname(find_checkpoint(args.checkpoint)), "config.yaml")
    if not args.config_file and not os.path.isfile(path):
        raise ConfigError(f"--format torch-export needs a --config-file: there is no {path}")
    if not args.config_file and not args.trust_config:
        raise ConfigError(
            f"--format torch-export runs the code that a config names. If you trust {path}, add --trust-config; or "
            "name your own config with --config-file"
        )
    cfg = get_cfg()
    cfg.merge_from_file(path)
    cfg.merge_from_list([*args.opts, "MODEL.WEIGHTS", args.checkpoint, "MODEL.WEIGHTS_FROM", args.weights])
    return cfg


def main(args: argparse.Namespace) -> Exported:
    format = check_output(args.output, args.format)
    if format != "torch-export":
        if args.config_file or args.trust_config or args.opts:
            raise ConfigError(
                f"--config-file, --trust-config and config keys are for --format torch-export, not for {format}"
            )
        return export_weights(args.checkpoint, args.output, weights=args.weights, format=format, dtype=args.dtype)
    if args.dtype:
        raise ConfigError("--dtype is for weights; a torch-export program computes in the model's own dtype")
    return export_program(run_config(args), args.output)


if __name__ == "__main__":
    with config_errors_exit():
        done = main(parse_args())
        print(f"{done.path}: {done.weights} weights, {done.bytes / 1e6:.3g} MB, {done.format}")
        for name, value in done.metadata.items():
            print(f"  {name}: {value}")
        if done.format == "torch-export":
            print(f"  batch size: {done.batch_size or 'any'}")
