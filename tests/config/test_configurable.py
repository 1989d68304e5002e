import inspect

import pytest

from hookline.config import CfgNode, configurable


def make_cfg():
    return CfgNode({"WIDTH": 4})


class Net:
    @configurable
    def __init__(self, width, depth=1, *, name="net"):
        self.args = (width, depth, name)

    @classmethod
    def from_config(cls, cfg, depth=2):
        return {"width": cfg.WIDTH, "depth": depth * 10}


class Child(Net):
    @classmethod
    def from_config(cls, cfg):
        return {"width": cfg.WIDTH + 1}


def test_a_config_is_turned_into_arguments():
    assert Net(make_cfg()).args == (4, 20, "net")
    assert Net(cfg=make_cfg()).args == (4, 20, "net")


def test_from_config_gets_its_own_arguments_and_the_others_override():
    assert Net(make_cfg(), depth=3, name="x", width=7).args == (7, 30, "x")


def test_without_a_config_it_is_a_plain_call():
    assert Net(1, 2, name="y").args == (1, 2, "y")
    with pytest.raises(TypeError):
        Net()


def test_a_subclass_has_its_own_from_config():
    assert Child(make_cfg()).args == (5, 1, "net")
    assert Child(make_cfg(), depth=6).args == (5, 6, "net")


def test_a_function_takes_from_config():
    @configurable(from_config=lambda cfg: {"width": cfg.WIDTH})
    def build(width, depth=1):
        """Builds."""
        return width, depth

    assert build(make_cfg()) == (4, 1)
    assert build(make_cfg(), depth=2) == (4, 2)
    assert build(8) == (8, 1)
    assert build.__doc__ == "Builds."
    assert list(inspect.signature(build).parameters) == ["width", "depth"]
    assert build.from_config(make_cfg()) == {"width": 4}


def test_from_config_with_kwargs_gets_all():
    @configurable(from_config=lambda cfg, **kwargs: {"width": cfg.WIDTH, "rest": kwargs})
    def build(width, rest):
        return width, rest

    assert build(make_cfg(), a=1) == (4, {"a": 1})


def test_misuse_is_explained():
    with pytest.raises(TypeError, match="on the __init__ of a class"):

        @configurable
        def build():
            pass

    with pytest.raises(TypeError, match="needs from_config"):
        configurable()
    with pytest.raises(TypeError, match="first parameter of a from_config function is 'cfg'"):
        configurable(from_config=lambda config: {})


def test_a_class_without_a_good_from_config_is_explained():
    class Without:
        @configurable
        def __init__(self, a):
            pass

    class NotAMethod(Without):
        def from_config(self, cfg):
            return {}

    class NotADict(Without):
        @classmethod
        def from_config(cls, cfg):
            return 3

    with pytest.raises(AttributeError, match=r"Without is @configurable, so it needs a class method from_config"):
        Without(make_cfg())
    with pytest.raises(AttributeError, match=r"Without is @configurable"):
        Without(a=1)
    with pytest.raises(TypeError, match=r"NotAMethod.from_config must be a class method"):
        NotAMethod(make_cfg())
    with pytest.raises(TypeError, match=r"NotADict.from_config must return a dict"):
        NotADict(make_cfg())


def test_a_lazy_config_is_a_config():
    omegaconf = pytest.importorskip("omegaconf")
    assert Net(omegaconf.OmegaConf.create(make_cfg().dump())).args == Net(make_cfg()).args
