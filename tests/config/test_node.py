import copy
import logging
import pickle
import re

import pytest

from hookline.config import CfgNode, ConfigError, UnknownKeyError, get_cfg
from hookline.config.values import MISSING


@pytest.fixture
def cfg():
    cfg = CfgNode()
    cfg.SEED = -1
    cfg.OUTPUT_DIR = "./output"
    cfg.FLAG = False
    cfg.ANY = None
    cfg.MODEL = CfgNode()
    cfg.MODEL.NAME = ""
    cfg.MODEL.ARGS = CfgNode(new_allowed=True)
    cfg.SOLVER = CfgNode()
    cfg.SOLVER.BASE_LR = 0.1
    cfg.SOLVER.STEPS = (1, 2)
    cfg.SOLVER.SETS = ["a"]
    cfg.LOADER = CfgNode()
    cfg.LOADER.SAMPLER_TRAIN = "Epoch"
    cfg.LOADER.SAMPLER_ARGS = CfgNode(new_allowed=True)
    return cfg


@pytest.mark.parametrize(("key", "text"), [("HOOKS", "[{NAME: EMA}]"), ("MODEL.ARGS", "{depth: 3}")])
def test_a_list_without_quotes_says_where_they_go(key, text):
    with pytest.raises(ConfigError, match=rf"{key}: {re.escape(text)} cannot be read: put each name in it in quotes"):
        get_cfg().merge_from_list([key, text])


def test_reading_a_missing_key_suggests_and_hasattr_works(cfg):
    with pytest.raises(AttributeError, match="did you mean 'BASE_LR'"):
        _ = cfg.SOLVER.BASE_LRR
    with pytest.raises(AttributeError, match=r"did you mean 'SOLVER\.BASE_LR'"):
        _ = cfg.BASE_LR
    assert not hasattr(cfg, "NOTHING")
    assert getattr(cfg, "NOTHING", 3) == 3
    assert not hasattr(cfg, "__array__")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("SOLVER.BASE_LR", "1e-3", 0.001),
        ("SOLVER.STEPS", "(3,)", (3,)),
        ("SOLVER.STEPS", "[3, 4]", (3, 4)),
        ("SOLVER.SETS", "('b',)", ["b"]),
        ("OUTPUT_DIR", "123", "123"),
        ("OUTPUT_DIR", "None", "None"),
        ("FLAG", "true", True),
        ("FLAG", "False", False),
        ("ANY", "(1, 2)", (1, 2)),
        ("MODEL.ARGS.bias", "false", False),
        ("MODEL.ARGS.width", "64", 64),
    ],
)
def test_command_line_values_are_decoded_for_their_key(cfg, key, text, value):
    cfg.merge_from_list([key, text])
    merged = cfg.flatten()[key]
    assert merged == value
    assert type(merged) is type(value)


@pytest.mark.parametrize("wrong", ["SOLVER: {BASE_LR: [1]}", "SOLVER: {GAMA: 1}", "NOPE: 1"])
def test_a_wrong_key_or_value_is_an_error_and_nothing_changes(cfg, write, wrong):
    before = cfg.clone()
    write("SEED: 5\nMODEL: {NAME: B, ARGS: {a: 1}}", "base.yaml")
    path = write(f"_BASE_: base.yaml\n{wrong}")
    with pytest.raises(ConfigError) as info:
        cfg.merge_from_file(path)
    assert str(info.value).startswith(f"{path}: ")
    with pytest.raises(UnknownKeyError, match="'A'"):
        cfg.merge_from_list(["SEED", "1", "A", "1", "B", "2"])
    assert cfg == before
    cfg.merge_from_file(write("MODEL: {NAME: B}"))
    assert cfg.MODEL.NAME == "B"


def test_overrides_are_pairs_or_assignments(cfg):
    cfg.merge_from_list(["SEED=3", "SOLVER.BASE_LR", "1", "OUTPUT_DIR=a=b", "MODEL.NAME", "x=y", "MODEL.ARGS.e="])
    assert (cfg.SEED, cfg.SOLVER.BASE_LR, cfg.OUTPUT_DIR, cfg.MODEL.NAME) == (3, 1.0, "a=b", "x=y")
    assert cfg.MODEL.ARGS.e == ""


def test_new_keys_are_accepted_only_if_allowed(cfg):
    cfg.merge_from_list(["MODEL.ARGS.width", "64", "MODEL.ARGS.a.b", "1"])
    cfg.merge_from_list(["MODEL.ARGS.a.c", "(1, 2)", "MODEL.ARGS.width", "auto"])
    assert cfg.MODEL.ARGS == {"width": "auto", "a": {"b": 1, "c": (1, 2)}}
    cfg.merge_from_list(["MODEL.ARGS", "{'depth': 3}"])
    assert cfg.MODEL.ARGS.depth == 3
    cfg.merge_from_list(["MODEL.ARGS.a", "1"])
    assert cfg.MODEL.ARGS.a == 1


