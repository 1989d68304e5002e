"""Files on disk: atomic writes, and the folder of a run."""
