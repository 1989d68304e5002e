"""Strategies as a user writes them, on two ranks. The program has the checks."""

from ranks import checks

checked, test_two_ranks = checks("own_strategies", 2)
