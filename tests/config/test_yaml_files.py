import os

import pytest

from hookline.config import CfgNode, ConfigError, get_cfg
from hookline.config.yaml_files import example_names, find_config


def make_cfg():
    return CfgNode({"A": 0, "B": 0, "C": 0, "LR": 0.1, "T": [1], "S": "", "ARGS": {}})


def merged(path):
    cfg = make_cfg()
    cfg.merge_from_file(path)
    return cfg


def test_bases_are_merged_first_wherever_they_are_listed(write, tmp_path, monkeypatch):
    write("A: 1\nB: 1\nC: 1", "root.yaml")
    write("_BASE_: ../root.yaml\nB: 2\nC: 2", "sub/middle.yaml")
    cfg = merged(write("_BASE_: sub/middle.yaml\nC: 3"))
    assert (cfg.A, cfg.B, cfg.C) == (1, 2, 3)
    assert merged(write(f"_BASE_: {tmp_path}/root.yaml", "abs.yaml")).A == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    assert merged(write("_BASE_: ~/root.yaml", "sub/home.yaml")).A == 1


def test_of_several_bases_the_later_wins_and_bases_may_share_a_base(write):
    write("A: 1\nB: 1", "root.yaml")
    write("_BASE_: root.yaml\nA: 2", "x.yaml")
    write("_BASE_: root.yaml\nB: 3", "y.yaml")
    cfg = merged(write("_BASE_: [x.yaml, y.yaml]\nC: 4"))
    assert (cfg.A, cfg.B, cfg.C) == (1, 3, 4)


def test_a_circle_of_bases_shows_the_chain(write):
    path = write("_BASE_: b.yaml", "a.yaml")
    other = write("_BASE_: ./a.yaml", "b.yaml")
    with pytest.raises(ConfigError, match=f"{path} -> {other} -> "):
        merged(path)


def test_a_missing_base_names_both_files(write):
    path = write("_BASE_: nope.yaml")
    with pytest.raises(ConfigError, match=r"nope\.yaml: .*a\.yaml"):
        merged(path)
    with pytest.raises(ConfigError, match="_BASE_"):
        merged(write("_BASE_: 3"))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("A: 1\nB: [1", 2, ""),
        ("A: 1\nARGS:\n  x: 1\n  x: 2", 4, "'x'"),
        ("A: !!python/object/apply:os.system ['touch PWNED']", 1, "os.system"),
    ],
)
def test_bad_yaml_names_file_and_line(write, text, line, message):
    path = write(text)
    for unsafe in (False, True):
        with pytest.raises(ConfigError) as info:
            make_cfg().merge_from_file(path, allow_unsafe=unsafe)
        assert str(info.value).startswith(f"{path}:{line}: ")
        assert message in str(info.value)
    assert not os.path.exists("PWNED")


def test_a_python_file_is_never_executed(write, tmp_path):
    path = write(f"open({str(tmp_path / 'ran')!r}, 'w'); cfg = {{}}", "c.py")
    for config in (path, write("_BASE_: c.py")):
        with pytest.raises(ConfigError, match=r"c\.py"):
            merged(config)
    assert not (tmp_path / "ran").exists()


def test_unquoted_scalars_are_literals_and_quoted_ones_text(write):
    cfg = make_cfg()
    cfg.ARGS.set_new_allowed(True)
    values = """
    a: (1, 2)
    b: "(1, 2)"
    c: "123"
    d: 1e-3
    e: 2024-01-01
    f: None
    """
    cfg.merge_from_file(write(f'T: (3, 4)\nS: "(1, 2)"\nARGS:{values}'))
    assert cfg.T == [3, 4]
    assert cfg.S == "(1, 2)"
    assert cfg.ARGS == {"a": (1, 2), "b": "(1, 2)", "c": "123", "d": 0.001, "e": "2024-01-01", "f": None}
    assert {type(value) for value in cfg.ARGS.values()} == {tuple, str, float, type(None)}


def example(name):
    cfg = get_cfg()
    cfg.merge_from_file(name)
    return cfg


@pytest.mark.parametrize("name", ["digits/convnet.yaml", "configs/digits/convnet.yaml"])
def test_an_example_is_found_by_its_name_and_a_missing_base_is_an_error(name, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "digits/convnet.yaml" in example_names()
    cfg = example(name)
    assert cfg.MODEL.NAME == "ConvNet"
    assert cfg.SOLVER.OPTIMIZER.NAME == "AdamW"  # of its _BASE_
    with pytest.raises(ConfigError, match=r"mlp\.yaml"):
        example(write("_BASE_: mlp.yaml", "digits/mine.yaml"))


def test_a_file_on_the_disk_wins_and_a_base_may_be_an_example(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write('_BASE_: "digits/mlp.yaml"\nSEED: 77\n', "digits/convnet.yaml")
    cfg = example("digits/convnet.yaml")
    assert (cfg.SEED, cfg.MODEL.NAME) == (77, "MLP")
    assert find_config("digits/convnet.yaml") == "digits/convnet.yaml"
