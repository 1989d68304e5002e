"""Types of keys, and lists of a frozen config."""

import copy
import json
import pickle

import pytest
import torch
import yaml
from torch import nn

from hookline.config import CfgNode, ConfigError, Duration, Typed, components, get_cfg, one_of
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


# ---------------------------------------------------------------------- types


def make_cfg():
    cfg = CfgNode()
    cfg.S = CfgNode()
    cfg.S.BIAS = Typed(None, float, optional=True)
    cfg.S.NORM = Typed(0, float, optional=True)
    cfg.S.STRICT = Typed(1, int)
    cfg.S.METHOD = Typed("linear", one_of("linear", "constant"))
    cfg.S.PERIOD = Typed(100, Duration.parse)
    cfg.S.HOOKS = Typed([], components)
    cfg.S.SETS = Typed((), components)
    return cfg


def test_the_default_is_the_value():
    assert make_cfg().S == {
        "BIAS": None, "NORM": 0.0, "STRICT": 1, "METHOD": "linear", "PERIOD": 100, "HOOKS": [], "SETS": (),
    }  # fmt: skip
    assert type(make_cfg().S.NORM) is float


def test_an_optional_float():
    cfg = make_cfg()
    cfg.merge_from_list(["S.BIAS", "1", "S.NORM", "None"])
    assert (cfg.S.BIAS, cfg.S.NORM) == (1.0, None)
    cfg.merge_from_list(["S.BIAS", "null"])
    assert cfg.S.BIAS is None
    with pytest.raises(ConfigError, match=r"S\.BIAS: expected float, got 'abc' \(str\)"):
        cfg.merge_from_list(["S.BIAS", "abc"])
    with pytest.raises(ConfigError, match=r"S\.BIAS: expected float, got True \(bool\)"):
        cfg.merge_from_list(["S.BIAS", "True"])


def test_none_is_accepted_only_if_declared():
    for key in ("STRICT", "METHOD", "PERIOD", "HOOKS"):
        with pytest.raises(ConfigError, match=rf"S\.{key}: expected .*, got None"):
            make_cfg().merge_from_other_cfg({"S": {key: None}})
    with pytest.raises(ConfigError, match=r"S\.PERIOD: expected a value such as 100, got None"):
        make_cfg().merge_from_other_cfg({"S": {"PERIOD": None}})


def test_a_choice_lists_and_suggests():
    with pytest.raises(
        ConfigError, match=r"S\.METHOD: 'Linaer' is not one of 'linear', 'constant'; did you mean 'linear'\?"
    ):
        make_cfg().merge_from_list(["S.METHOD", "Linaer"])


def test_a_validated_key_keeps_the_original_value():
    cfg = make_cfg()
    cfg.merge_from_list(["S.PERIOD", "2ep"])
    assert cfg.S.PERIOD == "2ep"
    cfg.merge_from_list(["S.PERIOD", "500"])
    assert cfg.S.PERIOD == 500
    with pytest.raises(ConfigError, match=r"S\.PERIOD: '2eq' is not a duration"):
        cfg.merge_from_list(["S.PERIOD", "2eq"])


def test_components_keep_dicts_and_take_the_container_of_the_default():
    cfg = make_cfg()
    mine = [{"NAME": "A", "ARGS": {"sets": [1]}}, "B"]
    cfg.merge_from_other_cfg({"S": {"HOOKS": tuple(mine), "SETS": mine}})
    assert mine == cfg.S.HOOKS
    assert tuple(mine) == cfg.S.SETS
    assert type(cfg.S.HOOKS[0]) is dict
    mine[0]["ARGS"]["sets"].append(2)
    assert cfg.S.HOOKS[0]["ARGS"] == {"sets": [1]}
    cfg.merge_from_list(["S.SETS", "['a', {'NAME': 'b'}]"])
    assert cfg.S.SETS == ("a", {"NAME": "b"})
    with pytest.raises(ConfigError, match=r"S\.HOOKS: entry 0: .*not 'NAM'; did you mean 'NAME'"):
        cfg.merge_from_other_cfg({"S": {"HOOKS": [{"NAM": "A"}]}})


def test_assigning_checks_declared_keys_and_is_free_otherwise():
    cfg = make_cfg()
    cfg.S.NORM = 2
    assert type(cfg.S.NORM) is float
    cfg.S["METHOD"] = "constant"
    with pytest.raises(ConfigError, match="METHOD: 'cubic' is not one of"):
        cfg.S.METHOD = "cubic"
    with pytest.raises(ConfigError, match="METHOD"):
        cfg.S.update(METHOD="cubic")
    cfg.S.FREE = 1
    cfg.S.FREE = "a"
    assert cfg.S.FREE == "a"


def test_declarations_survive_copies():
    for duplicate in (make_cfg().clone(), copy.deepcopy(make_cfg()), pickle.loads(pickle.dumps(make_cfg()))):
        with pytest.raises(ConfigError, match="METHOD"):
            duplicate.merge_from_list(["S.METHOD", "cubic"])
        duplicate.merge_from_list(["S.BIAS", "1"])
        assert type(duplicate.S.BIAS) is float


def test_a_bad_default_is_refused():
    with pytest.raises(ConfigError, match="METHOD: 'x' is not one of 'a'"):
        CfgNode().METHOD = Typed("x", one_of("a"))
