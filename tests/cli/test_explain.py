"""Explanations, as ``hookline config explain`` prints them, and the comments in config/defaults.py that they show."""

import subprocess
import sys
from pathlib import Path

import pytest

from hookline.cli.explain import explain, key_comments
from hookline.config import get_cfg

ROOT = Path(__file__).parents[2]


def test_every_key_has_a_comment():
    comments = key_comments()
    assert [key for key in get_cfg().flatten() if key not in comments] == []


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("SOLVER.CHECKPOINT_PERIOD", ["  Period of checkpoints: a duration.", "  default: 5000"]),
        ("solver.nonfinite_loss", ['  type: "raise", "skip", "stop"']),
        ("SOLVER.WEIGHT_DECAY_NORM", ["  type: float, at least 0 or None"]),
        ("SOLVER.CLIP_GRADIENTS", ['SOLVER.CLIP_GRADIENTS.CLIP_TYPE "value"']),
        ("EMA", ["EMA: hook", "  decay: float = 0.999", "  Args:"]),
    ],
)
def test_a_key_a_section_and_a_component_are_explained(name, lines):
    assert set(lines) <= set(explain(name).splitlines())


TYPED = """
from hookline.config import CfgNode, get_cfg
from hookline.engine import DefaultTrainer, HookBase

def add_my_config(cfg: CfgNode) -> None:
    cfg.MY = CfgNode()
    cfg.SOLVER.MY_KEY = 3

cfg = get_cfg()
add_my_config(cfg)
cfg.SOLVER.MAX_ITER = "20ep"
rate: float = cfg.clone().SOLVER.BASE_LR
folder: str = DefaultTrainer(cfg).cfg.OUTPUT_DIR

class Hook(HookBase):
    def after_step(self) -> None:
        if self.trainer.cfg.SOLVER.NESTEROV and self.trainer.iter > 3:
            self.trainer.storage.put_scalar("mine", cfg.MY.KEY)
"""
# What mypy reads beside hookline would take a minute.
OTHERS = "[mypy-torch.*,numpy.*]\nfollow_imports = skip\n"


@pytest.mark.slow
def test_a_type_checker_accepts_keys_and_the_trainer_of_a_hook(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "links/hookline").mkdir(parents=True)
    for source in (*(ROOT / "src/hookline").iterdir(), *(ROOT / name for name in ("config", "hooks", "engine"))):
        (tmp_path / "links/hookline" / source.name).symlink_to(source)
    (tmp_path / "script.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n{OTHERS}")
    environment = {"MYPYPATH": str(tmp_path / "links"), "MYPY_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
