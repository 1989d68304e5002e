import dataclasses
import datetime
import enum
import io
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from types import MappingProxyType

import numpy as np
import pytest
import torch

from hookline.config import CfgNode
from hookline.engine.checkpoint.state import to_plain


class Colour(enum.IntEnum):
    RED = 2


class Mode(enum.StrEnum):
    MAX = "max"


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    number: int
    path: pathlib.Path


class Image(torch.Tensor):
    """A subclass of Tensor."""


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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
        (datetime.datetime(2026, 11, 21, 13, 5), "2026-11-21T13:05:00"),
        (datetime.timedelta(minutes=2), 120.0),
        (Record(1, pathlib.Path("a")), {"number": 1, "path": "a"}),
        (bytearray(b"x"), b"x"),
        (CfgNode({"A": {"B": 1}}), {"A": {"B": 1}}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (np.array(["a", "b"]), ["a", "b"]),
        ({(1, np.int64(2)): 3}, {(1, 2): 3}),
        (2**1999, 2**1999),
        (Decimal("0.10"), "0.10"),
    ],
    ids=repr,
)
def test_common_types_become_plain_data_that_loads_without_pickle(value, plain):
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


def test_a_tensor_is_kept_and_a_parameter_becomes_a_tensor():
    tensor = torch.ones(2)
    parameter = torch.nn.Parameter(torch.ones(2))
    plain = to_plain({"tensor": tensor, "parameter": parameter})
    assert plain["tensor"] is tensor
    assert type(plain["parameter"]) is torch.Tensor
    assert torch.equal(plain["parameter"], tensor)


def tagged():
    tensor = torch.ones(2)
    tensor.owner = object()
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        torch.nn.Buffer(torch.ones(2)),
        torch.ones(2).as_subclass(Image),
        tagged(),
        torch.ones(2, dtype=torch.cfloat).conj(),
        torch.nn.Parameter(torch.eye(2).to_sparse()),
    ],
    ids=["leaf", "computed", "buffer", "subclass", "with an attribute", "conjugate", "sparse"],
)
def test_tensors_of_every_kind_become_plain_ones(tensor):
    plain = to_plain(tensor)
    assert type(plain) is torch.Tensor
    assert not plain.requires_grad
    loaded = through_a_file(plain)
    assert loaded.to_dense().tolist() == tensor.to_dense().tolist()


def test_a_generator_becomes_its_state():
    generator = torch.Generator().manual_seed(3)
    state = through_a_file(to_plain(generator))
    expected = torch.rand(2, generator=generator)
    assert torch.equal(torch.rand(2, generator=torch.Generator().set_state(state)), expected)


@pytest.mark.parametrize("name", ["PCG64", "MT19937", "Philox", "SFC64"])
def test_numpys_generators_become_their_state(name):
    generator, again = (np.random.Generator(getattr(np.random, name)(seed)) for seed in (3, 4))
    generator.integers(10, size=3)  # one half of a 64-bit number is left over
    plain = through_a_file(to_plain([generator, generator.bit_generator]))
    expected = generator.integers(1 << 40, size=4).tolist()
    for state in plain:
        again.bit_generator.state = state
        assert again.integers(1 << 40, size=4).tolist() == expected


def test_the_older_generators_become_their_state():
    numpys, pythons = np.random.RandomState(3), random.Random(3)
    draws = numpys.randn(), pythons.gauss(0, 1)  # each makes two, and keeps one
    plain = through_a_file(to_plain([numpys, pythons]))
    expected = numpys.randn(), pythons.gauss(0, 1)
    numpys.set_state(plain[0])
    pythons.setstate(plain[1])
    assert (numpys.randn(), pythons.gauss(0, 1)) == expected != draws


def test_a_longdouble_is_refused_by_its_name():
    with pytest.raises(TypeError, match=r"state\['x'\] is a longdouble, which cannot be saved"):
        to_plain({"x": np.longdouble(1)})


def test_containers_are_copied():
    state = {"list": [1, 2], "nested": {"list": [[1]]}}
    plain = to_plain(state)
    state["list"].append(3)
    state["nested"]["list"][0].append(2)
    assert plain == {"list": [1, 2], "nested": {"list": [[1]]}}


def test_an_iterator_is_refused_and_not_used_up():
    numbers = iter([1, 2])
    with pytest.raises(TypeError, match="list_iterator"):
        to_plain({"numbers": numbers})
    assert list(numbers) == [1, 2]


def test_a_value_that_contains_itself_is_refused():
    state = {"a": []}
    state["a"].append(state)
    with pytest.raises(TypeError, match="state cannot be saved: it contains itself"):
        to_plain(state)


REFUSED = {
    "object": object(),
    "function": lambda: 0,
    "class": int,
    "objects": np.array([object()]),
    "module": torch.nn.Sequential(torch.nn.Linear(1, 1)),
    "loader": torch.utils.data.DataLoader([1]),
    "long": 2**3000,
    "long among others": [1, 2**3000],
    "extended number": np.longdouble(1),
    "extended complex number": np.clongdouble(1),
    "extended": np.longdouble(1) * np.ones(2, np.longdouble),
    "meta": torch.ones(2, device="meta"),
    "lazy": torch.nn.LazyLinear(2).weight,
    "key": {Record(1, pathlib.Path("a")).__class__: 1},
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_a_value_that_cannot_be_converted_is_an_error_with_its_place(value):
    with pytest.raises(TypeError, match=r"state\['hooks'\]\['Odd'\]\[1\].* cannot be saved"):
        to_plain({"hooks": {"Odd": [1, value]}})


# ---------------------------------------------------------------------------- views


def file_size(data):
    file = io.BytesIO()
    torch.save(to_plain(data), file)
    return len(file.getvalue())


def test_a_small_view_is_saved_without_the_rest_of_its_memory():
    whole = torch.randn(1000, 1000)
    data = {"row": whole[3], "corner": whole[:2, :2]}
    assert all(torch.equal(value, data[key]) for key, value in to_plain(data).items())
    assert file_size(data) < 10_000


def test_tied_weights_are_saved_once():
    weight = torch.randn(100, 100)
    data = {"embedding": weight, "head": weight.detach(), "transposed": weight.T}
    assert file_size(data) < 1.2 * file_size({"embedding": weight})


def test_parameters_in_one_flat_tensor_are_saved_once_each():
    whole = torch.randn(10_000)
    assert file_size([whole[:4000], whole[4000:]]) < 1.2 * file_size(whole)


def test_an_expanded_tensor_stays_small():
    assert file_size({"ones": torch.ones(1).expand(1_000_000)}) < 5_000
