#!/usr/bin/env python
"""Draw the metrics of runs into one image, as ``hookline plot`` does.

    python tools/plot_metrics.py curves.png output/digits_convnet output/digits_mlp --metrics loss "*/accuracy"

A script to copy: `hookline.runs` reads the folder of a run to numpy arrays.
"""

import argparse
import sys

from hookline.config import ConfigError
from hookline.runs import draw_curves, read_runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", help="the file to write, such as curves.png")
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--metrics", nargs="+", default=[], help="names or patterns")
    args = parser.parse_args()
    try:
        runs = read_runs(args.runs)
        draw_curves(runs, args.image, args.metrics)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for run in runs:
        for name, curve in run.curves.items():
            if "/" in name:  # an evaluation's
                print(f"{run.name}  {name}: {curve.values[-1]:.5g} at iteration {curve.iterations[-1]}")
    print(f"Wrote {args.image}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
