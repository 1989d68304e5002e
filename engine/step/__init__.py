"""How one step runs: shortcuts, non-finite values, optimizers that take turns."""
