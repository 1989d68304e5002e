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