def test_another_name_and_empty_arguments_drop_the_old_ones(cfg, write):
    cfg.merge_from_list(["LOADER.SAMPLER_TRAIN", "A", "LOADER.SAMPLER_ARGS.x", "1"])
    cfg.merge_from_list(["LOADER.SAMPLER_TRAIN", "A", "LOADER.SAMPLER_ARGS.y", "2"])
    assert cfg.LOADER.SAMPLER_ARGS == {"x": 1, "y": 2}
    cfg.merge_from_list(["LOADER.SAMPLER_ARGS.z", "3", "LOADER.SAMPLER_TRAIN", "B"])  # the order does not matter
    assert cfg.LOADER.SAMPLER_ARGS == {"z": 3}
    write("MODEL: {ARGS: {x: 1}, NAME: A}", "base.yaml")
    cfg.merge_from_file(write("_BASE_: base.yaml\nMODEL: {ARGS: {y: 2}, NAME: B}"))
    assert cfg.MODEL == {"NAME": "B", "ARGS": {"y": 2}}
    cfg.merge_from_other_cfg({"MODEL": {"ARGS": {"z": 3}}})
    assert cfg.MODEL.ARGS == {"y": 2, "z": 3}
    cfg.merge_from_list(["MODEL.ARGS", "{}"])
    assert cfg.MODEL.ARGS == {}


def test_the_home_folder_is_expanded_wherever_a_value_begins_with_it(cfg, write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    cfg.merge_from_file(write("OUTPUT_DIR: ~/runs\nMODEL: {ARGS: {root: ~/data, several: ['~/a', b~/]}}"))
    assert cfg.OUTPUT_DIR == "/home/me/runs"
    assert cfg.MODEL.ARGS == {"root": "/home/me/data", "several": ["/home/me/a", "b~/"]}
    cfg.merge_from_list(["OUTPUT_DIR", "~/others", "ANY=~/any"])
    assert (cfg.OUTPUT_DIR, cfg.ANY) == ("/home/me/others", "/home/me/any")
    cfg.OUTPUT_DIR = "~/third"
    assert cfg.OUTPUT_DIR == "/home/me/third"


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c, "SEED", 1),
        lambda c: c.__setitem__("SEED", 1),
        lambda c: c.merge_from_list(["SEED", 1]),
        lambda c: c.SOLVER.merge_from_other_cfg({"BASE_LR": 1}),
    ],
)
def test_a_frozen_config_does_not_change(cfg, change):
    cfg.freeze()
    before = cfg.clone()
    with pytest.raises(AttributeError, match="frozen"):
        change(cfg)
    assert cfg == before


def test_diff_shows_only_what_differs_from_the_defaults(cfg):
    other = cfg.clone()
    cfg.merge_from_list(["SOLVER.BASE_LR", "1", "MODEL.ARGS.width", "64"])
    other.merge_from_list(["MODEL.ARGS.depth", "2"])
    assert list(cfg.diff(other).items()) == [
        ("MODEL.ARGS.width", (MISSING, 64)),
        ("SOLVER.BASE_LR", (0.1, 1.0)),
        ("MODEL.ARGS.depth", (2, MISSING)),
    ]
    assert cfg.diff(cfg.clone()) == {}


def test_a_dump_restores_every_value(write):
    cfg = get_cfg()
    cfg.SOLVER.BASE_LR = 1e-05
    cfg.SOLVER.MAX_ITER = "500"
    cfg.SOLVER.STEPS = (1, "2ep")
    cfg.TEST.EXPECTED_RESULTS = [["a", "b", 0.5, (3, 4)]]
    cfg.OUTPUT_DIR = "1e-5"
    cfg.DATASETS.TRAIN = ("a", {"NAME": "b", "ARGS": {"t": (1, 2), "s": "(1, 2)", "n": "None"}})
    values = {
        "tiny": 1e-05, "huge": 1e20, "inf": float("inf"), "text": "1e-5", "number": "123", "none": None,
        "none_text": "None", "true_text": "true", "pair": (0.9, 0.95), "one": (1,), "empty": (), "yes": "yes",
        "awkward": ("a: b #c", "d'\"\n", {"k": (float("inf"), None)}), "list": [1, (2, "x"), [1e-7]], "words": "a b",
        "sub": {"deep": {"x": 1}}, "date": "2024-01-01", "unicode": "é", "lines": "a\nb\n", "blank": "",
    }  # fmt: skip
    cfg.merge_from_other_cfg({"MODEL": {"ARGS": values}})
    assert values == cfg.MODEL.ARGS
    loaded = get_cfg()
    loaded.merge_from_file(write(cfg.dump()))
    assert loaded.diff(cfg) == {}
    assert loaded.MODEL.ARGS.pair == [0.9, 0.95]  # a list in the file
    assert type(loaded.MODEL.ARGS.tiny) is float
    assert loaded.dump() == cfg.dump()


