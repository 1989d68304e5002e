"""An error of a data set names the sample, wherever it is read."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hookline.config import get_cfg
from hookline.engine.data import DATASET_REGISTRY, EpochIterator, ShardedIterable, build_test_loader, build_train_loader
from hookline.engine.data.iterate import whole_pass


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


@DATASET_REGISTRY.register()
class ShapesDiffer(OneIsBroken):
    def __getitem__(self, index):
        return torch.zeros(index)


@DATASET_REGISTRY.register()
class BrokenStream(IterableDataset):
    deterministic = True

    def __iter__(self):
        yield from range(6)
        raise OSError("bad line")


def fails_at_three(sample):
    if sample == 3:
        raise ValueError("three")
    return sample


@DATASET_REGISTRY.register()
def broken_transform():
    return ShardedIterable(range(8), fails_at_three)


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("entry", "note"),
    [
        ("OneIsBroken", "while reading sample 5 of OneIsBroken"),
        ({"NAME": "OneIsBroken", "ARGS": {"deterministic": True}}, "while reading sample 5 of OneIsBroken"),
        ("ShapesDiffer", "while making a batch of sample "),
        ("BrokenStream", "while reading sample 6 of BrokenStream"),
        ("broken_transform", "while reading sample 3 of the stream, in the transform"),
    ],
)
def test_the_error_names_the_sample(entry, note, workers, test):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "DATALOADER.BATCH_SIZE", 4, "DATALOADER.NUM_WORKERS", workers])
    cfg.merge_from_list(["DATASETS.TRAIN", [entry], "DATASETS.TEST", [entry]])
    name = entry if isinstance(entry, str) else entry["NAME"]
    batches = whole_pass(build_test_loader(cfg, name)) if test else EpochIterator(build_train_loader(cfg))
    with pytest.raises((KeyError, RuntimeError, OSError, ValueError)) as caught:
        list(islice(batches, 2))
    assert note in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_a_concatenated_set_is_named_with_the_samples_own_index():
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.DATASETS.TRAIN = [{"NAME": "OneIsBroken", "ARGS": {"at": -1}}, "OneIsBroken"]
    with pytest.raises(KeyError) as caught:
        next(EpochIterator(build_train_loader(cfg)))
    assert caught.value.__notes__ == ["while reading sample 5 of OneIsBroken (set 1 of the concatenated ones)"]


def test_part_of_a_data_set_names_the_one_sample_too():
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "DATASETS.TEST", ["OneIsBroken"], "DATALOADER.LIMIT_TEST_BATCHES", 1])
    with pytest.raises(KeyError) as caught:
        list(whole_pass(build_test_loader(cfg, "OneIsBroken")))
    assert caught.value.__notes__ == ["while reading sample 5 of OneIsBroken"]


def test_a_subset_of_ones_own_is_read_as_torch_reads_it():
    class Doubled(Subset):
        def __getitems__(self, indices):
            return [2 * self.dataset[self.indices[index]] for index in indices]

    loader = DataLoader(Doubled([1, 2, 3, 4], [3, 2]), batch_size=2)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in whole_pass(loader)] == [[8, 6]]
