"""Resumed, extended and repeated runs: changes of the config, lengths in epochs."""
