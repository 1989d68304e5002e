import pytest

from hookline.config import ConfigError, get_cfg


def test_each_call_gives_an_independent_config():
    a, b = get_cfg(), get_cfg()
    a.SOLVER.BASE_LR = 3.0
    a.HOOKS.append("X")
    assert b.SOLVER.BASE_LR != 3.0
    assert b.HOOKS == []


def test_an_invalid_duration_names_its_key():
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.MAX_ITER", "20ep", "TEST.EVAL_PERIOD", "30min"])
    assert (cfg.SOLVER.MAX_ITER, cfg.TEST.EVAL_PERIOD) == ("20ep", "30min")
    with pytest.raises(ConfigError, match=r"SOLVER\.WARMUP_ITERS: '30min' is a time"):
        cfg.merge_from_list(["SOLVER.WARMUP_ITERS", "30min"])
