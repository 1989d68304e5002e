"""How one step runs: shortcuts, non-finite values, compiled and captured steps."""
