"""Hooks that steer a run: learning rate, signals, time limit, loss spikes."""
