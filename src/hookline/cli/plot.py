"""Plot the metrics of runs, or a learning rate schedule."""

import argparse

EXAMPLE = 'hookline plot output/digits_convnet --metrics loss "*/accuracy"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folders of runs, or folders that contain some")
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help="names or patterns (default: all)")
    parser.add_argument("--x", choices=("iteration", "epoch", "time"), default="iteration", help="the x axis")
    parser.add_argument("--smoothing", type=float, default=0.0, metavar="W", help="weight of a running average, 0 to 1")
    parser.add_argument("--log", action="store_true", help="logarithmic scale of the values")
    parser.add_argument(
        "--out", default="", metavar="FILE", help="an image, such as FILE.png (default: RUN/curves.png)"
    )
    parser.add_argument(
        "--schedule", default="", metavar="CONFIG", help="draw the learning rate of a config; RUN is then KEY VALUE ..."
    )


def main(args: argparse.Namespace) -> None:
    """Write the files, and print their names."""
    if args.schedule:
        from hookline.engine.program.schedule import schedule_of

        runs = [schedule_of(args.schedule, args.runs)]
        out = args.out or "schedule.png"
    else:
        from hookline.runs.reading import read_runs

        runs, out = read_runs(args.runs), args.out
    from hookline.runs.figure import write_curves

    print(f"Wrote {write_curves(runs, out, args.metrics, axis=args.x, smoothing=args.smoothing, log=args.log)}")
