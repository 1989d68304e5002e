"""Names of ``detectron2.utils.file_io``."""

from iopath.common.file_io import PathHandler, g_pathmgr

__all__ = ["PathHandler", "PathManager"]

#: The path manager that opens configs. Checkpointers that are created later use the handlers registered here too.
PathManager = g_pathmgr
