"""Explanations and lists, as ``hookline config`` prints them, and the comments in config/defaults.py that they show."""

import re

import pytest

from hookline.config import UnknownKeyError, get_cfg
from hookline.engine.setup.schema import explain, key_comments, list_components, list_registries

SOURCE = """
# Two lines
# about A.
_C.A = 1
_C.B = 2

_C.C = 3
# ---------------------------- section
_C.S = CN()
# A section's comment.
_C.S.T = CN()
_C.S.T.NAME = ""
# Of a long value.
_C.S.D = Typed(
    1, int)
_C.S.E = 1
"""


def test_a_comment_is_of_the_key_below_and_of_those_that_follow():
    assert key_comments(SOURCE) == {
        "A": "Two lines about A.",
        "B": "Two lines about A.",
        "S.T": "A section's comment.",
        "S.T.NAME": "A section's comment.",
        "S.D": "Of a long value.",
        "S.E": "Of a long value.",
    }


def test_every_key_has_a_comment():
    comments = key_comments()
    assert [key for key in get_cfg().flatten() if key not in comments] == []
    assert comments["SOLVER.AMP.DTYPE"].startswith("Mixed precision")
    assert comments["SOLVER.BASE_LR"].startswith("The learning rate")


def test_a_key_is_explained():
    assert explain("SOLVER.CHECKPOINT_PERIOD") == (
        "SOLVER.CHECKPOINT_PERIOD\n"
        "  Period of checkpoints: a duration.\n"
        "  default: 5000\n"
        "  type: an int (iterations), '500it', '2ep', '45s', '30min' or '2h'"
    )
    assert '  type: "raise", "skip", "stop"' in explain("solver.nonfinite_loss")
    assert "  type: float, at least 0 or None" in explain("SOLVER.WEIGHT_DECAY_NORM")


def test_a_key_of_a_component_lists_the_names():
    found = re.search(r"names: (.*); or package.module:Name", " ".join(explain("MODEL.NAME").split()))
    assert found is not None
    assert {"ConvNet", "GPT", "MLP", "ResNet"} <= set(found[1].split(", "))  # other tests register more
    assert "EarlyStopping" in explain("HOOKS")


def test_a_section_lists_its_keys():
    lines = explain("SOLVER.CLIP_GRADIENTS").splitlines()
    assert lines[0].startswith("SOLVER.CLIP_GRADIENTS: Gradient clipping")
    assert 'SOLVER.CLIP_GRADIENTS.CLIP_TYPE "value"' in lines


def test_a_component_is_explained():
    text = explain("EMA")
    assert text.startswith("EMA: hook\n")
    assert "  decay: float = 0.999\n" in text
    assert "\n  Args:\n" in text


@pytest.mark.parametrize(
    ("name", "near"),
    [("SOLVER.BASE_RL", "SOLVER.BASE_LR"), ("BASE_LR", "SOLVER.BASE_LR"), ("EarlyStoping", "EarlyStopping")],
)
def test_a_misspelt_name_is_suggested(name, near):
    with pytest.raises(UnknownKeyError, match=f"did you mean '{near}'"):
        explain(name)


def test_registries_and_their_components_are_listed():
    assert re.search(r"^METRIC +\d+  TEST.METRICS, LOG.TRAIN_METRICS$", list_registries(), re.MULTILINE)
    text = list_components("hooks")
    assert text == list_components("HOOK_REGISTRY")
    assert "EarlyStopping: Stops training when a metric has not improved" in text
    with pytest.raises(UnknownKeyError, match="no registry 'modle'; did you mean 'MODEL'"):
        list_components("modle")


def test_texts_fit_the_width():
    texts = [explain(""), list_registries(), *map(explain, get_cfg().full_keys())]
    texts += [list_components(line.split()[0]) for line in list_registries().splitlines() if line[0] != " "]
    assert max(len(line) for text in texts for line in text.splitlines()) <= 80
