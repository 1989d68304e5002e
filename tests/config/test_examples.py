"""Example configs are found by their names, wherever one is."""

import pytest

from hookline.config import ConfigError, get_cfg
from hookline.config.examples import example_names, find_config


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def merged(name):
    cfg = get_cfg()
    cfg.merge_from_file(name)
    return cfg


@pytest.mark.parametrize("name", ["digits/convnet.yaml", "configs/digits/convnet.yaml"])
def test_an_example_is_found_by_its_name(name):
    assert "digits/convnet.yaml" in example_names()
    cfg = merged(name)
    assert cfg.MODEL.NAME == "ConvNet"
    assert cfg.SOLVER.OPTIMIZER.NAME == "AdamW"  # of its _BASE_


def test_a_file_on_the_disk_wins(tmp_path):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "convnet.yaml").write_text("SEED: 77\n")
    assert merged("digits/convnet.yaml").SEED == 77
    assert find_config("digits/convnet.yaml") == "digits/convnet.yaml"


def test_a_base_may_be_an_example(tmp_path):
    (tmp_path / "mine.yaml").write_text('_BASE_: "digits/mlp.yaml"\nSEED: 77\n')
    cfg = merged("mine.yaml")
    assert (cfg.SEED, cfg.MODEL.NAME) == (77, "MLP")


@pytest.mark.parametrize("base", ["Base.yaml", "../Base.yaml", "mlp.yaml"])
def test_a_missing_base_is_not_replaced_by_a_part_of_an_example(tmp_path, base):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "mine.yaml").write_text(f'_BASE_: "{base}"\n')
    with pytest.raises(ConfigError, match="cannot read this config file"):
        merged("digits/mine.yaml")


def test_a_misspelt_example_is_suggested():
    with pytest.raises(ConfigError, match=r"did you mean 'digits/convnet.yaml'"):
        merged("digits/convet.yaml")
