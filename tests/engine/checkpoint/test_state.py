"""State of any kind becomes data that loads without pickle, or is refused by its place."""

import collections
import enum
import io

import numpy as np
import pytest
import torch

from hookline.config import CfgNode
from hookline.engine.checkpoint.state import to_plain


class Colour(enum.IntEnum):
    RED = 2


class Image(torch.Tensor):
    """A subclass of Tensor."""


Point = collections.namedtuple("Point", "x y")


def saved(value):
    file = io.BytesIO()
    torch.save(to_plain(value), file)
    return file


def through_a_file(value):
    file = saved(value)
    file.seek(0)
    return torch.load(file, weights_only=True)


PLAIN = [
    (np.float32(0.5), 0.5),
    (np.str_("loss"), "loss"),
    (np.array(["a", "b"]), ["a", "b"]),
    (Colour.RED, 2),
    (collections.deque([1, 2]), [1, 2]),
    ({"a": {"b": (1, np.int64(2))}}, {"a": {"b": (1, 2)}}),
    ({(1, np.int64(2)): None}, {(1, 2): None}),
    (Point(1, 2), (1, 2)),
    (frozenset({1}), {1}),
    (CfgNode({"A": {"B": 1}}), {"A": {"B": 1}}),
    *((value, value) for value in (torch.float16, torch.device("cpu"), 1 + 2j, b"bytes", None)),
]


@pytest.mark.parametrize(("value", "plain"), PLAIN, ids=repr)
def test_common_types_load_without_pickle(value, plain):
    result = through_a_file({"value": value})["value"]
    assert result == plain
    assert type(result) is type(plain)


@pytest.mark.parametrize("array", [np.ones((2, 2), np.float32)[:, ::-1], np.array(2.5), np.array([True])], ids=repr)
def test_arrays_become_tensors_of_their_values(array):
    assert np.array_equal(through_a_file([array])[0].numpy(), array)


TENSORS = {
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "subclass": torch.ones(2).as_subclass(Image),
    "conjugate": torch.ones(2, dtype=torch.cfloat).conj(),
    "sparse": torch.nn.Parameter(torch.eye(2).to_sparse()),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_tensors_of_every_kind_become_plain_ones(tensor):
    plain = to_plain(tensor)
    assert type(plain) is torch.Tensor
    assert not plain.requires_grad
    assert through_a_file(tensor).to_dense().tolist() == tensor.to_dense().tolist()


REFUSED = {
    "object": object(),
    "objects": np.array([object()]),
    "module": torch.nn.Linear(1, 1),
    "extended numbers": np.ones(2, np.longdouble),
    "meta": torch.ones(2, device="meta"),
    "key": {int: 1},
    "generator": torch.Generator(),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_a_value_that_cannot_be_converted_is_an_error_with_its_place(value):
    with pytest.raises(TypeError, match=r"checkpoint\['hooks'\]\['Odd'\]\[1\]"):
        to_plain({"hooks": {"Odd": [1, value]}})


def test_views_and_tied_tensors_take_only_their_own_space():
    """A view is saved without the rest of its memory, a shared tensor once, an expanded one small."""
    whole, weight = torch.randn(1000, 1000), torch.randn(100, 100)
    for data, limit in (
        ({"row": whole[3], "corner": whole[:2, :2]}, 10_000),
        ({"embedding": weight, "head": weight.detach(), "transposed": weight.T}, 50_000),
        ([whole.view(-1)[:4000], whole.view(-1)[4000:10_000]], 50_000),
        ({"ones": torch.ones(1).expand(1_000_000)}, 5_000),
    ):
        assert len(saved(data).getvalue()) < limit
    assert torch.equal(to_plain([whole[:2, :2]])[0], whole[:2, :2])
