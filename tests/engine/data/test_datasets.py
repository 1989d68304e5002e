"""Data sets: arrays, digits, and those with detectron2's names."""

import itertools
import pickle
import sys

import pytest
import torch
from torch.utils.data import IterableDataset

from hookline.config import ConfigError
from hookline.engine.data import (
    ArrayDataset,
    DatasetFromList,
    MapDataset,
    ToIterableDataset,
    TrainingSampler,
    build_batch_data_loader,
    datasets,
)
from hookline.engine.data.datasets import get_dataset


def test_array_dataset_gathers_a_batch_equal_to_its_samples():
    dataset = ArrayDataset(torch.randn(10, 3), torch.arange(10))
    rows, labels = dataset.__getitems__([7, 0, 7])
    assert labels.tolist() == [7, 0, 7]
    assert torch.equal(rows[0], dataset[7][0])
    assert len(dataset) == 10
    with pytest.raises(ValueError, match="length"):
        ArrayDataset(torch.zeros(3), torch.zeros(4))


def test_digits_are_normalised_and_split_the_same_way_every_time():
    train, test = get_dataset("digits_train", "DATASETS.TRAIN"), get_dataset("digits_test", "DATASETS.TEST")
    x, y = train.tensors
    assert (x.shape, x.dtype, y.dtype, len(test)) == ((1442, 1, 8, 8), torch.float32, torch.int64, 355)
    assert (x.mean().item(), x.std().item()) == pytest.approx((0, 1), abs=1e-3)
    # the split is part of every published number: it must not move
    assert y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert test.tensors[1].bincount().tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    assert test.tensors[1][:12].tolist() == [5, 0, 9, 8, 7, 1, 2, 6, 3, 4, 0, 2]


def test_synthetic_data_depends_on_its_seed_and_keeps_its_task(monkeypatch):
    def build(seed):
        args = {"size": 400, "shape": [3, 2], "num_classes": 3, "seed": seed}
        return get_dataset({"NAME": "synthetic", "ARGS": args}, "DATASETS.TRAIN[0]").tensors

    (x, y), (other_x, other_y) = build(1), build(2)
    assert x.shape == (400, 3, 2)
    assert torch.equal(x, build(1)[0])
    assert not torch.equal(x, other_x)
    for label in range(3):
        assert torch.allclose(x[y == label].mean(0), other_x[other_y == label].mean(0), atol=0.2)
    datasets._digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"pip install 'hookline\[digits\]'"):
        get_dataset("digits_train", "DATASETS.TRAIN")


SHAPES = [{"width": 2 if i % 3 else 1, "height": 1 if i % 3 else 2, "index": i} for i in range(12)]


@pytest.mark.parametrize("serialize", [True, False])
def test_elements_of_a_list_are_copies(serialize):
    elements = [{"a": [1]}, {"a": [2]}, {"a": []}]
    dataset = DatasetFromList(elements, serialize=serialize)
    assert [dataset[i] for i in (0, 1, -1)] == elements
    dataset[1]["a"].append(3)
    assert dataset[1] == {"a": [2]}
    with pytest.raises(IndexError):
        dataset[3]
    assert DatasetFromList(elements, copy=False, serialize=False)[0] is elements[0]


def double_odd(x):
    return None if x == 2 else 2 * x


class Stream(IterableDataset):
    def __iter__(self):
        yield from (1, 2, 3)


def test_a_sample_that_maps_to_none_is_replaced_or_skipped():
    dataset = MapDataset(DatasetFromList([1, 2, 3]), double_odd)
    assert (len(dataset), dataset[0], dataset[2]) == (3, 2, 6)
    assert dataset[1] in (2, 6)
    assert pickle.loads(pickle.dumps(dataset))[2] == 6
    assert list(MapDataset(Stream(), double_odd)) == [2, 6]
    with pytest.raises(RuntimeError, match="sample 0"):
        MapDataset([1, 2], lambda x: None)[0]


@pytest.mark.parametrize("iterable", [False, True])
def test_a_loader_groups_by_aspect_ratio(iterable):
    dataset = DatasetFromList(SHAPES)
    sampler = TrainingSampler(len(dataset), seed=1)
    if iterable:
        dataset, sampler = ToIterableDataset(dataset, sampler), None
    loader = build_batch_data_loader(dataset, sampler, 2, aspect_ratio_grouping=True, collate_fn=list)
    batches = list(itertools.islice(loader, 12))
    assert all(len(batch) == 2 and batch[0]["width"] == batch[1]["width"] for batch in batches)
    assert len({sample["index"] for batch in batches for sample in batch}) == 12
