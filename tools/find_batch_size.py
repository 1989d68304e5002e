#!/usr/bin/env python
"""Find the largest batch that fits into memory, for the run that a config file describes.

    python tools/find_batch_size.py --config-file configs/digits/convnet.yaml

The same as ``hookline find-batch-size``; its code is in ``src/hookline/cli/find_batch_size.py``.
"""

import sys

from hookline.cli import main

if __name__ == "__main__":
    sys.exit(main(["find-batch-size", *sys.argv[1:]]))
