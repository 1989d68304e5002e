#!/usr/bin/env python
"""Verify a checkpoint and show its content, or compare two.

    python tools/inspect_checkpoint.py output/digits_convnet
    python tools/inspect_checkpoint.py output/first/model_final.pth output/second/model_final.pth

Exit codes: 0: undamaged, or equal weights; 1: damaged, or different weights; 2: bad input.
"""

import argparse
import json
import sys
from typing import Any

from hookline.config import ConfigError
from hookline.config.errors import printable
from hookline.engine import config_errors_exit
from hookline.engine.checkpoint.weights import find_checkpoint
from hookline.engine.export.inspection import compare_checkpoints, inspect_checkpoint

SHOWN = 20


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="PATH", help="a file, or a folder such as a run's")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="a second checkpoint to compare with")
    parser.add_argument("--weights", choices=("model", "averaged"), default="model", help="which weights to compare")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def describe(report: dict[str, Any]) -> str:
    """Format a report of inspect_checkpoint()."""
    lines = [f"{report['file']}: undamaged, {report['megabytes']:.3g} MB"]
    lines += [f"{name}: {report[name]}" for name in ("iteration", "epoch") if report[name] is not None]
    for name in ("weights", "averaged"):
        if report[name]:
            lines += _describe_weights("averaged weights" if name == "averaged" else name, report[name])
    if report["optimizer"]:
        optimizer = report["optimizer"]
        lines.append(
            f"optimizer: {optimizer['kind'] or 'unknown kind'}, "
            f"{optimizer['tensors']} tensors, {optimizer['megabytes']:.3g} MB"
        )
    if report["hooks"]:
        lines.append("states of hooks:")
        lines += [f"  {name}: {', '.join(entries) or 'empty'}" for name, entries in report["hooks"].items()]
    if report["other"]:
        lines.append(f"also: {', '.join(report['other'])}")
    if report["config"]:
        lines.append("config, where it differs from the defaults:")
        lines += [f"  {key} = {value!r}" for key, (_, value) in report["config"].items()]
    return "\n".join(map(printable, lines))


def _describe_weights(title: str, weights: dict[str, Any]) -> list[str]:
    return [
        f"{title}: {weights['count']} ({weights['elements']:,} numbers, {weights['megabytes']:.3g} MB, "
        f"{', '.join(weights['dtypes'])})",
        f"  sha256 {weights['sha256']}",
        *(f"  {name}: {part['count']}, {part['megabytes']:.3g} MB" for name, part in weights["modules"].items()),
    ]


def describe_comparison(report: dict[str, Any]) -> str:
    """Format a report of compare_checkpoints()."""
    first, second = report["files"]
    lines = [f"weights of {first} and {second}: {'equal, bit for bit' if report['equal'] else 'different'}"]
    lines += _list(f"only in {second}", report["added"])
    lines += _list(f"only in {first}", report["missing"])
    lines += _list("other shape", [f"{name}: {tuple(a)}, {tuple(b)}" for name, (a, b) in report["shapes"].items()])
    lines += _list("other dtype", [f"{name}: {a}, {b}" for name, (a, b) in report["dtypes"].items()])
    differences = [f"{name}: {largest:.3g}, {mean:.3g}" for name, largest, mean in report["changed"]]
    lines += _list("other values, with the largest and mean absolute difference", differences)
    lines.append(f"equal: {report['same']}")
    lines += _list("config", [f"{key}: {a!r}, {b!r}" for key, (a, b) in report["config"].items()])
    lines += _list("other state of the runs that differs", report["state"])
    return "\n".join(map(printable, lines))


def _list(title: str, items: list[str]) -> list[str]:
    """Format a title with the number of items, and the first items."""
    if not items:
        return []
    rest = [f"  ... and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    return [f"{title} ({len(items)}):", *(f"  {item}" for item in items[:SHOWN]), *rest]


def main(args: argparse.Namespace) -> int:
    for path in filter(None, (args.checkpoint, args.other)):
        find_checkpoint(path)  # a missing path is bad input; one that cannot be read is damaged
    try:
        if args.other:
            report = compare_checkpoints(args.checkpoint, args.other, weights_from=args.weights)
        else:
            report = inspect_checkpoint(args.checkpoint)
    except ConfigError as error:
        if args.json:
            print(json.dumps({"whole": False, "problem": str(error)}))
        else:
            print("\n".join(map(printable, str(error).splitlines())))
        return 1
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(describe_comparison(report) if args.other else describe(report))
    return 0 if report.get("equal", True) else 1


if __name__ == "__main__":
    with config_errors_exit():
        sys.exit(main(parse_args()))
