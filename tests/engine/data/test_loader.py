"""Loaders: errors that name the sample, and batches."""

from collections import defaultdict, namedtuple
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hookline.config.errors import MismatchError
from hookline.engine.data import (
    COLLATE_REGISTRY,
    DATASET_REGISTRY,
    ArrayDataset,
    EpochIterator,
    EpochSampler,
    GlobalBatchSampler,
    SeededLoader,
    ShardedIterable,
    build_test_loader,
    build_train_loader,
    move_to_device,
    pad_collate,
)
from hookline.engine.data.batches import batch_size_of, split_batch
from hookline.engine.data.loader import whole_pass
from hookline.engine.data.stream import StreamLoader

from .test_build import make_cfg


@DATASET_REGISTRY.register()
class OneIsBroken(Dataset):
    def __init__(self, deterministic: bool = False, at: int = 5) -> None:
        self.deterministic, self.at = deterministic, at

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.at:
            raise KeyError("photo.png")
        return torch.zeros(3)


def fails_at_three(sample):
    if sample == 3:
        raise ValueError("three")
    return sample


@DATASET_REGISTRY.register()
def broken_transform():
    return ShardedIterable(range(8), fails_at_three)


@pytest.mark.parametrize(
    ("entry", "note", "workers", "test"),
    [
        ("OneIsBroken", "sample 5 of OneIsBroken", 1, True),
        ({"NAME": "OneIsBroken", "ARGS": {"deterministic": True}}, "sample 5 of OneIsBroken", 0, False),
        ("broken_transform", "sample 3 of the stream, in the transform", 0, True),
    ],
)
def test_the_error_names_the_sample(entry, note, workers, test):
    cfg = make_cfg([entry], NUM_WORKERS=workers)
    cfg.DATASETS.TEST = [entry]
    name = entry if isinstance(entry, str) else entry["NAME"]
    batches = whole_pass(build_test_loader(cfg, name)) if test else EpochIterator(build_train_loader(cfg))
    with pytest.raises((KeyError, RuntimeError, OSError, ValueError)) as caught:
        list(islice(batches, 2))
    assert note in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


class OneByOne(OneIsBroken):
    __getitems__ = None  # torch reads single samples then


def test_a_data_set_without_whole_batches_is_read_by_sample():
    assert [len(batch) for batch in SeededLoader(OneByOne(at=9), seed=0, batch_size=5)] == [5, 3]


Batch = namedtuple("Batch", "x y")


def x(size):
    return torch.arange(float(size)).reshape(size, 1)


@dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor


IMAGES = [torch.zeros(3, 5, 6), torch.zeros(3, 6, 5)]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ({"a": {"b": x(4)}, "name": "n", "scale": torch.tensor(2.0)}, 4),
        (Batch(x(4), torch.zeros(4)), 4),
        (Fields(x(4), torch.zeros(4)), 4),
        ([{"image": torch.zeros(3, 5)}, {"image": torch.zeros(3, 6)}], 2),
        (["a", "b", "c"], 3),
        ([{"x": x(4)}, torch.zeros(4)], 4),
        ([x(4), torch.arange(4)], 4),  # fields, as torch collates tuples
        ({"image": IMAGES, "num_samples": 2}, 2),
        ({"image": x(5), "num_samples": np.int64(2)}, 2),
        ({"image": x(5), "num_samples": torch.tensor(2)}, 2),
        (SimpleNamespace(nodes=x(7), num_samples=3), 3),
    ],
)
def test_the_size_of_a_batch_is_stated_or_the_one_in_which_all_its_parts_agree(batch, size):
    assert batch_size_of(batch) == size


@pytest.mark.parametrize(
    "batch",
    [
        torch.tensor(1.0),
        {"a": "b"},
        (),
        IMAGES,
        (x(5), x(4)),
        {"x": x(4), "scales": [1, 2, 3]},
        SimpleNamespace(x=x(4)),
        *({"image": x(5), "num_samples": stated} for stated in (2.0, x(5), "2")),
    ],
)
def test_a_batch_whose_size_nobody_knows_is_an_error(batch):
    with pytest.raises(MismatchError, match="num_samples"):
        batch_size_of(batch)


