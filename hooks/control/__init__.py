"""Hooks that control a run: learning rate, early stopping, signals, time limit, loss spikes."""
