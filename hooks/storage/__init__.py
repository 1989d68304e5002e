"""EventStorage and its histories: the metrics of a run."""
