import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from hookline.config import ConfigError, get_cfg
from hookline.engine.data import (
    DATASET_REGISTRY,
    ArrayDataset,
    TrainingSampler,
    build_batch_data_loader,
    build_test_loader,
    build_train_loader,
)


@DATASET_REGISTRY.register()
def counted(size: int = 10):
    return ArrayDataset(torch.arange(size), torch.arange(size) * 2)


@DATASET_REGISTRY.register()
class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


@DATASET_REGISTRY.register()
class RandomNumbers(Dataset):
    """Each sample shows the three generators a worker has."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return random.random(), np.random.rand(), torch.rand(()).item()


def make_cfg(train=("counted",), **loader):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.SEED = 5
    cfg.DATASETS.TRAIN = list(train)
    cfg.DATALOADER.BATCH_SIZE = 4
    cfg.DATALOADER.update(loader)
    return cfg


def test_the_train_loader_yields_every_sample_once_per_epoch():
    batches = list(build_train_loader(make_cfg()))
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert sorted(torch.cat([x for x, _ in batches]).tolist()) == list(range(10))
    assert all(torch.equal(y, 2 * x) for x, y in batches)
    two = build_train_loader(make_cfg(["counted", {"NAME": "counted", "ARGS": {"size": 3}}], DROP_LAST=True))
    assert (len(two), len(two.dataset)) == (3, 13)


def test_keys_of_the_loader():
    def keys(**options):
        loader = build_train_loader(make_cfg(**options))
        return loader.prefetch_factor, loader.persistent_workers, loader.pin_memory

    assert keys(NUM_WORKERS=1) == (2, False, False)
    assert keys(NUM_WORKERS=1, PREFETCH_FACTOR=5, PERSISTENT_WORKERS=True, PIN_MEMORY=True) == (5, True, True)
    assert keys(PREFETCH_FACTOR=5)[0] is None


def test_what_no_loader_can_be_built_of_is_refused():
    for cfg, message in (
        (make_cfg(ITERS_PER_EPOCH=2), "ITERS_PER_EPOCH"),
        (make_cfg(SAMPLER_ARGS={"shufle": True}), r"SAMPLER_ARGS\.shufle"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_train_loader(cfg)
    build_train_loader(make_cfg(ITERS_PER_EPOCH=2, SAMPLER_TRAIN="TrainingSampler"))


@pytest.mark.parametrize(
    "name", ["torch.utils.data:RandomSampler", "torch.utils.data:DistributedSampler", "RandomSubsetTrainingSampler"]
)
def test_samplers_are_chosen_by_name_and_follow_the_seed(name):
    def order():
        cfg = make_cfg(SAMPLER_TRAIN=name)
        if name == "RandomSubsetTrainingSampler":
            cfg.DATALOADER.SAMPLER_ARGS["subset_ratio"] = 0.5
        return torch.cat([x for x, _ in islice(build_train_loader(cfg), 3)]).tolist()

    assert order() == order()
    assert sorted(order()) == list(range(10)) or (len(order()) == 12 and len(set(order())) == 5)


def test_the_test_loader_yields_every_sample_once_in_order_with_any_workers():
    cfg = make_cfg(TEST_BATCH_SIZE=3)
    cfg.DATASETS.TEST = [{"NAME": "counted", "ARGS": {"size": 5}}]
    assert [x.tolist() for x, _ in build_test_loader(cfg, "counted")] == [[0, 1, 2], [3, 4]]
    assert [x.tolist() for x in build_test_loader(cfg, "Stream")] == [[0, 1, 2], [3, 4]]  # not in DATASETS.TEST
    drawn = [str(list(build_test_loader(make_cfg(NUM_WORKERS=number), "RandomNumbers"))) for number in (0, 2)]
    assert drawn[0] == drawn[1]


def test_a_subset_of_an_array_dataset_is_read_in_batches():
    part, sampler = Subset(counted(), [3, 4, 5]), TrainingSampler(3, shuffle=False, seed=0)
    loader = build_batch_data_loader(part, sampler, total_batch_size=2, num_workers=1)
    assert [x.tolist() for x, _ in islice(loader, 3)] == [[3, 4], [5, 3], [4, 5]]
    (batch, *_) = build_batch_data_loader(TensorDataset(torch.arange(3)), range(3), 2)
    assert [type(sample) for sample in batch] == [tuple, tuple]  # lists of samples, as in detectron2


@pytest.mark.parametrize("sampler", ["EpochSampler", "TrainingSampler"])
def test_limited_epochs_and_test_sets_end_early(sampler):
    cfg = make_cfg(LIMIT_TRAIN_BATCHES=2, LIMIT_TEST_BATCHES=2, SAMPLER_TRAIN=sampler)
    loader = build_train_loader(cfg)
    assert len(loader) == 2
    assert [len(x) for x, _ in loader] == [4, 4]
    assert [x.tolist() for x, _ in build_test_loader(cfg, "counted")] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(build_test_loader(cfg, "RandomNumbers")) == 2


def test_overfitting_uses_the_same_samples_in_every_epoch():
    loader = build_train_loader(make_cfg(["RandomNumbers"], OVERFIT_BATCHES=1))
    assert (len(loader), len(loader.dataset)) == (1, 4)
    for epoch in range(3):
        loader.batch_sampler.set_epoch(epoch)
        assert sorted(index for batch in loader.batch_sampler for index in batch) == [0, 1, 2, 3]
