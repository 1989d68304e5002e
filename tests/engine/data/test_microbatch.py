from collections import namedtuple

import pytest
import torch

from hookline.engine.data import split_batch
from hookline.engine.data.microbatch import batch_size_of

Batch = namedtuple("Batch", "x y")


def x(size):
    return torch.arange(float(size)).reshape(size, 1)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (x(4), 4),
        ((x(4), torch.zeros(4)), 4),
        ([x(4), torch.zeros(4)], 4),
        ({"a": {"b": x(4)}, "name": "n"}, 4),
        (Batch(x(4), torch.zeros(4)), 4),
        ({"scale": torch.tensor(2.0), "x": x(4)}, 4),
        ([{"image": torch.zeros(3, 5)}, {"image": torch.zeros(3, 6)}], 2),
        (["a", "b", "c"], 3),
        ([{"x": x(4)}, torch.zeros(4)], 4),
    ],
)
def test_the_size_of_a_batch_is_its_number_of_samples(batch, size):
    assert batch_size_of(batch) == size


@pytest.mark.parametrize("batch", [torch.tensor(1.0), {"a": "b"}, 3, ()], ids=repr)
def test_a_batch_without_samples_to_count_is_an_error(batch):
    with pytest.raises(TypeError, match=f"type {type(batch).__name__}"):
        list(split_batch(batch, 2))


@pytest.mark.parametrize(("size", "parts"), [(8, 2), (7, 3), (5, 5), (3, 1), (2, 4)])
def test_parts_and_shares_add_up_to_the_batch(size, parts):
    batch = (x(size), torch.arange(size))
    pieces = list(split_batch(batch, parts))
    assert len(pieces) == min(parts, size)
    for index in range(2):
        assert torch.equal(torch.cat([piece[index] for piece, _ in pieces]), batch[index])
    assert sum(share for _, share in pieces) == pytest.approx(1)
    for piece, share in pieces:
        assert share == len(piece[0]) / size
    lengths = [len(piece[0]) for piece, _ in pieces]
    assert max(lengths) - min(lengths) <= 1


def test_the_shape_of_the_batch_is_kept():
    batch = {"pair": Batch(x(4), [torch.zeros(4, 2), torch.ones(4)]), "names": list("abcd"), "scale": torch.tensor(2.0)}
    first, second = (piece for piece, _ in split_batch(batch, 2))
    assert type(first["pair"]) is Batch
    assert first["pair"].x.tolist() == [[0], [1]]
    assert second["pair"].y[0].shape == (2, 2)
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
    assert first["scale"] == second["scale"] == 2


def test_entries_without_a_batch_dimension_go_to_every_part():
    batch = {"x": x(4), "table": torch.zeros(10, 2), "flag": True, "text": "abcd"}
    for piece, _ in split_batch(batch, 2):
        assert piece["table"].shape == (10, 2)
        assert piece["flag"] is True
        assert piece["text"] == "abcd"


def test_a_list_of_samples_is_split_between_samples():
    samples = [{"image": torch.zeros(3, i)} for i in range(1, 6)]
    pieces = list(split_batch(samples, 2))
    assert [len(piece) for piece, _ in pieces] == [2, 3]
    assert pieces[1][0][0] is samples[2]
    assert [share for _, share in pieces] == [0.4, 0.6]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_list_of_collated_fields_is_split_in_each_field(size):
    batch = [{"x": x(size)}, torch.arange(size)]  # the batch of torch's collate for samples (dict, label)
    pieces = [piece for piece, _ in split_batch(batch, 2)]
    assert torch.cat([piece[0]["x"] for piece in pieces]).tolist() == x(size).tolist()
    assert torch.cat([piece[1] for piece in pieces]).tolist() == list(range(size))


def test_an_exact_number_of_parts_repeats_the_last_one_with_a_share_of_zero():
    parts = list(split_batch(x(2), 4, exact=True))
    assert [(part.flatten().tolist(), share) for part, share in parts] == [([0], 0.5), ([1], 0.5), ([1], 0), ([1], 0)]
    assert len(list(split_batch(x(8), 4, exact=True))) == 4
