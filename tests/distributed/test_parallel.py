"""DDP, FSDP2 and meshes on two ranks: losses, weights, units. The program has the checks."""

from ranks import checks

checked, test_two_ranks = checks("parallel", 2)
