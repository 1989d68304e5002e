import collections.abc
import inspect
import typing
from typing import Annotated, Any, Literal, Optional, Union

import pytest
import torch

from hookline.config import CfgNode, configurable
from hookline.config.signatures import fits, what_it_takes


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, [1], [True, 1.0, "1", None, [1]]),
        (float, [1, 0.5], [True, "1", None]),
        (bool, [True], [1, "true"]),
        (str, ["a"], [1, None]),
        (None, [None], [0]),
        (list, [[1], (1,)], ["a", 1, {}]),
        (list[int], [[1], (1,), []], [["a"], "a"]),
        (tuple[float, float], [(1, 2), [0.5, 2]], [(1,), (1, "a")]),
        (tuple[int, ...], [(), [1, 2]], [["a"]]),
        (collections.abc.Sequence[str], [["a"]], ["a", [1]]),
        (typing.Sequence, [["a"]], [1]),
        (typing.List[int], [[1]], [[0.5]]),  # noqa: UP006
        (dict, [{}], [[]]),
        (dict[str, int], [{"a": 1}], [{"a": "b"}, {1: 1}]),
        (typing.Mapping[str, Any], [{"a": object()}], [3]),
        (torch.Tensor, [1, 0.5, [1, 2], [[1], [2]], torch.ones(1)], ["a", ["a"], True, None, {}]),
        (Optional[int], [1, None], ["a"]),  # noqa: UP045
        (Union[int, str], [1, "a"], [0.5]),  # noqa: UP007
        (int | None, [1, None], [0.5]),
        (Literal["a", 1], ["a", 1], ["b", True]),
        (Annotated[int, "x"], [1], ["a"]),
        (Any, [object()], []),
        (complex, ["anything"], []),
        (int | complex, ["anything"], []),
        (typing.Callable[[int], int], ["anything"], []),
    ],
)
def test_values_fit_annotations(annotation, good, bad):
    assert all(fits(value, annotation) for value in good)
    assert not any(fits(value, annotation) for value in bad)


class Base:
    def __init__(self, x: int, y: int = 0):
        pass


class Closed(Base):
    def __init__(self, z, **kwargs):
        super().__init__(**kwargs)


class Open:
    def __init__(self, a, **kwargs):
        pass


class Inherits(Closed):
    pass


def test_keywords_are_followed_through_base_classes():
    taken = what_it_takes(Closed)
    assert set(taken.keywords) == {"x", "y", "z"}
    assert taken.required == ["z"]  # the class may well set x itself
    assert not taken.any_keyword
    assert set(what_it_takes(Inherits).keywords) == {"x", "y", "z"}
    assert what_it_takes(Open).any_keyword


def test_classes_without_init_and_builtins():
    class Empty:
        pass

    class New:
        def __new__(cls, a):
            return super().__new__(cls)

    assert what_it_takes(Empty).keywords == {}
    assert list(what_it_takes(New).keywords) == ["a"]
    assert what_it_takes(min) is None
    assert what_it_takes(dict).any_keyword


def test_a_signature_on_the_class_takes_precedence():
    class Declares:
        __signature__ = inspect.Signature([inspect.Parameter("only", inspect.Parameter.KEYWORD_ONLY)])

        def __init__(self, **kwargs):
            pass

    assert list(what_it_takes(Declares).keywords) == ["only"]


# ---------------------------------------------------------------- configurable


def make_cfg():
    return CfgNode({"WIDTH": 4})


class Net:
    @configurable
    def __init__(self, width, depth=1, *, name="net"):
        self.args = (width, depth, name)

    @classmethod
    def from_config(cls, cfg, depth=2):
        return {"width": cfg.WIDTH, "depth": depth * 10}


class ChildNet(Net):
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
    assert ChildNet(make_cfg()).args == (5, 1, "net")
    assert ChildNet(make_cfg(), depth=6).args == (5, 6, "net")


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
