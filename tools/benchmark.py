#!/usr/bin/env python
"""Measure the cost of the engine, relative to the same work written by hand.

    python tools/benchmark.py overhead

The same as ``hookline benchmark``; its code is in ``src/hookline/cli/benchmark.py``.
"""

import sys

from hookline.cli import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
