"""Files of a run on disk: atomic writes, which names are ours, the lock of a folder."""
