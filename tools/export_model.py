#!/usr/bin/env python
"""Export a trained model: only its weights, or the whole model as a torch.export program.

    python tools/export_model.py --checkpoint output/digits_convnet --output model.safetensors

The same as ``hookline export``; its code is in ``src/hookline/cli/export.py``.
"""

import sys

from hookline.cli import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
