"""The command ``hookline``, for processes that ``forker.py`` starts."""

import sys

from hookline.cli import main

sys.exit(main())
