"""Configs in Python: loading, saving, overrides, and the calls that they describe."""

import functools
from fractions import Fraction
from itertools import count

import pytest

from hookline.config import ConfigError, UnknownKeyError, instantiate

omegaconf = pytest.importorskip("omegaconf")

from hookline.config import LazyCall as L  # noqa: E402
from hookline.config import LazyConfig  # noqa: E402


def area(width, height=1, *, scale=1):
    return width * height * scale


def saved(cfg, folder):
    """What a config is after it was saved and loaded."""
    LazyConfig.save(cfg, str(folder / "saved.yaml"))
    return LazyConfig.load(str(folder / "saved.yaml"))


def test_calls_are_described_changed_saved_and_made(tmp_path):
    cfg = L(area)(width=2, height=L(area)(width=3), scale="${width}")
    cfg.width = 5
    for same in (cfg, saved(cfg, tmp_path)):
        assert instantiate(same) == 5 * 3 * 5
    later = L(dict)(x=L(area)(_partial_=True, scale=4), y=functools.partial(area, scale=4))
    made = instantiate(saved(later, tmp_path))
    assert made["x"](width=2) == made["y"](width=2) == 8
    described = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    assert instantiate([{"width": 2}, described]) == [{"width": 2}, Fraction(1, 2)]


@pytest.fixture
def project(tmp_path):
    """Config files that import each other."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common/base.py").write_text('name = "base"\nnumbers = {"a": 1, "b": 2}\n_hidden = {"c": 3}\n')
    (tmp_path / "common/other.py").write_text(
        "from hookline.config import LazyConfig\n"
        'name, numbers = LazyConfig.load_rel("base.py", ("name", "numbers"))\n'
        "assert numbers.a == 1\n"
    )
    (tmp_path / "main.py").write_text(
        "from itertools import count\n"
        "from hookline.config import LazyCall as L\n"
        "from .common.base import name, numbers\n"
        'numbers.a = "changed"\n'
        "from .common.other import numbers as unchanged\n"
        "call = L(count)(start=name)\n"
        "def later():\n    from .common.base import name\n    return name\n"
        "assert later() == 'base'\n"
    )
    return tmp_path


def test_a_config_is_the_dicts_and_calls_of_a_file(project):
    cfg = LazyConfig.load(str(project / "main.py"))
    assert set(cfg) == {"numbers", "unchanged", "call"}
    assert cfg.numbers == {"a": "changed", "b": 2}
    assert cfg.unchanged.a == 1  # every import runs the file again
    assert LazyConfig.load(str(project / "main.py"), "call")["_target_"] is count
    assert LazyConfig.load(str(project / "main.py"), ("name", "numbers"))[0] == "base"


def test_loading_yaml_runs_no_code(tmp_path):
    (tmp_path / "a.yaml").write_text("x: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError, match=r"os\.getcwd"):
        LazyConfig.load(str(tmp_path / "a.yaml"))


@pytest.fixture
def cfg():
    return omegaconf.DictConfig(
        {"train": {"max_iter": 10, "names": ["a"]}, "call": L(area)(width=2)}, flags={"allow_objects": True}
    )


def test_overrides_change_keys(cfg):
    overrides = ["train.max_iter=20", 'train.names=["x",1]', "call.height=4", "+train.new.deep=1", "train.names[0]=y"]
    assert LazyConfig.apply_overrides(cfg, overrides) is cfg
    assert cfg.train == {"max_iter": 20, "names": ["y", 1], "new": {"deep": 1}}
    assert instantiate(cfg.call) == 8


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-3", -3),
        ("1e-3", 0.001),
        ("null", None),
        ("a=b", "a=b"),
        ('"1"', "1"),
        ("{a: 1, c: [x, 2.5]}", {"a": 1, "c": ["x", 2.5]}),
        ("tcp://a,b:1", "tcp://a,b:1"),
        ("${train.max_iter}", 10),
    ],
)
def test_values_of_overrides_are_yaml(cfg, text, value):
    assert LazyConfig.apply_overrides(cfg, [f"+train.new={text}"]).train.new == value


@pytest.mark.parametrize(
    "override",
    ["train.max_iter", "=1", "~train.max_iter=1", "train.names=[1,2", "train.names=(0.9, b)", "train.max_iter.x=1"],
)
def test_an_override_that_cannot_be_read_is_an_error(cfg, override):
    with pytest.raises((ConfigError, KeyError)):
        LazyConfig.apply_overrides(cfg, [override])


def test_a_misspelt_key_or_argument_is_an_error(cfg, project):
    with pytest.raises(UnknownKeyError, match=r"'train\.max_iter'"):
        LazyConfig.apply_overrides(cfg, ["train.max_itr=1"])
    with pytest.raises(UnknownKeyError, match="'numbers'"):
        LazyConfig.load(str(project / "main.py"), "number")
    with pytest.raises(ConfigError, match="'widht'"):
        instantiate({"_target_": area, "widht": 2})
    with pytest.raises(TypeError, match="unsupported operand"):  # of the target itself: raised as it is
        instantiate(L(area)(width=None))