def test_a_value_that_no_file_can_hold_is_refused_when_it_is_set(cfg):
    for change in (lambda: setattr(cfg.SOLVER, "Y", object()), lambda: cfg.SOLVER.update(Y=object())):
        with pytest.raises(ConfigError, match="Y: a config cannot hold"):
            change()
    with pytest.raises(ConfigError, match="cannot hold a object"):
        CfgNode({"A": {"B": object()}})


COPIES = {
    "config": lambda cfg: cfg,
    "clone": lambda cfg: cfg.clone(),
    "pickle": lambda cfg: pickle.loads(pickle.dumps(cfg)),
    "copy": copy.copy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_misspelt_key_is_an_error(copied):
    cfg = copied(get_cfg())
    for node, key, meant in ((cfg.SOLVER, "MAXITER", "SOLVER.MAX_ITER"), (cfg, "OUTPUTDIR", "OUTPUT_DIR")):
        with pytest.raises(UnknownKeyError, match=meant):
            setattr(node, key, 1)
        with pytest.raises(UnknownKeyError, match=meant):
            node[key] = 1
        assert key not in node


def test_a_project_adds_keys_and_sections_anywhere():
    cfg = get_cfg()
    cfg.USER_CUSTOM = 1
    cfg.SOLVER.BACKBONE_LR = cfg.SOLVER.WEIGHT_DECAY_EMBED = cfg.SOLVER.HEAD_LR_FACTOR = 0.1
    cfg.MODEL.USE_DEPTH = True
    cfg.TEXT = CfgNode()  # a section is never a typing error
    cfg.MY = CfgNode()
    cfg.MY.LR_A = cfg.MY.LR_B = cfg.MY.BASE_RL = 1.0  # similar names in a section of one's own
    cfg.merge_from_list(["SOLVER.BACKBONE_LR", "0.2", "MY.LR_A", "2"])
    assert (cfg.SOLVER.BACKBONE_LR, cfg.MY.LR_A) == (0.2, 2.0)


def test_a_key_of_another_section_is_set_with_a_warning(caplog):
    cfg = get_cfg()
    with caplog.at_level(logging.WARNING):
        cfg.SOLVER.EVAL_PERIOD = 3
        cfg.SOLVER.NAME = "mine"  # means something else in each section
    [warning] = caplog.messages
    assert "TEST.EVAL_PERIOD" in warning


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_renamed_keys_are_set_and_read_under_both_names(copied, caplog):
    cfg = copied(get_cfg())
    with caplog.at_level(logging.WARNING):
        for size in (2, 4):
            cfg.SOLVER.IMS_PER_BATCH = size
            assert cfg.DATALOADER.BATCH_SIZE == cfg.SOLVER.IMS_PER_BATCH == cfg.SOLVER["IMS_PER_BATCH"] == size
    assert all("DATALOADER.BATCH_SIZE" in warning for warning in caplog.messages)
    cfg.DATALOADER.BATCH_SIZE = 8
    assert cfg.SOLVER.IMS_PER_BATCH == cfg.SOLVER.get("IMS_PER_BATCH", 1) == 8
    assert "IMS_PER_BATCH" in cfg.SOLVER  # as ported code asks
    assert "IMS_PER_BATCH" not in cfg.SOLVER.keys() | set(cfg.dump().split())
    with pytest.raises(ConfigError, match="BATCH_SIZE"):
        cfg.SOLVER.IMS_PER_BATCH = "two"
    cfg.freeze()
    with pytest.raises(AttributeError, match="frozen"):
        cfg.SOLVER.IMS_PER_BATCH = 2


def test_the_config_of_an_earlier_run_may_hold_old_keys_that_were_off(write):
    before = (cfg := get_cfg()).dump()
    cfg.merge_from_file(write("SOLVER: {COMPILE_STEP: false, COMPILE_STEP_ARGS: {}, CUDA_GRAPH: false}"))
    assert cfg.dump() == before


def test_a_default_section_that_is_replaced_keeps_the_default_keys():
    cfg = get_cfg()
    cfg.SOLVER = CfgNode({"BASE_LR": 1})
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_ITER, cfg.SOLVER.AMP.ENABLED) == (1.0, 40000, False)
    with pytest.raises(UnknownKeyError, match=r"SOLVER\.AMP\.ENABLED"):
        cfg.SOLVER.AMP.ENABLE = True
    cfg.MODEL.LOSS = CfgNode()  # a project's own section of that name
    cfg.MODEL.LOSS.CLASS_WEIGHT = 2.0
    assert cfg.MODEL.LOSS.NAME == ""
    with pytest.raises(ConfigError, match="BASE_LR"):
        cfg.SOLVER = CfgNode({"BASE_LR": "fast"})


def test_a_component_that_projects_name_may_be_a_name(write):
    cfg, again = get_cfg(), get_cfg()
    cfg.SOLVER.OPTIMIZER = cfg.TEST.EVALUATOR = "MINE"
    again.merge_from_file(write(cfg.dump()))
    assert again == cfg
    again.merge_from_list(["SOLVER.OPTIMIZER", "Other"])
    assert (again.SOLVER.OPTIMIZER, again.TEST.EVALUATOR) == ("Other", "MINE")