def test_the_structure_is_kept_and_constants_go_to_every_part():
    batch = {
        "pair": Batch(x(4), [torch.zeros(4, 2), torch.zeros(4)]),
        "names": list("abcd"),
        "scales": (1.0, 2.0),
        "text": "ab",
    }
    first, second = (piece for piece, _ in split_batch(batch, 2))
    assert first["pair"].x.tolist() == [[0], [1]]
    assert second["pair"].y[0].shape == (2, 2)
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
    assert first["scales"] == second["scales"] == (1.0, 2.0)
    assert first["text"] == second["text"] == "ab"
    assert [part.y.tolist() for part, _ in split_batch(Fields(x(3), torch.arange(3)), 2)] == [[0], [1, 2]]
    samples = [{"image": torch.zeros(3, i)} for i in range(1, 6)]  # a list of samples
    assert [(len(piece), number) for piece, number in split_batch(samples, 2)] == [(2, 2), (3, 3)]
    parts = split_batch({"x": x(5), "num_samples": torch.tensor(5)}, 2)
    assert [(batch_size_of(part), number) for part, number in parts] == [(2, 2), (3, 3)]


@pytest.mark.parametrize(
    "batch", [{"x": x(4), "table": x(3), "num_samples": 4}, (x(4), object()), [torch.zeros(2, 2), torch.zeros(2, 2)]]
)
def test_a_batch_with_a_part_that_is_not_one_entry_per_sample_is_not_cut(batch):
    with pytest.raises(MismatchError, match="cannot be cut"):
        list(split_batch(batch, 2))


class Graph:
    """A batch that only its collate function understands."""

    def __init__(self, samples):
        self.numbers = [int(sample) for sample in samples if sample is not None]


def numbers(batch):
    return batch.numbers if isinstance(batch, Graph) else batch[0].tolist()


LOADERS = {
    "plain": lambda n: DataLoader(list(range(10)), 6, collate_fn=Graph, num_workers=n),
    "shuffled": lambda n: DataLoader(list(range(10)), 6, shuffle=True, collate_fn=Graph, num_workers=n),
    "stream": lambda n: StreamLoader(range(10), 6, seed=0, collate_fn=Graph, num_workers=n),
    "torchdata": lambda n: StatefulDataLoader(list(range(10)), 6, collate_fn=Graph, num_workers=n),
    "persistent": lambda n: DataLoader(list(range(10)), 6, collate_fn=Graph, num_workers=n, persistent_workers=bool(n)),
    "fields": lambda n: SeededLoader(
        ArrayDataset(torch.arange(10)), seed=0, batch_size=6, collate_fn=ArrayDataset.collate_fn, num_workers=n
    ),
}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOADERS)
def test_samples_are_collated_in_micro_batches_of_known_size(name, workers):
    loader = LOADERS[name](workers)
    batches = EpochIterator(loader)
    read = [batches.micro_batches(4, lambda: next(batches)) for _ in range(2)]
    assert [[size for _, size in parts] for parts in read] == [[1, 2, 1, 2], [1, 1, 1, 1]]
    assert [[len(numbers(part)) for part, _ in parts] for parts in read] == [[1, 2, 1, 2], [1, 1, 1, 1]]
    assert sorted(one for parts in read for part, _ in parts for one in numbers(part)) == list(range(10))
    assert [len(numbers(batch)) for batch in loader] == [6, 4]  # whole, for others
    assert [size for _, size in whole_pass(loader)] == [6, 4]


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_none_do_not_count(workers):
    loader = DataLoader([None if i % 5 == 4 else i for i in range(10)], 5, collate_fn=Graph, num_workers=workers)
    assert [size for _, size in whole_pass(loader)] == [4, 4]
    batches = EpochIterator(loader)
    assert [size for _, size in batches.micro_batches(5, lambda: next(batches))] == [1, 1, 1, 1]


