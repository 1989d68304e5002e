"""Import this first, and ``import detectron2.…`` finds hookline where detectron2 is not installed.

    import hookline.detectron2
    from detectron2.engine import DefaultTrainer     # hookline.engine.DefaultTrainer

Or run a script unchanged: ``python -m hookline.detectron2 train_net.py --config-file …``.
docs/porting/detectron2.md
describes what differs.
"""

import warnings

from .finder import install, installed_at

__all__: list[str] = []

install()
if _installed := installed_at():
    warnings.warn(
        f"hookline.detectron2: detectron2 is installed ({_installed}), so imports of it do not find hookline. "
        "Uninstall it, or import from hookline",
        stacklevel=2,
    )
