"""Export a checkpoint as a command line says."""

import argparse
import os

from ...config import CfgNode, ConfigError, get_cfg
from ..checkpoint.weights import find_checkpoint
from ..export.export import Exported, check_format, export_program, export_weights

__all__ = ["describe", "export"]


def _run_config(args: argparse.Namespace) -> CfgNode:
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


def export(args: argparse.Namespace) -> Exported:
    """Export as the options of ``hookline export`` say.

    Raises:
        ConfigError: bad input, in which case nothing is written.
    """
    format = check_format(args.output, args.format, args.checkpoint)
    if format != "torch-export":
        if args.config_file or args.trust_config or args.opts:
            raise ConfigError(
                f"--config-file, --trust-config and config keys are for --format torch-export, not for {format}"
            )
        return export_weights(args.checkpoint, args.output, weights=args.weights, format=format, dtype=args.dtype)
    if args.dtype:
        raise ConfigError("--dtype is for weights; a torch-export program computes in the model's own dtype")
    return export_program(_run_config(args), args.output)


def describe(done: Exported) -> str:
    """Return a text about the written file."""
    lines = [f"{done.path}: {done.weights} weights, {done.bytes / 1e6:.3g} MB, {done.format}"]
    lines += [f"  {name}: {value}" for name, value in done.metadata.items()]
    if done.format == "torch-export":
        lines.append(f"  batch size: {done.batch_size or 'any'}")
    return "\n".join(lines)
