import itertools
import pickle

import pytest
from torch.utils.data import DataLoader, IterableDataset

from hookline.engine.data import (
    AspectRatioGroupedDataset,
    DatasetFromList,
    InferenceSampler,
    MapDataset,
    ToIterableDataset,
    TrainingSampler,
    build_batch_data_loader,
)

SHAPES = [{"width": 2 if i % 3 else 1, "height": 1 if i % 3 else 2, "index": i} for i in range(12)]


@pytest.mark.parametrize("serialize", [True, False])
def test_elements_of_a_list_are_copies(serialize):
    elements = [{"a": [1]}, {"a": [2]}, {"a": []}]
    dataset = DatasetFromList(elements, serialize=serialize)
    assert [dataset[i] for i in range(len(dataset))] == elements
    assert dataset[-1] == elements[-1]
    dataset[1]["a"].append(3)
    assert dataset[1] == {"a": [2]}
    with pytest.raises(IndexError):
        dataset[3]


def test_elements_of_a_list_are_not_copied_on_request():
    elements = [{"a": [1]}]
    assert DatasetFromList(elements, copy=False, serialize=False)[0] is elements[0]


def double_odd(x):
    return None if x == 2 else 2 * x


def test_a_sample_that_maps_to_none_is_replaced_by_another():
    dataset = MapDataset(DatasetFromList([1, 2, 3]), double_odd)
    assert (len(dataset), dataset[0], dataset[2]) == (3, 2, 6)
    assert dataset[1] in (2, 6)
    assert pickle.loads(pickle.dumps(dataset))[2] == 6


def test_a_map_that_always_returns_none_is_an_error():
    with pytest.raises(RuntimeError, match="sample 0"):
        MapDataset([1, 2], lambda x: None)[0]


class Stream(IterableDataset):
    def __iter__(self):
        yield from (1, 2, 3)


def test_a_mapped_iterable_data_set_skips_samples_that_map_to_none():
    dataset = MapDataset(Stream(), double_odd)
    assert isinstance(dataset, IterableDataset)
    assert list(dataset) == [2, 6]


@pytest.mark.parametrize("chunk", [1, 3])
def test_workers_share_the_indices_of_an_iterable_data_set(chunk):
    dataset = ToIterableDataset(DatasetFromList(list(range(20))), InferenceSampler(20), shard_chunk_size=chunk)
    assert list(dataset) == list(range(20))
    batches = DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(int(sample) for sample in batches) == list(range(20))


def test_an_iterable_data_set_is_not_converted():
    with pytest.raises(TypeError, match="iterable already"):
        ToIterableDataset(Stream(), InferenceSampler(3))


def test_each_batch_has_one_kind_of_aspect_ratio():
    batches = list(AspectRatioGroupedDataset(SHAPES, 2))
    assert [[sample["index"] for sample in batch] for batch in batches] == [
        [1, 2],
        [0, 3],
        [4, 5],
        [7, 8],
        [6, 9],
        [10, 11],
    ]


def test_a_reader_that_stops_leaves_no_full_batch_behind():
    dataset = AspectRatioGroupedDataset(SHAPES, 2)
    for _ in range(3):
        next(iter(dataset))
        assert all(len(bucket) < 2 for bucket in dataset._buckets)


@pytest.mark.parametrize("iterable", [False, True])
def test_a_loader_groups_by_aspect_ratio(iterable):
    dataset = DatasetFromList(SHAPES)
    sampler = TrainingSampler(len(dataset), seed=1)
    if iterable:
        dataset, sampler = ToIterableDataset(dataset, sampler), None
    loader = build_batch_data_loader(dataset, sampler, 2, aspect_ratio_grouping=True)
    batches = list(itertools.islice(loader, 12))
    assert all(len(batch) == 2 and batch[0]["width"] == batch[1]["width"] for batch in batches)
    assert len({sample["index"] for batch in batches for sample in batch}) == 12

    widths = build_batch_data_loader(
        dataset, sampler, 2, aspect_ratio_grouping=True, collate_fn=lambda batch: [sample["width"] for sample in batch]
    )
    assert next(iter(widths)) in ([1, 1], [2, 2])
