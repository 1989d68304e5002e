"""Two ranks exchange, evaluate, predict and share their data. The program has the checks."""

from ranks import checks

checked, test_two_ranks = checks("together", 2)
