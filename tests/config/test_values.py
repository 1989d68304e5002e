"""Types of keys, and copies."""

import copy
import pickle

import pytest

from hookline.config import CfgNode, ConfigError, Typed, components, get_cfg, one_of
from hookline.config.values import mode_of


def test_copies_and_configs_are_independent():
    cfg = get_cfg()
    cfg.set_new_allowed(True)
    cfg.merge_from_other_cfg({"SIZES": [[32], [64, 128]], "HOOKS": ["X"]})
    cfg.freeze()
    for copied in (cfg.clone(), copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))):
        assert copied == cfg
        assert copied.is_frozen()
        copied.defrost()
        copied.SIZES[0].append(1)
    assert cfg.SIZES == [[32], [64, 128]]
    assert type(cfg.clone()["SIZES"]) is list
    assert get_cfg().diff(cfg).keys() == {"HOOKS", "SIZES"}


def make_cfg():
    cfg = CfgNode()
    cfg.S = CfgNode()
    cfg.S.BIAS = Typed(None, float, optional=True)
    cfg.S.NORM = Typed(0, float, optional=True)
    cfg.S.METHOD = Typed("linear", one_of("linear", "constant"))
    cfg.S.HOOKS = Typed([], components)
    cfg.S.SETS = Typed((), components)
    return cfg


def test_an_optional_float():
    cfg = make_cfg()
    cfg.merge_from_list(["S.BIAS", "1", "S.NORM", "None"])
    assert (cfg.S.BIAS, cfg.S.NORM) == (1.0, None)
    cfg.merge_from_list(["S.BIAS", "null"])
    assert cfg.S.BIAS is None
    for wrong in ("abc", "True"):
        with pytest.raises(ConfigError, match=r"S\.BIAS: expected float"):
            cfg.merge_from_list(["S.BIAS", wrong])


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
    with pytest.raises(ConfigError, match=r"S\.HOOKS: entry 0: "):
        cfg.merge_from_other_cfg({"S": {"HOOKS": [{"NAM": "A"}]}})


def test_assigning_checks_declared_keys_and_is_free_otherwise():
    cfg = make_cfg()
    cfg.S.NORM = 2
    assert type(cfg.S.NORM) is float
    cfg.S["METHOD"] = "constant"
    with pytest.raises(ConfigError, match="METHOD"):
        cfg.S.METHOD = "cubic"
    with pytest.raises(ConfigError, match="METHOD"):
        cfg.S.update(METHOD="cubic")
    cfg.S.FREE = 1
    cfg.S.FREE = "a"
    assert cfg.S.FREE == "a"


def test_less_is_better_of_a_loss_an_error_or_a_perplexity_by_the_metrics_name():
    less = "test/loss val_loss total_loss test/MSELoss test/MeanSquaredError test/rmse test/word_error_rate test/wer"
    less += " test/perplexity test/nll test/bits_per_byte test/cross_entropy/0 my.module:mean_loss test/err"
    less += " test/miss_rate test/EditDistance test/kl_divergence test/minADE test/fde test/hinge test/chamfer"
    more = "test/accuracy error_set/accuracy test/f1 test/power test/soccer test/neg_mean_squared_error test/AP50"
    more += " lossless:score bleu test/edited test/shade test/missing_f1"
    assert {name: mode_of(name) for name in (less + " " + more).split()} == {
        **dict.fromkeys(less.split(), "min"),
        **dict.fromkeys(more.split(), "max"),
    }
    assert (mode_of("test/loss", "max"), mode_of("test/accuracy", "min")) == ("max", "min")
