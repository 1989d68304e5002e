"""An unusual value of any config key works or is refused by name: no key crashes a run, hangs it or is ignored."""

import math
from functools import cache

import pytest
import yaml
from ranks import SYNTHETIC, fork, tool

from hookline.config import ConfigError, get_cfg
from hookline.engine.setup.check import check_config

STRANGE = [-1, 0, 10**18, 10**400, math.nan, math.inf, "", [], [-1], [None], {}, {"a": 1}, True, None]
# Other keys that must be set so that a key is used.
NEEDS = {
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": {"SOLVER.CLIP_GRADIENTS.ENABLED": True},
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": {"SOLVER.CLIP_GRADIENTS.ENABLED": True},
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE": {"SOLVER.CLIP_GRADIENTS.ENABLED": True},
    "TEST.PRECISE_BN.NUM_ITER": {"TEST.PRECISE_BN.ENABLED": True},
}


def nested(flat):
    tree = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


@cache
def synthetic_config():
    cfg = get_cfg()
    cfg.merge_from_file(SYNTHETIC)
    return cfg


def accepted(key, value, folder):
    """Return a config with this value, or the error that refuses it."""
    cfg = synthetic_config().clone()
    length = {} if key == "SOLVER.MAX_ITER" else {"SOLVER.MAX_ITER": 3}
    flat = {**length, "OUTPUT_DIR": str(folder), **NEEDS.get(key, {}), key: value}
    try:
        cfg.merge_from_other_cfg(nested(flat))
        check_config(cfg)
    except ConfigError as error:
        return None, error
    return {"_BASE_": str(SYNTHETIC), **nested(flat)}, None


@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key in get_cfg().flatten()}))
def test_an_unusual_value_of_any_key_is_accepted_or_refused_by_name(section, tmp_path):
    for key in (key for key in get_cfg().flatten() if key.partition(".")[0] == section):
        for value in STRANGE:
            _, error = accepted(key, value, tmp_path / "run")
            named = (key, key.removesuffix(".NAME"), key.removesuffix(".ARGS"))
            assert error is None or any(name in str(error) for name in named), (key, value, error)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key in get_cfg().flatten() if key != "OUTPUT_DIR"])
def test_a_run_with_an_unusual_value_of_any_key_works_or_is_refused(key, tmp_path):
    for number, value in enumerate(STRANGE):
        config, _ = accepted(key, value, tmp_path / f"run{number}")
        if config is None or (key == "SOLVER.MAX_ITER" and value == 10**18):  # such a run would not end
            continue
        path = tmp_path / "strange.yaml"
        path.write_text(yaml.safe_dump(config))
        process = fork(tool("--config-file", path), tmp_path, apart=True)
        if not process.ended_within(180):  # compiling, on a busy machine
            process.kill()
            pytest.fail(f"still running after three minutes: {key} = {value}")
        code, err = process.wait(), process.communicate()[1]
        if code == 2:
            assert err.startswith("error: "), (value, err)
            assert not (tmp_path / f"run{number}").exists(), (value, err)
        elif code:
            # A learning rate of 10^18; a model that does not return its losses.
            assert "the loss is NaN or infinite" in err or "MODEL.LOSS is not set" in err, (value, err)
