"""A rank whose interpreter is blocked: no thread of it runs."""

import os
import re

from results import write_result

from hookline.engine import comm
from hookline.engine.ranks import local_ranks, process

local_ranks.GRACE = 1.0  # not 8 seconds
process._ANSWER = 1


def search():
    re.search("(a+)+b", "a" * 60)  # takes years


def main(folder):
    comm.synchronize()
    write_result(folder, os.getpid())
    if comm.get_rank() == 1:
        search()
    comm.synchronize()
