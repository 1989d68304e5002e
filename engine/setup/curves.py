"""``LOG.CURVES``: the picture of a run, drawn when it ends."""

import logging
import os
from importlib.util import find_spec

from ...config import CfgNode
from ...config.errors import first_line
from ...config.files.run_folder import claim
from ...runs.figure import NO_MATPLOTLIB, draw_curves
from ...runs.reading import read_run
from .. import comm

__all__ = ["draw_at_end"]

logger = logging.getLogger(__name__)

LEAST_SECONDS = 60.0
"""How long a run trains at least for a picture with "auto": importing matplotlib and drawing take 1 to 2 s."""


def draw_at_end(cfg: CfgNode, seconds: float) -> None:
    """Draw ``curves.png`` into the folder of a run. A picture that cannot be drawn is logged, and not an error.

    Args:
        cfg: the full config.
        seconds: how long the process has trained.
    """
    setting, folder = cfg.LOG.CURVES, cfg.OUTPUT_DIR
    if not setting or cfg.FAST_DEV_RUN or not comm.is_main_process():
        return
    if setting == "auto" and seconds < LEAST_SECONDS:
        return
    if setting == "auto" and os.environ.get("CI"):
        logger.info('LOG.CURVES: curves.png is not drawn, since the environment variable CI is set ("auto")')
        return
    if find_spec("matplotlib") is None:
        logger.info("LOG.CURVES: curves.png is not drawn: %s", NO_MATPLOTLIB)
        return
    path = os.path.join(folder, "curves.png")
    try:
        run = read_run(folder)
        claim(path)
        draw_curves([run], path)
    except Exception as error:
        logger.warning("LOG.CURVES: curves.png is not drawn: %s", first_line(error))
    else:
        logger.info("Curves: %s", path)
