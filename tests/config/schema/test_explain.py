"""Explanations and lists, as ``hookline config`` prints them."""

import pytest

from hookline.config import UnknownKeyError, get_cfg
from hookline.config.schema.explain import explain, explain_all, list_components, list_registries


def test_a_key_is_explained():
    assert explain("SOLVER.CHECKPOINT_PERIOD") == (
        "SOLVER.CHECKPOINT_PERIOD\n"
        "  Period of checkpoints: a duration.\n"
        "  default: 5000\n"
        "  type: integer, at least 0 or '500it', '2ep', '45s', '30min', '2h'"
    )
    assert '  type: "raise", "skip", "stop"' in explain("solver.nonfinite_loss")
    assert "  type: number, at least 0 or None" in explain("SOLVER.WEIGHT_DECAY_NORM")


def test_a_key_of_a_component_lists_the_names():
    assert "  names: ConvNet, GPT, MLP, ResNet; or package.module:Name" in explain("MODEL.NAME")
    assert "EarlyStopping" in explain("HOOKS")


def test_a_section_lists_its_keys():
    lines = explain("SOLVER.CLIP_GRADIENTS").splitlines()
    assert lines[0].startswith("SOLVER.CLIP_GRADIENTS: Gradient clipping")
    assert 'SOLVER.CLIP_GRADIENTS.CLIP_TYPE "value"' in lines


def test_a_component_is_explained():
    text = explain("EMA")
    assert text.startswith("EMA: hook\n")
    assert "  decay: number = 0.999\n" in text


@pytest.mark.parametrize(
    ("name", "near"),
    [("SOLVER.BASE_RL", "SOLVER.BASE_LR"), ("BASE_LR", "SOLVER.BASE_LR"), ("EarlyStoping", "EarlyStopping")],
)
def test_a_misspelt_name_is_suggested(name, near):
    with pytest.raises(UnknownKeyError, match=f"did you mean '{near}'"):
        explain(name)


def test_registries_and_their_components_are_listed():
    assert "METRIC          3  TEST.METRICS, LOG.TRAIN_METRICS" in list_registries().splitlines()
    text = list_components("hooks")
    assert text == list_components("HOOK_REGISTRY")
    assert "    evaluate=True)" in text
    assert "  Stops training when a metric has not improved" in text
    with pytest.raises(UnknownKeyError, match="no registry 'modle'; did you mean 'MODEL'"):
        list_components("modle")


def test_texts_fit_the_width():
    texts = [explain_all(), list_registries(), *map(explain, get_cfg().full_keys())]
    texts += [list_components(line.split()[0]) for line in list_registries().splitlines() if line[0] != " "]
    assert max(len(line) for text in texts for line in text.splitlines()) <= 80