def test_another_number_of_micro_batches_starts_with_the_next_batch():
    sampler = GlobalBatchSampler(EpochSampler(20), 4)
    batches = EpochIterator(SeededLoader(list(range(20)), seed=0, batch_sampler=sampler, collate_fn=Graph))
    found = []
    for parts in (1, 2, 4, 1, 2):
        read = batches.micro_batches(parts, lambda: next(batches))
        assert [size for _, size in read] == [4 // parts] * parts
        found += [one for part, _ in read for one in numbers(part)]
    sampler.set_epoch(0)
    assert found == [index for batch in sampler for index in batch]


def test_batches_of_another_source_are_cut():
    batches, own = EpochIterator([x(4)]), iter([x(6)])
    assert [len(part) for part, _ in batches.micro_batches(2, lambda: next(own))] == [3, 3]
    assert next(batches).tolist() == x(4).tolist()


class Movable:
    device = None

    def to(self, device):
        self.device = torch.device(device)
        return self


def test_every_tensor_moves_and_the_structure_stays():
    t = torch.zeros(2)
    batch = {
        "tuple": (t, "name"),
        "pair": Batch(t, [t, 3]),
        "default": defaultdict(list, k=t),
        "own": Movable(),
    }
    moved = move_to_device(batch, "meta")
    assert moved["tuple"][0].is_meta
    assert moved["tuple"][1] == "name"
    assert isinstance(moved["pair"], Batch)
    assert moved["pair"].y[0].is_meta
    assert moved["default"].default_factory is list
    assert moved["own"].device.type == "meta"
    assert not batch["default"]["k"].is_meta


@DATASET_REGISTRY.register()
def rows() -> ArrayDataset:
    return ArrayDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3))


@COLLATE_REGISTRY.register()
def scaled(samples, factor=1):
    return factor * torch.stack([x for x, _ in samples])


def test_rows_pairs_and_single_tensors_are_padded():
    rows = [
        {"input_ids": [], "labels": [0.5], "mask": [True], "size": 1, "noise": np.ones(1)},
        {"input_ids": [3, 4], "labels": [1, 0], "mask": [True, False], "size": 2, "noise": np.ones(2)},
    ]
    batch = pad_collate(rows, padding={"labels": -100})
    assert batch["input_ids"].tolist() == [[0, 0], [3, 4]]
    assert (batch["input_ids"].dtype, batch["mask"].dtype) == (torch.int64, torch.bool)
    assert batch["labels"].tolist() == [[0.5, -100], [1, 0]]
    assert batch["noise"].tolist() == [[1, 0], [1, 1]]
    assert batch["size"].tolist() == [1, 2]
    x, y = pad_collate([(torch.ones(1, 2), 3), (torch.ones(2, 2), 4)], padding=9)
    assert x.tolist() == [[[1, 1], [9, 9]], [[1, 1], [1, 1]]]
    assert y.tolist() == [3, 4]
    assert pad_collate([torch.ones(1), torch.ones(2)]).tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize("name", ["torch:stack", f"{__name__}:first_of"])
def test_a_collate_function_may_have_any_signature(name):
    cfg = make_cfg([f"{__name__}:vectors"])
    cfg.DATALOADER.COLLATE_FN.NAME = name
    assert next(iter(build_train_loader(cfg))).shape[-1] == 2


def vectors():
    return [torch.ones(2)] * 6


def first_of(*samples):
    return samples[0][0]


def test_a_collate_function_gets_samples_also_of_data_that_returns_batches():
    cfg = make_cfg(["rows"], COLLATE_FN={"NAME": "scaled", "ARGS": {"factor": 2}})
    assert next(iter(build_test_loader(cfg, "rows"))).tolist() == [[0, 2], [4, 6], [8, 10]]
    assert next(iter(build_train_loader(cfg))).max() == 10
    only_training = {"NAME": "scaled", "ARGS": {"factor": 3}}
    cfg.merge_from_list(["DATALOADER.TRAIN_COLLATE_FN", only_training])
    assert next(iter(build_test_loader(cfg, "rows"))).max() == 10
    assert next(iter(build_train_loader(cfg))).max() == 15
