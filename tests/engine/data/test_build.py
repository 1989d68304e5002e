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
    check_data,
)


@DATASET_REGISTRY.register()
def counted(size: int = 10):
    return ArrayDataset(torch.arange(size), torch.arange(size) * 2)


@DATASET_REGISTRY.register()
class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class RandomNumbers(Dataset):
    """Each sample shows the three generators a worker has."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return random.random(), np.random.rand(), torch.rand(()).item()


DATASET_REGISTRY.register(RandomNumbers)


def make_cfg(train=("counted",), **loader):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.SEED = 5
    cfg.DATASETS.TRAIN = list(train)
    cfg.DATALOADER.BATCH_SIZE = 4
    for key, value in loader.items():
        cfg.DATALOADER[key] = value
    return cfg


def test_the_train_loader_yields_every_sample_once_per_epoch():
    loader = build_train_loader(make_cfg())
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert sorted(torch.cat([x for x, _ in batches]).tolist()) == list(range(10))
    assert all(torch.equal(y, 2 * x) for x, y in batches)


def test_the_order_follows_the_seed_and_the_position_can_be_set():
    def order(start=0):
        loader = build_train_loader(make_cfg())
        loader.batch_sampler.set_epoch(3, start)
        return torch.cat([x for x, _ in loader]).tolist()

    assert order(start=4) == order()[4:]


def test_loaders_draw_nothing_from_the_global_generators():
    before = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
    list(build_train_loader(make_cfg()))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[2], random.getstate())


def test_several_training_sets_are_concatenated():
    cfg = make_cfg(["counted", {"NAME": "counted", "ARGS": {"size": 3}}], DROP_LAST=True)
    assert len(build_train_loader(cfg)) == 3
    assert len(build_train_loader(cfg).dataset) == 13


def test_concatenated_arrays_are_read_in_batches_and_must_have_the_same_shapes():
    arrays = {"NAME": f"{__name__}:arrays", "ARGS": {"shape": [3]}}
    cfg = get_cfg()
    cfg.DATASETS.TRAIN = (arrays, arrays)
    assert type(build_train_loader(cfg).dataset) is ArrayDataset
    for other in ({"shape": [4]}, {"shape": [3], "dtype": "float64"}):
        cfg.DATASETS.TRAIN = (arrays, {**arrays, "ARGS": other})
        with pytest.raises(ConfigError, match=r"DATASETS\.TRAIN: .* different shapes or types"):
            build_train_loader(cfg)


def arrays(shape, dtype="float32"):
    return ArrayDataset(torch.zeros(40, *shape, dtype=getattr(torch, dtype)))


def test_a_missing_training_set_is_an_error_that_names_the_key():
    with pytest.raises(ConfigError, match=r"DATASETS\.TRAIN is empty"):
        build_train_loader(make_cfg([]))


@pytest.mark.parametrize(
    ("name", "args"),
    [("TrainingSampler", {}), ("RandomSubsetTrainingSampler", {"subset_ratio": 0.5})],
)
def test_endless_samplers_are_chosen_by_name_and_follow_the_seed(name, args):
    def first():
        cfg = make_cfg(SAMPLER_TRAIN=name)
        for key, value in args.items():
            cfg.DATALOADER.SAMPLER_ARGS[key] = value
        check_data(cfg)
        return [x.tolist() for x, _ in islice(build_train_loader(cfg), 6)]

    assert first() == first()
    assert [len(batch) for batch in first()] == [4] * 6


@pytest.mark.parametrize("name", ["RandomSampler", "SequentialSampler", "DistributedSampler"])
def test_samplers_of_torch_are_used_by_name(name):
    def order():
        cfg = make_cfg(SAMPLER_TRAIN=f"torch.utils.data:{name}")
        check_data(cfg)
        return torch.cat([x for x, _ in build_train_loader(cfg)]).tolist()

    assert sorted(order()) == list(range(10))
    assert order() == order()


def test_iterable_data_has_no_sampler():
    assert [batch.tolist() for batch in build_train_loader(make_cfg(["Stream"]))] == [[0, 1, 2, 3], [4]]


def test_the_test_loader_yields_every_sample_once_in_order():
    cfg = make_cfg(TEST_BATCH_SIZE=3)
    cfg.DATASETS.TEST = [{"NAME": "counted", "ARGS": {"size": 5}}]
    assert [x.tolist() for x, _ in build_test_loader(cfg, "counted")] == [[0, 1, 2], [3, 4]]
    assert [x.tolist() for x in build_test_loader(cfg, "Stream")] == [[0, 1, 2], [3, 4]]  # not in DATASETS.TEST


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subset_of_an_array_dataset_is_read_in_batches(workers):
    part = Subset(counted(), [3, 4, 5])
    loader = build_batch_data_loader(
        part, TrainingSampler(3, shuffle=False, seed=0), total_batch_size=2, num_workers=workers
    )
    assert [x.tolist() for x, _ in islice(loader, 3)] == [[3, 4], [5, 3], [4, 5]]


def test_the_batch_loader_yields_lists_of_samples_by_default():
    loader = build_batch_data_loader(TensorDataset(torch.arange(3)), TrainingSampler(3, seed=0), 2)
    batch = next(iter(loader))
    assert isinstance(batch, list)
    assert [type(sample) for sample in batch] == [tuple, tuple]


def test_batch_size_must_fit_the_ranks():
    with pytest.raises(ValueError, match="total_batch_size"):
        build_batch_data_loader(counted(), None, 0)


def test_random_draws_of_samples_follow_the_seed_and_not_the_workers():
    def draws(**options):
        cfg = make_cfg(["RandomNumbers"], **options)
        return torch.cat([torch.stack(batch) for batch in build_train_loader(cfg)], 1).tolist()

    first = draws()
    assert first == draws(NUM_WORKERS=2)
    assert all(len(set(generator)) == 8 for generator in first)


def test_random_draws_of_test_samples_do_not_depend_on_workers():
    def draws(workers):
        batches = build_test_loader(make_cfg(NUM_WORKERS=workers), "RandomNumbers")
        return torch.cat([torch.stack(batch) for batch in batches], 1).tolist()

    state = torch.get_rng_state()
    assert draws(0) == draws(2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("sampler", ["EpochSampler", "TrainingSampler"])
def test_a_limited_epoch_ends_early(sampler):
    loader = build_train_loader(make_cfg(LIMIT_TRAIN_BATCHES=2, SAMPLER_TRAIN=sampler))
    assert len(loader) == 2
    assert [len(x) for x, _ in loader] == [4, 4]


def test_a_limited_test_set_has_the_first_batches():
    loader = build_test_loader(make_cfg(LIMIT_TEST_BATCHES=2), "counted")
    assert [x.tolist() for x, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(build_test_loader(make_cfg(LIMIT_TEST_BATCHES=2), "RandomNumbers")) == 2


@pytest.mark.parametrize("name", ["counted", "RandomNumbers"])
def test_overfitting_uses_the_same_samples_in_every_epoch(name):
    loader = build_train_loader(make_cfg([name], OVERFIT_BATCHES=1))
    assert len(loader) == 1
    assert len(loader.dataset) == 4
    for epoch in range(3):
        loader.batch_sampler.set_epoch(epoch)
        assert sorted(index for batch in loader.batch_sampler for index in batch) == [0, 1, 2, 3]


def test_iters_per_epoch_for_data_with_a_length_is_refused():
    with pytest.raises(ConfigError, match=r"ITERS_PER_EPOCH.*LIMIT_TRAIN_BATCHES"):
        build_train_loader(make_cfg(ITERS_PER_EPOCH=2))
    build_train_loader(make_cfg(ITERS_PER_EPOCH=2, SAMPLER_TRAIN="TrainingSampler"))


def test_indexed_data_needs_a_sampler():
    with pytest.raises(ValueError, match="sampler"):
        build_batch_data_loader(counted(), None, 2)
    assert [b.tolist() for b in build_batch_data_loader(Stream(), None, 2, collate_fn=torch.tensor)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cfg: cfg.DATASETS.merge_from_list(["TRAIN", ["countet"]]), "countet"),
        (lambda cfg: cfg.DATASETS.merge_from_list(["TEST", ["counted", "counted"]]), "twice"),
        (lambda cfg: cfg.DATALOADER.merge_from_list(["NUM_WORKERS", 1000]), r"DATALOADER\.NUM_WORKERS"),
        (lambda cfg: cfg.DATALOADER.merge_from_list(["SAMPLER_TRAIN", "EpochSample"]), "EpochSampler"),
        (lambda cfg: cfg.DATALOADER.SAMPLER_ARGS.update(shufle=True), r"DATALOADER\.SAMPLER_ARGS\.shufle"),
    ],
)
def test_invalid_data_settings_are_found_without_reading_data(change, message):
    cfg = make_cfg()
    check_data(cfg)
    change(cfg)
    with pytest.raises(ConfigError, match=message):
        check_data(cfg)
