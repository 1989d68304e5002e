"""Batches: collated, split, moved and prefetched."""

from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from hookline.config import ConfigError, get_cfg
from hookline.engine.data import (
    COLLATE_REGISTRY,
    DATASET_REGISTRY,
    ArrayDataset,
    EpochIterator,
    build_test_loader,
    build_train_loader,
    check_data,
    move_to_device,
    pad_collate,
    split_batch,
)
from hookline.engine.data.batches import CudaPrefetcher, batch_size_of

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


Pair = namedtuple("Pair", "x y")


class Movable:
    device = None

    def to(self, device):
        self.device = torch.device(device)
        return self


def test_every_tensor_moves_and_the_structure_stays():
    t = torch.zeros(2)
    batch = {
        "tuple": (t, "name"),
        "pair": Pair(t, [t, 3]),
        "ordered": OrderedDict(b=t, a=None),
        "default": defaultdict(list, k=t),
        "own": Movable(),
    }
    moved = move_to_device(batch, "meta")
    assert moved["tuple"][0].is_meta
    assert moved["tuple"][1] == "name"
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].y[0].is_meta
    assert moved["pair"].y[1] == 3
    assert list(moved["ordered"]) == ["b", "a"]
    assert moved["default"].default_factory is list
    assert moved["own"].device.type == "meta"
    assert not batch["default"]["k"].is_meta


def test_tensors_already_on_the_device_are_not_copied():
    t = torch.zeros(2)
    assert move_to_device([t], "cpu")[0] is t


def test_without_workers_batches_are_not_prefetched():
    drawn = []

    class Loader:
        num_workers = 0

        def __iter__(self):
            for number in range(3):
                drawn.append(number)
                yield number

    batches = EpochIterator(Loader(), device=torch.device("cuda"))
    next(batches)
    assert drawn == [0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_complete_and_in_order():
    host = [{"x": torch.full((1000, 100), float(i)).pin_memory(), "name": str(i)} for i in range(20)]
    for number, batch in enumerate(CudaPrefetcher(iter(host), torch.device("cuda"))):
        assert batch["x"].is_cuda
        assert batch["name"] == str(number)
        assert (batch["x"] == number).all()
    assert number == 19


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_error_comes_with_the_step_that_reads_the_batch():
    def batches():
        yield torch.zeros(2)
        yield torch.ones(2)
        raise ValueError("a truncated image")

    prefetched = CudaPrefetcher(batches(), torch.device("cuda"))
    assert [next(prefetched).sum().item() for _ in range(2)] == [0, 2]
    with pytest.raises(ValueError, match="truncated"):
        next(prefetched)


@DATASET_REGISTRY.register()
class Sentences(Dataset):
    deterministic = True

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"ids": torch.arange(index + 1), "labels": torch.ones(index + 1), "id": str(index)}


@DATASET_REGISTRY.register()
def rows() -> ArrayDataset:
    return ArrayDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3))


@COLLATE_REGISTRY.register()
def scaled(samples, factor=1):
    return factor * torch.stack([x for x, _ in samples])


@COLLATE_REGISTRY.register()
class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, samples):
        return scaled(samples, self.factor)


def make_cfg(dataset, name, args=None, workers=0):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = [dataset], [dataset]
    cfg.DATALOADER.BATCH_SIZE, cfg.DATALOADER.NUM_WORKERS = 3, workers
    cfg.merge_from_list(["DATALOADER.COLLATE_FN.NAME", name, "DATALOADER.COLLATE_FN.ARGS", args or {}])
    check_data(cfg)
    return cfg


@pytest.mark.parametrize("workers", [0, 1])
def test_sequences_are_padded_to_the_longest(workers):
    args = {"padding": {"labels": -100}}
    (batch,) = build_test_loader(make_cfg("Sentences", "pad_collate", args, workers), "Sentences")
    assert batch["ids"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]]
    assert batch["labels"].tolist() == [[1, -100, -100], [1, 1, -100], [1, 1, 1]]
    assert batch["id"] == ["0", "1", "2"]


def test_tuples_and_single_tensors_are_padded_too():
    pairs = [(torch.ones(1, 2), 3), (torch.ones(2, 2), 4)]
    x, y = pad_collate(pairs, padding=9)
    assert x.tolist() == [[[1, 1], [9, 9]], [[1, 1], [1, 1]]]
    assert y.tolist() == [3, 4]
    assert pad_collate([torch.ones(1), torch.ones(2)]).tolist() == [[1, 0], [1, 1]]


def test_rows_of_python_lists_are_padded():
    rows = [
        {"input_ids": [], "labels": [0.5], "mask": [True], "size": 1, "text": "a", "noise": np.ones(1)},
        {"input_ids": [3, 4], "labels": [1, 0], "mask": [True, False], "size": 2, "text": "b", "noise": np.ones(2)},
    ]
    batch = pad_collate(rows, padding={"labels": -100})
    assert batch["input_ids"].tolist() == [[0, 0], [3, 4]]
    assert (batch["input_ids"].dtype, batch["mask"].dtype) == (torch.int64, torch.bool)
    assert batch["labels"].tolist() == [[0.5, -100], [1, 0]]
    assert batch["noise"].tolist() == [[1, 0], [1, 1]]
    assert (batch["size"].tolist(), batch["text"]) == ([1, 2], ["a", "b"])
    assert [part.tolist() for part in pad_collate([(torch.ones(1), [1]), (torch.ones(2), [1, 2])])] == [
        [[1, 0], [1, 1]],
        [[1, 0], [1, 2]],
    ]


@pytest.mark.parametrize(
    ("name", "args", "factor"), [("scaled", {}, 1), ("scaled", {"factor": 3}, 3), ("Scaled", {"factor": 2}, 2)]
)
def test_a_collate_function_gets_samples_also_of_data_that_returns_batches(name, args, factor):
    cfg = make_cfg("rows", name, args)
    assert next(iter(build_test_loader(cfg, "rows"))).tolist() == [
        [0, factor],
        [2 * factor, 3 * factor],
        [4 * factor, 5 * factor],
    ]
    assert next(iter(build_train_loader(cfg))).shape == (3, 2)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("pad_colate", {}, "DATALOADER.COLLATE_FN.NAME: unknown collate 'pad_colate'; did you mean 'pad_collate'"),
        ("pad_collate", {"pading": 1}, "DATALOADER.COLLATE_FN.ARGS.pading: pad_collate takes no argument 'pading'"),
        ("Scaled", {}, "DATALOADER.COLLATE_FN.ARGS.factor: Scaled needs the argument 'factor'"),
    ],
)
def test_wrong_names_and_arguments_are_refused(name, args, message):
    with pytest.raises(ConfigError) as caught:
        make_cfg("rows", name, args)
    assert str(caught.value).startswith(message)


def test_keys_of_the_loader():
    cfg = make_cfg("Sentences", "pad_collate", workers=1)
    loader = build_train_loader(cfg)
    assert (loader.prefetch_factor, loader.persistent_workers, loader.pin_memory) == (2, True, False)
    cfg.merge_from_list(["DATALOADER.PREFETCH_FACTOR", 5, "DATALOADER.PERSISTENT_WORKERS", False])
    cfg.DATALOADER.PIN_MEMORY = True
    loader = build_train_loader(cfg)
    assert (loader.prefetch_factor, loader.persistent_workers, loader.pin_memory) == (5, False, True)
    cfg.DATALOADER.NUM_WORKERS = 0
    assert build_train_loader(cfg).prefetch_factor is None
