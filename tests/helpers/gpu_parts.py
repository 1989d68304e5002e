"""Parts for the runner of ``hookline benchmark gpu``. A module, so that its processes can import them."""

import os
import sys
import time


def crashing(report):
    report.passed("before", ms=1.5)
    sys.stderr.write("the last words\n")
    sys.stderr.flush()
    os._exit(3)


def hanging(report):
    report.passed("before")
    time.sleep(600)


def raising(report):
    with report.attempt("fails alone"):
        raise RuntimeError("first line\nsecond line")
    raise RuntimeError("fails the part")
