import collections.abc
import typing
from typing import Annotated, Any, Literal, Optional, Union

import pytest
import torch

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
    import inspect

    class Declares:
        __signature__ = inspect.Signature([inspect.Parameter("only", inspect.Parameter.KEYWORD_ONLY)])

        def __init__(self, **kwargs):
            pass

    assert list(what_it_takes(Declares).keywords) == ["only"]
