"""When checkpoints are written and which are kept."""
