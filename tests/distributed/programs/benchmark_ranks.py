"""``hookline benchmark ranks`` with few steps, in forked ranks."""

import sys

from hookline.benchmarks import ranks
from hookline.cli import main

ranks._COUNTED = 6
measured = ranks._measure


def measure(*args):  # a function of __main__, which launch() runs in forked processes
    return measured(*args)


if __name__ == "__main__":
    ranks._measure = measure
    sys.exit(main(["benchmark", "ranks", "--steps", "2", "--rounds", "1", "--json"]))
