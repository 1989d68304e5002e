"""Lists of a frozen config."""

import copy
import json
import pickle

import pytest
import torch
import yaml
from torch import nn

from hookline.config import CfgNode, get_cfg
from hookline.engine import SimpleTrainer
from hookline.engine.checkpoint import Checkpointer


def cfg_of(**keys):
    cfg = get_cfg()
    cfg.DATASETS.TRAIN = ("a",)
    cfg.set_new_allowed(True)
    cfg.merge_from_other_cfg({"SIZES": [[32], [64, 128]], "RATES": ([1, 2], 3), **keys})
    cfg.freeze()
    return cfg


CHANGES = {
    "append": lambda sizes: sizes.append(1),
    "extend": lambda sizes: sizes.extend([1]),
    "insert": lambda sizes: sizes.insert(0, 1),
    "pop": lambda sizes: sizes.pop(),
    "remove": lambda sizes: sizes.remove([32]),
    "clear": lambda sizes: sizes.clear(),
    "sort": lambda sizes: sizes.sort(),
    "reverse": lambda sizes: sizes.reverse(),
    "set": lambda sizes: sizes.__setitem__(0, 1),
    "slice": lambda sizes: sizes.__setitem__(slice(None), [1]),
    "del": lambda sizes: sizes.__delitem__(0),
    "nested": lambda sizes: sizes[0].append(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_they_cannot_be_changed_in_place(change):
    cfg = cfg_of()
    with pytest.raises(
        AttributeError, match=r"the list SIZES cannot be changed: the config is frozen. Copy it, list\("
    ):
        change(cfg.SIZES)
    assert cfg.SIZES == [[32], [64, 128]]


def test_augmented_assignment_and_lists_in_tuples():
    cfg = cfg_of()
    with pytest.raises(AttributeError, match="cannot be changed"):
        cfg.SIZES += [1]
    with pytest.raises(AttributeError, match="RATES cannot be changed"):
        cfg.RATES[0].append(1)
    with pytest.raises(AttributeError, match="HOOKS cannot be changed"):
        cfg.HOOKS.append("EMA")
    assert cfg.SIZES == [[32], [64, 128]]


def test_reading_and_copies_are_those_of_a_plain_list():
    sizes = cfg_of().SIZES
    assert sizes == [[32], [64, 128]]
    assert isinstance(sizes, list)
    assert sizes[0] == [32]
    for copied in (
        list(sizes),
        sizes.copy(),
        sizes[:],
        [*sizes],
        sizes.__add__([]),
        copy.copy(sizes),
        copy.deepcopy(sizes),
    ):
        assert type(copied) is list
        copied.append(1)
    assert type(copy.deepcopy(sizes)[0]) is list
    assert type(pickle.loads(pickle.dumps(sizes))) is list
    assert json.loads(json.dumps(sizes)) == sizes
    assert yaml.safe_load(yaml.safe_dump(sizes)) == sizes
    assert yaml.dump(sizes) == yaml.dump([[32], [64, 128]])
    assert repr(sizes) == "[[32], [64, 128]]"


def test_copies_of_the_config():
    cfg = cfg_of()
    for copied in (cfg.clone(), copy.copy(cfg), pickle.loads(pickle.dumps(cfg))):
        assert copied == cfg
        with pytest.raises(AttributeError, match="cannot be changed"):
            copied.SIZES.append(1)
        copied.defrost()
        copied.SIZES.append(1)
        copied.SIZES[0].append(1)
        assert type(copied.SIZES) is list
    assert cfg.SIZES == [[32], [64, 128]]
    text = cfg.dump()
    assert "SIZES" in text
    assert type(cfg.to_dict()["SIZES"]) is list
    assert get_cfg().diff(cfg).keys() == {"DATASETS.TRAIN", "SIZES", "RATES"}


def test_a_list_put_into_another_config_is_a_plain_one():
    cfg, other = cfg_of(), CfgNode({"SIZES": [], "MORE": []})
    other.SIZES = cfg.SIZES
    other["MORE"] = cfg.SIZES
    other.merge_from_other_cfg({"SIZES": cfg.SIZES})
    assert type(other.SIZES) is type(other.MORE) is type(other.SIZES[0]) is list
    merged = get_cfg()
    merged.set_new_allowed(True)
    merged.merge_from_other_cfg(cfg)
    merged.SIZES.append(1)


def test_an_optimizer_may_hold_one_and_its_checkpoint_can_be_loaded(tmp_path):
    cfg = cfg_of(BETAS=[0.9, 0.99])
    model = nn.Linear(1, 1)
    adam = torch.optim.Adam(model.parameters(), betas=cfg.BETAS)
    trainer = SimpleTrainer(model, [torch.ones(1, 1)], adam)
    Checkpointer(model, str(tmp_path), trainer=trainer).save("model")
    assert torch.load(tmp_path / "model.pth", weights_only=True)
