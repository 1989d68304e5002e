"""Invalid input is refused at once: exit code 2, one line that names it, nothing written."""

import math
import os
from functools import cache
from pathlib import Path

import pytest
import yaml
from forker import forker

from hookline.config import ConfigError, get_cfg
from hookline.engine import check_config

ROOT = Path(__file__).parents[2]
SYNTHETIC = ROOT / "configs/synthetic/mlp.yaml"

# Data sets that yield no batch.
DATA = """
import torch
from hookline.engine.data import ArrayDataset

def rows(size: int):
    return ArrayDataset(torch.zeros(size, 8), torch.zeros(size, dtype=torch.int64))
"""


def run(folder, *arguments, seconds=60.0):
    """Run the tool, and return its exit code and standard error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    process = forker.start([ROOT / "tools/train_net.py", *arguments], folder, environment, apart=True)
    if not process.ended_within(seconds):
        process.kill()
        pytest.fail(f"still running after {seconds:g} s: {arguments}")
    return process.wait(), process.communicate()[1]


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}


def refusal(folder, *arguments):
    """Return the line with which the tool refuses to run."""
    (folder / "rows.py").write_text(DATA)
    before = contents(folder)
    code, err = run(folder, *arguments)
    assert code == 2, err
    assert contents(folder) == before
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def long_chain_of_bases(folder):
    for number in range(2000):
        (folder / f"{number}.yaml").write_text(f"_BASE_: {number + 1}.yaml\n")
    (folder / "0.yaml").rename(folder / "bad.yaml")


def deep(folder):
    (folder / "bad.yaml").write_text("SEED: " + "[" * 3000 + "]" * 3000)


def deep_blocks(folder):
    (folder / "bad.yaml").write_text("\n".join(" " * n + f"a{n}:" for n in range(1000)))


def device(folder):
    (folder / "bad.yaml").symlink_to("/dev/zero")


def large(folder):
    (folder / "bad.yaml").write_text("# a comment\n" * 200_000)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (long_chain_of_bases, "_BASE_ leads to more than 100 files"),
        (deep, "bad.yaml: nested too deep"),
        (deep_blocks, "bad.yaml: nested too deep"),
        (device, "bad.yaml: larger than 1 MB"),
        (large, "bad.yaml: larger than 1 MB"),
    ],
)
def test_a_config_file_that_would_expand_without_end_is_refused(tmp_path, make, says):
    make(tmp_path)
    assert says in refusal(tmp_path, "--config-file", tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["DATASETS.TRAIN", "[{'NAME':'rows:rows','ARGS':{'size':0}}]"], "DATASETS.TRAIN[0]: the data set rows:rows"),
        (
            ["DATASETS.TRAIN", "[{'NAME':'rows:rows','ARGS':{'size':9}}]", "DATALOADER.DROP_LAST", "True"],
            "DATALOADER.BATCH_SIZE: an epoch has fewer than 64 samples",
        ),
        (["SOLVER.ACCUMULATION_STEPS", "65"], "SOLVER.ACCUMULATION_STEPS: a batch of 64 samples"),
        (["DATALOADER.NUM_WORKERS", "1000"], "DATALOADER.NUM_WORKERS: must be at most "),
        (["SEED", str(10**30)], "SEED: must be at most "),
        (["SEED", "9" * 5000], "SEED: expected int, got "),
        (["SEED", "[" * 3000 + "]" * 3000], "SEED: expected int, got "),
        (["SOLVER.BASE_LR", "nan"], "SOLVER.BASE_LR: expected float, got 'nan'"),
        (["SOLVER.BASE_LR", "1e999"], "SOLVER.BASE_LR: must be a finite number, not inf"),
        (["PARALLEL.TIMEOUT", "1e30h"], "PARALLEL.TIMEOUT: '1e30h' is not a duration"),
    ],
)
def test_an_invalid_value_is_refused(tmp_path, overrides, says):
    assert says in refusal(tmp_path, "--config-file", SYNTHETIC, "OUTPUT_DIR", "run", *overrides)


def test_an_empty_test_set_is_refused_before_it_is_evaluated(tmp_path):
    (tmp_path / "rows.py").write_text(DATA)
    empty = "[{'NAME':'rows:rows','ARGS':{'size':0}}]"
    overrides = ["DATASETS.TEST", empty, "CHECKPOINT.BEST.METRIC", "", "SOLVER.MAX_ITER", "3"]
    code, err = run(tmp_path, "--config-file", SYNTHETIC, "OUTPUT_DIR", "run", *overrides)
    assert code == 2
    message, note = err.splitlines()
    assert message == "error: DATASETS.TEST[0]: the data set rows:rows has no samples"
    assert "TEST.SANITY_CHECK_BATCHES" in note


# ---------------------------------------------------------------------- every key

STRANGE = [-1, 0, 10**18, 10**30, 10**400, math.nan, math.inf, "", [], [-1], [None], {}, {"a": 1}, True, None]
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


@pytest.mark.parametrize("key", get_cfg().flatten())
def test_an_unusual_value_of_any_key_is_accepted_or_refused_by_name(key, tmp_path):
    for value in STRANGE:
        _, error = accepted(key, value, tmp_path / "run")
        named = (key, key.removesuffix(".NAME"), key.removesuffix(".ARGS"))
        assert error is None or any(name in str(error) for name in named), (value, error)
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("key", [key for key in get_cfg().flatten() if key != "OUTPUT_DIR"])
def test_a_run_with_an_unusual_value_of_any_key_works_or_is_refused(key, tmp_path):
    for number, value in enumerate(STRANGE):
        config, _ = accepted(key, value, tmp_path / f"run{number}")
        if config is None or (key == "SOLVER.MAX_ITER" and value == 10**18):  # such a run would not end
            continue
        path = tmp_path / "strange.yaml"
        path.write_text(yaml.safe_dump(config))
        code, err = run(tmp_path, "--config-file", path)
        if code == 2:
            assert err.startswith("error: "), (value, err)
            assert not (tmp_path / f"run{number}").exists(), (value, err)
        elif code:
            # A learning rate of 10^30; a model that does not return its losses.
            assert "the loss is NaN or infinite" in err or "MODEL.LOSS is not set" in err, (value, err)
