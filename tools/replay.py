#!/usr/bin/env python
"""Run a step of a run again, and report what happens in it.

    python tools/replay.py output/digits_convnet --iter 110

The same as ``hookline replay``; its code is in ``engine/replay/``.
"""

import sys

from hookline.cli import main

if __name__ == "__main__":
    sys.exit(main(["replay", *sys.argv[1:]]))
