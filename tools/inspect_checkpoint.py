#!/usr/bin/env python
"""Verify a checkpoint and show its content, or compare two.

    python tools/inspect_checkpoint.py output/digits_convnet

The same as ``hookline inspect``; its code is in ``src/hookline/cli/inspect.py``.
"""

import sys

from hookline.cli import main

if __name__ == "__main__":
    sys.exit(main(["inspect", *sys.argv[1:]]))
