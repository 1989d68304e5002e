import inspect

import pytest

from hookline.config import CfgNode, configurable
from hookline.config.signatures import parameters_of


class Base:
    def __init__(self, x: int, y: int = 0):
        pass


class Closed(Base):
    def __init__(self, z, **kwargs):
        super().__init__(**kwargs)


class Open:
    def __init__(self, a, **kwargs):
        pass


def test_keywords_are_followed_through_base_classes():
    taken = parameters_of(Closed)
    assert set(taken.keywords) == {"x", "y", "z"}
    assert taken.required == ["z"]  # the class may well set x itself
    assert not taken.any_keyword
    assert parameters_of(Open).any_keyword


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


def test_from_config_gets_its_own_arguments_and_the_others_override():
    assert Child(make_cfg(), depth=6).args == (5, 6, "net")
    assert Net(make_cfg()).args == Net(cfg=make_cfg()).args == (4, 20, "net")
    assert Net(make_cfg(), depth=3, name="x", width=7).args == (7, 30, "x")
    assert Net(1, 2, name="y").args == (1, 2, "y")  # without a config it is a plain call


def test_a_from_config_that_cannot_work_is_an_error_when_the_target_is_called():
    class NoClassMethod(Net):
        def from_config(self, cfg):
            return {}

    class NoConfig(Net):
        @classmethod
        def from_config(cls, width):
            return {}

    with pytest.raises(TypeError, match=r"NoClassMethod\.from_config must be a classmethod"):
        NoClassMethod(make_cfg())
    with pytest.raises(TypeError, match=r"NoConfig\.from_config must take 'cfg'"):
        NoConfig(make_cfg())


def test_a_function_takes_from_config():
    @configurable(from_config=lambda cfg: {"width": cfg.WIDTH})
    def build(width, depth=1):
        return width, depth

    assert build(make_cfg(), depth=2) == (4, 2)
    assert build(8) == (8, 1)
    assert list(inspect.signature(build).parameters) == ["width", "depth"]


def test_a_lazy_config_is_a_config():
    omegaconf = pytest.importorskip("omegaconf")
    assert Net(omegaconf.OmegaConf.create(make_cfg().dump())).args == Net(make_cfg()).args
