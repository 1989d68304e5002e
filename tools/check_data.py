#!/usr/bin/env python
"""Read every sample of a config's data sets, and list those that fail.

    python tools/check_data.py --config-file configs/digits/mlp.yaml

The same as ``hookline check-data``; its code is in ``src/hookline/cli/check_data.py``.
"""

import sys

from hookline.cli import main

if __name__ == "__main__":
    sys.exit(main(["check-data", *sys.argv[1:]]))
