"""Hooks that measure a run: time, throughput, FLOPs, memory, profilers."""
