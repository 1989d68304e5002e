"""Whole processes: imports, ``--help``, ``--dry-run``, a run of the digits, and one resumed step of it."""

import shutil
import subprocess
import sys
import tempfile

from measure import Groups, Run, now

PYTHON, TRAIN = [sys.executable, "-c"], [sys.executable, "-m", "hookline", "train"]
DIGITS = [*TRAIN, "--config-file", "digits/convnet.yaml", "OUTPUT_DIR", "FOLDER", "SOLVER.MAX_ITER"]


def _process(*command: str, copy_of: str = "") -> Run:
    """Return a run whose step is a new process. FOLDER in its words stands for a new folder, or for a copy of one."""

    def run(steps: int) -> float:
        seconds = 0.0
        for _ in range(steps):
            with tempfile.TemporaryDirectory() as folder:
                if copy_of:
                    shutil.copytree(copy_of, folder, dirs_exist_ok=True)
                start = now()
                subprocess.run([folder if word == "FOLDER" else word for word in command], check=True)
                seconds += now() - start
        return seconds

    return run


def _runs(folder: str) -> dict[str, Run]:
    subprocess.run([folder if word == "FOLDER" else word for word in [*DIGITS, "50"]], check=True)
    return {
        "import torch": _process(*PYTHON, "import torch"),
        "import DefaultTrainer": _process(*PYTHON, "from hookline.engine import DefaultTrainer, run"),
        "train --help": _process(*TRAIN, "--help"),
        "digits, --dry-run": _process(*DIGITS, "20ep", "--dry-run"),
        "digits, 1 step": _process(*DIGITS, "1"),
        "digits, 1 resumed step": _process(*DIGITS, "51", "--resume", copy_of=folder),
        "digits, 5 epochs": _process(*DIGITS, "5ep"),
    }


GROUPS: Groups = {"processes": (1, _runs)}
