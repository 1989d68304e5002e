import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from hookline.config import ConfigError, get_cfg
from hookline.engine.data import (
    COLLATE_REGISTRY,
    DATASET_REGISTRY,
    ArrayDataset,
    build_test_loader,
    build_train_loader,
    check_data,
    pad_collate,
)


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
