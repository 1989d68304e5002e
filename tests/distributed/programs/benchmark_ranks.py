"""``hookline benchmark ranks``, with few steps."""

import sys

from hookline.benchmarks import ranks
from hookline.cli import main

if __name__ == "__main__":
    ranks._COUNTED = 6
    sys.exit(main(["benchmark", "ranks", "--steps", "2", "--rounds", "1", "--json"]))
