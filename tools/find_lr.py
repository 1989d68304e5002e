#!/usr/bin/env python
"""Suggest a learning rate for the run that a config file describes.

    python tools/find_lr.py --config-file configs/digits/convnet.yaml --plot lr.png

The same as ``hookline find-lr``; its code is in ``src/hookline/cli/find_lr.py``.
"""

import sys

from hookline.cli import main

if __name__ == "__main__":
    sys.exit(main(["find-lr", *sys.argv[1:]]))
