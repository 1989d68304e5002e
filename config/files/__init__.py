"""Files on disk: atomic writes, the manifest of a run's files, the lock of a folder."""
