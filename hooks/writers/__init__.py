"""How metrics leave a run: console, progress bar, JSON, CSV, TensorBoard, trackers."""
