"""Several processes as one run: agreement, loss weights, shared metrics, failures."""
