"""Explanations, as ``hookline config explain`` prints them, and the comments in config/defaults.py that they show."""

import pytest

from hookline.cli.explain import explain, key_comments
from hookline.config import get_cfg


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
