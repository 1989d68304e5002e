"""Checks that a rank has the start method of its launcher. It is not forked."""

import multiprocessing

from hookline.engine import launch

if __name__ == "__main__":
    assert launch(multiprocessing.get_start_method, 2, device="cpu") == multiprocessing.get_start_method()
