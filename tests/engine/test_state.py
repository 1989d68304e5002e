import enum
import io
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch

from hookline.engine.state import capture_rng, restore_rng, to_plain


class Colour(enum.IntEnum):
    RED = 2


class Mode(enum.StrEnum):
    MAX = "max"


Point = namedtuple("Point", "x y")


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()


def test_restored_generators_draw_the_same_numbers():
    draw()
    state = through_a_file(capture_rng())
    expected = [draw() for _ in range(3)]
    draw()
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected


def test_a_captured_state_is_not_changed_by_drawing():
    state = capture_rng()
    expected = draw()
    for _ in range(2):
        restore_rng(state)
        assert draw() == expected


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("loss"), "loss"),
        (np.bytes_(b"x"), b"x"),
        (Colour.RED, 2),
        (Mode.MAX, "max"),
        (deque([1, 2]), [1, 2]),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (OrderedDict(a=1), {"a": 1}),
        (Counter("aab"), {"a": 2, "b": 1}),
        ({"a": {"b": (1, np.int64(2))}}, {"a": {"b": (1, 2)}}),
        (Point(1, 2), (1, 2)),
        ({1, 2}, {1, 2}),
        (frozenset({1}), {1}),
        (range(3), [0, 1, 2]),
        (pathlib.Path("a/b"), "a/b"),
        ({np.int64(1): None}, {1: None}),
        ({np.str_("a"): 1}, {"a": 1}),
        (torch.float16, torch.float16),
        (torch.device("cpu"), torch.device("cpu")),
        (1 + 2j, 1 + 2j),
        (b"bytes", b"bytes"),
        (None, None),
    ],
    ids=repr,
)
def test_everyday_values_become_plain_data_that_loads_without_pickle(value, plain):
    result = through_a_file(to_plain({"value": value}))["value"]
    assert result == plain
    assert type(result) is type(plain)


@pytest.mark.parametrize(
    "array", [np.arange(3), np.ones((2, 2), np.float32)[:, ::-1], np.array(2.5), np.array([True])], ids=repr
)
def test_arrays_become_tensors_of_their_values(array):
    result = through_a_file(to_plain([array]))[0]
    assert isinstance(result, torch.Tensor)
    assert np.array_equal(result.numpy(), array)


def test_a_tensor_stays_as_it_is_and_a_parameter_becomes_one():
    tensor = torch.ones(2)
    parameter = torch.nn.Parameter(torch.ones(2))
    plain = to_plain({"tensor": tensor, "parameter": parameter})
    assert plain["tensor"] is tensor
    assert type(plain["parameter"]) is torch.Tensor
    assert torch.equal(plain["parameter"], tensor)


@pytest.mark.parametrize("value", [object(), lambda: 0, np.array([object()])], ids=["object", "function", "objects"])
def test_what_has_no_plain_form_is_an_error_that_says_where_it_stands(value):
    with pytest.raises(TypeError, match=r"state\['hooks'\]\['Odd'\]\[1\]"):
        to_plain({"hooks": {"Odd": [1, value]}})
