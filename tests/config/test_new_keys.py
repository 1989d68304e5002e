import copy
import logging
import pickle

import pytest

from hookline.config import CfgNode, ConfigError, UnknownKeyError, get_cfg

COPIES = {
    "config": lambda cfg: cfg,
    "clone": lambda cfg: cfg.clone(),
    "pickle": lambda cfg: pickle.loads(pickle.dumps(cfg)),
    "copy": copy.copy,
}


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("SOLVER", "BASE_RL", "SOLVER.BASE_LR"),
        ("SOLVER", "MAXITER", "SOLVER.MAX_ITER"),
        ("", "OUTPUTDIR", "OUTPUT_DIR"),
    ],
)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_misspelt_key_is_an_error(section, key, meant, copied):
    cfg = copied(get_cfg())
    node = cfg[section] if section else cfg
    with pytest.raises(
        UnknownKeyError, match=rf"unknown key '{meant.rpartition('.')[0]}\.?{key}'; did you mean '{meant}'"
    ):
        setattr(node, key, 1)
    with pytest.raises(UnknownKeyError, match="did you mean"):
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
    assert [record.getMessage() for record in caplog.records] == [
        "SOLVER.EVAL_PERIOD is a new key, which only your own code can read. Did you mean TEST.EVAL_PERIOD?"
    ]


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_renamed_keys_are_set_and_read_under_both_names(copied, caplog, monkeypatch):
    monkeypatch.setattr("hookline.config.node._noted", set())
    cfg = copied(get_cfg())
    with caplog.at_level(logging.WARNING):
        for size in (2, 4):
            cfg.SOLVER.IMS_PER_BATCH = size
            assert cfg.DATALOADER.BATCH_SIZE == cfg.SOLVER.IMS_PER_BATCH == cfg.SOLVER["IMS_PER_BATCH"] == size
    assert [record.getMessage() for record in caplog.records] == [
        "The config key SOLVER.IMS_PER_BATCH is DATALOADER.BATCH_SIZE here: that key is set. Please use the new name."
    ]
    cfg.DATALOADER.BATCH_SIZE = 8
    assert cfg.SOLVER.IMS_PER_BATCH == cfg.SOLVER.get("IMS_PER_BATCH", 1) == 8
    assert cfg.SOLVER.get("NOTHING", 1) == 1
    cfg.MODEL.META_ARCHITECTURE = "Net"
    assert cfg.MODEL.NAME == cfg.MODEL.META_ARCHITECTURE == "Net"
    assert "IMS_PER_BATCH" not in cfg.SOLVER.keys() | set(cfg.dump().split())
    with pytest.raises(ConfigError, match="BATCH_SIZE"):
        cfg.SOLVER.IMS_PER_BATCH = "two"
    cfg.freeze()
    with pytest.raises(AttributeError, match="frozen"):
        cfg.SOLVER.IMS_PER_BATCH = 2


def test_a_default_section_that_is_replaced_keeps_the_default_keys():
    cfg = get_cfg()
    cfg.SOLVER = CfgNode({"BASE_LR": 1})
    cfg.DATALOADER = CfgNode()
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_ITER, cfg.SOLVER.AMP.ENABLED) == (1.0, 40000, False)
    cfg.SOLVER.IMS_PER_BATCH = 5
    assert cfg.DATALOADER.BATCH_SIZE == 5
    with pytest.raises(UnknownKeyError, match=r"did you mean 'SOLVER\.AMP\.ENABLED'"):
        cfg.SOLVER.AMP.ENABLE = True
    cfg.MODEL.LOSS = CfgNode()  # a project's own section of that name
    cfg.MODEL.LOSS.CLASS_WEIGHT = 2.0
    assert cfg.MODEL.LOSS.NAME == ""
    cfg.MODEL.ARGS = CfgNode({"width": 3})
    cfg.merge_from_list(["MODEL.ARGS.depth", "2"])
    assert cfg.MODEL.ARGS == {"width": 3, "depth": 2}
    with pytest.raises(ConfigError, match="BASE_LR: expected float"):
        cfg.SOLVER = CfgNode({"BASE_LR": "fast"})


@pytest.mark.parametrize("key", ["SOLVER.OPTIMIZER", "TEST.EVALUATOR"])
def test_a_component_that_projects_name_may_be_a_name(tmp_path, key):
    section, name = key.split(".")
    cfg = get_cfg()
    setattr(cfg[section], name, "MINE")
    assert cfg[section][name] == "MINE"
    (tmp_path / "config.yaml").write_text(cfg.dump())
    again = get_cfg()
    again.merge_from_file(tmp_path / "config.yaml")
    assert again == cfg
    again.merge_from_list([key, "Other"])
    assert again[section][name] == "Other"


def test_a_renamed_key_is_in_its_section_and_only_once_among_the_keys():
    cfg = get_cfg()
    assert "IMS_PER_BATCH" in cfg.SOLVER
    assert "META_ARCHITECTURE" in cfg.MODEL
    assert "IMS_PER_BATCH" in cfg.clone().SOLVER
    assert "IMS_PER_BATCH" not in cfg.DATALOADER
    assert "IMS_PER_BATCH" not in list(cfg.SOLVER)
    assert not cfg.SOLVER.has("IMS_PER_BATCH")
    if "IMS_PER_BATCH" in cfg.SOLVER:  # as ported code asks
        cfg.SOLVER.IMS_PER_BATCH = 3
    assert cfg.DATALOADER.BATCH_SIZE == 3
    with pytest.raises(AttributeError, match="no config key"):
        del cfg.SOLVER.IMS_PER_BATCH
    assert cfg.SOLVER.pop("IMS_PER_BATCH", 7) == 7
    with pytest.raises(UnknownKeyError, match=r"was renamed to DATALOADER.BATCH_SIZE"):
        cfg.merge_from_list(["SOLVER.IMS_PER_BATCH", 4])
