"""Strategies as a user writes them, on two ranks. The program has the checks."""

import pytest
from ranks import checks

pytestmark = pytest.mark.slow

checked, test_two_ranks = checks("own_strategies", 2)
