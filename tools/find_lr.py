#!/usr/bin/env python
"""Suggest a learning rate for the run that a config file describes: a learning rate range test.

    python tools/find_lr.py --config-file configs/digits/convnet.yaml
    python tools/find_lr.py --config-file configs/digits/convnet.yaml --plot lr.png SOLVER.OPTIMIZER.NAME SGD

Trains for some steps with a rising rate. Nothing is written except the plot.
"""

import argparse

from hookline.command_line import ArgumentParser
from hookline.engine import DefaultTrainer, config_errors_exit
from hookline.engine.program.options import set_up_probe
from hookline.engine.setup.find_lr import find_lr


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML file of the run")
    parser.add_argument("--min-lr", type=float, default=1e-7, help="the first rate (default: %(default)s)")
    parser.add_argument("--max-lr", type=float, default=10.0, help="the last rate (default: %(default)s)")
    parser.add_argument("--num-iter", type=int, default=100, help="number of steps (default: %(default)s)")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the losses into an image (needs matplotlib)")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values, as pairs")
    args = parser.parse_args()
    with config_errors_exit():
        trainer = DefaultTrainer(set_up_probe(args))
        trainer.resume_or_load(resume=False)  # MODEL.WEIGHTS
        sweep = find_lr(trainer, args.min_lr, args.max_lr, args.num_iter)
        print(f"{'lr':>10}  {'loss':>10}  {'smoothed':>10}")
        for row in list(zip(sweep.lrs, sweep.losses, sweep.smoothed, strict=True))[:: max(1, len(sweep.lrs) // 20)]:
            print("  ".join(f"{value:10.4g}" for value in row))
        if args.plot:
            sweep.plot(args.plot)
        if sweep.suggestion is None:
            print("No suggestion: the loss did not fall. Try more steps (--num-iter) or another range")
        elif trainer.cfg.SOLVER.OPTIMIZERS:
            factor = sweep.suggestion / trainer.cfg.SOLVER.BASE_LR
            print(f"Suggestion: multiply SOLVER.BASE_LR and the BASE_LR of each optimizer by {factor:.3g}")
        else:
            print(f"Suggestion: SOLVER.BASE_LR {sweep.suggestion:.3g}")


if __name__ == "__main__":
    main()
