"""Suggest a learning rate, after some steps with rising rates.

Nothing is written except the plot.
"""

import argparse

from hookline.command_line import add_options, slow_imports

EXAMPLE = "hookline find-lr --config-file digits/convnet.yaml --plot lr.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_options(parser, "config_file")
    parser.add_argument("--min-lr", type=float, default=1e-7, metavar="LR", help="the first rate (%(default)s)")
    parser.add_argument("--max-lr", type=float, default=10.0, metavar="LR", help="the last rate (%(default)s)")
    parser.add_argument("--num-iter", type=int, default=100, metavar="N", help="number of steps (%(default)s)")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the losses (needs matplotlib)")
    add_options(parser, "opts")


def main(args: argparse.Namespace) -> None:
    """Print some of the losses, and the suggestion."""
    with slow_imports():
        from hookline.engine import DefaultTrainer, config_errors_exit
        from hookline.engine.options import set_up_probe
        from hookline.engine.setup.find_lr import find_lr
    with config_errors_exit():
        trainer = DefaultTrainer(set_up_probe(args))
        trainer.resume_or_load(resume=False)  # MODEL.WEIGHTS
        sweep = find_lr(trainer, args.min_lr, args.max_lr, args.num_iter)
        print(f"{'lr':>10}  {'loss':>10}  {'smoothed':>10}")
        rows = list(zip(sweep.lrs, sweep.losses, sweep.smoothed, strict=True))
        for row in rows[:: max(1, len(rows) // 20)]:
            print("  ".join(f"{value:10.4g}" for value in row))
        if sweep.suggestion is None:
            print("No suggestion: the loss did not fall. Try more steps (--num-iter) or another range")
        elif trainer.cfg.SOLVER.OPTIMIZERS:
            factor = sweep.suggestion / trainer.cfg.SOLVER.BASE_LR
            print(f"Suggestion: multiply SOLVER.BASE_LR and the BASE_LR of each optimizer by {factor:.3g}")
        else:
            print(f"Suggestion: SOLVER.BASE_LR {sweep.suggestion:.3g}")
        if args.plot:
            sweep.plot(args.plot)
