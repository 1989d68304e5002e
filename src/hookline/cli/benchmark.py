"""Measure the cost of the engine against a loop by hand."""

import argparse

EXAMPLE = "hookline benchmark --compare all"

WHAT = (
    "overhead",
    "hooks",
    "storage",
    "loader",
    "loaders",
    "evaluation",
    "checkpoint",
    "length",
    "start",
    "resume",
    "memory",
    "compile_step",
    "ranks",
    "scaling",
    "gpu",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("what", choices=WHAT, nargs="?", default="overhead", metavar="WHAT", help=" ".join(WHAT))
    add("--compare", default="", metavar="NAMES", help="other trainers, comma-separated, or all")
    add("--steps", type=number, default=0, metavar="N", help="steps per round (default: depends on what)")
    add("--rounds", type=number, default=11, metavar="N", help="rounds; the median is reported (%(default)s)")
    add("--size", type=number, default=0, metavar="N", help="checkpoint: parameters; length: puts; scaling: ranks")
    add("--folder", metavar="PATH", help="checkpoint: where to write (the temporary folder)")
    add("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine shared with others")
    add("--backend", default="inductor", metavar="NAME", help="overhead: backend of torch.compile")
    add("--only", default="", metavar="NAMES", help="gpu: these parts, comma-separated")
    add("--list", action="store_true", help="gpu: list the parts")
    add("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)  # gpu: cpu tries its code
    add("--json", action="store_true", help="print one JSON object")


def number(text: str) -> int:
    """``"100M"``, ``"2.5k"`` or ``"1000"``."""
    factor = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower(), 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)


def main(args: argparse.Namespace) -> int:
    """Measure, and print the results. Returns 1 if a check on a GPU failed."""
    if args.what == "gpu":
        from hookline.benchmarks.gpu import run

        return run(args)
    from hookline.benchmarks import measure_and_show

    measure_and_show(args)
    return 0
