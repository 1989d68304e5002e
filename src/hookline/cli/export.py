"""Export a trained model: its weights, or a whole program.

A torch.export program is built from the model and data that a config names,
which runs their code: config.yaml beside the checkpoint needs --trust-config.
"""

import argparse

from hookline.command_line import slow_imports

FORMATS = ("safetensors", "pth", "torch-export")
EXAMPLE = """hookline export --checkpoint output/digits_mlp --output model.safetensors
  hookline export --checkpoint output/run --output model.pt2 --trust-config"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="a file, or a run's folder")
    parser.add_argument("--output", required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--weights", choices=("auto", "model", "averaged"), default="auto", metavar="W", help="auto, model or averaged"
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="", metavar="F", help=f"{', '.join(FORMATS)} (from the extension)"
    )
    parser.add_argument("--dtype", default="", metavar="DTYPE", help="float16, bfloat16, float32 or float64")
    config = parser.add_mutually_exclusive_group()
    config.add_argument("--config-file", default="", metavar="FILE", help="for torch-export: the run's config")
    config.add_argument("--trust-config", action="store_true", help="for torch-export: use the run's config.yaml")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="for torch-export: config keys and values")


def main(args: argparse.Namespace) -> None:
    """Write the file, and print what is in it."""
    with slow_imports():
        from hookline.engine import config_errors_exit
        from hookline.engine.program.export import describe, export
    with config_errors_exit():
        print(describe(export(args)))
