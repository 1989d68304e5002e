"""From a config to data loaders."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, Subset

from ...config import CfgNode, ConfigError, component
from .. import comm
from ..modeling.build import resolve_device
from .datasets import DATASET_REGISTRY, concat_datasets, get_dataset
from .samplers import SAMPLER_REGISTRY, GlobalBatchSampler, InferenceSampler

__all__ = [
    "build_batch_data_loader",
    "build_test_loader",
    "build_train_loader",
    "check_data",
    "trivial_batch_collator",
    "worker_init_reset_seed",
]


def build_train_loader(cfg: CfgNode) -> DataLoader[Any]:
    """The loader of ``DATASETS.TRAIN``: this rank's part of one global batch of ``BATCH_SIZE`` after the other.

    ``loader.batch_sampler`` is a :class:`GlobalBatchSampler`, whose ``set_epoch(epoch, start)`` chooses where the
    next ``iter(loader)`` begins. An iterable data set has no sampler: it shares itself out between ranks and workers.

    Raises:
        ConfigError: the data sets, the sampler or the batch size are wrong.
    """
    if not cfg.DATASETS.TRAIN:
        raise ConfigError('DATASETS.TRAIN is empty: name the data to train on, such as ["digits_train"]')
    dataset = concat_datasets(
        [get_dataset(entry, f"DATASETS.TRAIN[{i}].ARGS") for i, entry in enumerate(cfg.DATASETS.TRAIN)]
    )
    seed = cfg.SEED if cfg.SEED >= 0 else comm.shared_random_seed()
    total, drop_last = cfg.DATALOADER.BATCH_SIZE, cfg.DATALOADER.DROP_LAST
    if isinstance(dataset, IterableDataset):
        rank, world_size = comm.get_rank(), comm.get_world_size()
        share = total * (rank + 1) // world_size - total * rank // world_size
        if share < 1:
            raise ConfigError(f"DATALOADER.BATCH_SIZE is {total}, fewer than one sample for each of {world_size} ranks")
        return _loader(dataset, batch_size=share, drop_last=drop_last, seed=seed, **_options(cfg))
    sampler = SAMPLER_REGISTRY.build(
        cfg.DATALOADER.SAMPLER_TRAIN,
        cfg.DATALOADER.SAMPLER_ARGS,
        offered=_sampler_offers(cfg, dataset, seed),
        key="DATALOADER.SAMPLER_ARGS",
    )
    return _loader(dataset, batch_sampler=GlobalBatchSampler(sampler, total, drop_last), seed=seed, **_options(cfg))


def build_test_loader(cfg: CfgNode, dataset_name: str) -> DataLoader[Any]:
    """The loader of one test set: this rank's share of it, every sample once, in order.

    Args:
        cfg: the whole config.
        dataset_name: name of an entry of ``DATASETS.TEST``, or of any registered data set.
    """
    names = [component(entry)[0] for entry in cfg.DATASETS.TEST]
    entry, key = dataset_name, "DATASETS.TEST"
    if dataset_name in names:
        index = names.index(dataset_name)
        entry, key = cfg.DATASETS.TEST[index], f"DATASETS.TEST[{index}].ARGS"
    dataset: Any = get_dataset(entry, key)
    batch_size = cfg.DATALOADER.TEST_BATCH_SIZE or cfg.DATALOADER.BATCH_SIZE
    seed = max(cfg.SEED, 0)
    if isinstance(dataset, IterableDataset):
        return _loader(dataset, batch_size=batch_size, seed=seed, **_options(cfg))
    batches = BatchSampler(InferenceSampler(len(dataset)), batch_size, drop_last=False)
    return _loader(dataset, batch_sampler=batches, seed=seed, **_options(cfg))


def build_batch_data_loader(
    dataset: Dataset[Any],
    sampler: Sampler[int] | None,
    total_batch_size: int,
    *,
    num_workers: int = 0,
    collate_fn: Callable[[Any], Any] | None = None,
    drop_last: bool = True,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    seed: int | None = None,
) -> DataLoader[Any]:
    """A loader of batches from parts chosen by hand.

    Args:
        dataset: map-style, or iterable with ``sampler=None``.
        sampler: yields the indices of this rank.
        total_batch_size: over all ranks, a multiple of their number.
        num_workers: worker processes; 0 reads in this process.
        collate_fn: makes a batch of samples. Default: the data set's own ``collate_fn``, or else
            :func:`trivial_batch_collator`.
        drop_last: leave out the last batch if it is not full.
        pin_memory: into memory from which copies to CUDA overlap with computing.
        prefetch_factor: batches each worker reads ahead.
        seed: of the workers' random numbers. Default: torch's initial seed.

    Raises:
        ValueError: ``total_batch_size`` is no positive multiple of the number of ranks.
    """
    world_size = comm.get_world_size()
    if total_batch_size < 1 or total_batch_size % world_size:
        raise ValueError(
            f"total_batch_size must be a positive multiple of {world_size} rank(s), not {total_batch_size}"
        )
    batching: dict[str, Any] = {"batch_size": total_batch_size // world_size, "drop_last": drop_last}
    if sampler is not None:
        batching = {"batch_sampler": BatchSampler(sampler, **batching)}
    return _loader(
        dataset,
        collate_fn=collate_fn or _own_collate_fn(dataset) or trivial_batch_collator,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        seed=torch.initial_seed() if seed is None else seed,
        **batching,
    )


def trivial_batch_collator(batch: list[Any]) -> list[Any]:
    """The list of samples, as it is."""
    return batch


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed python, numpy and torch in a loader worker from the seed the loader gave it, another one each."""
    seed = torch.initial_seed() % 2**31
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def check_data(cfg: CfgNode) -> None:
    """Check the data sets' and the sampler's names and arguments, and the loader's numbers, without reading data.

    Raises:
        ConfigError: the first thing wrong.
    """
    for key, entries in (("DATASETS.TRAIN", cfg.DATASETS.TRAIN), ("DATASETS.TEST", cfg.DATASETS.TEST)):
        for i, entry in enumerate(entries):
            name, args = component(entry)
            DATASET_REGISTRY.check(name, args, key=f"{key}[{i}].ARGS")
    repeated = [name for name, n in Counter(component(entry)[0] for entry in cfg.DATASETS.TEST).items() if n > 1]
    if repeated:
        raise ConfigError(
            f"DATASETS.TEST names {repeated[0]!r} twice: metrics are told apart by the set's name; "
            "register the second one under another name"
        )
    loader = cfg.DATALOADER
    for name, least in (("BATCH_SIZE", 1), ("TEST_BATCH_SIZE", 0), ("NUM_WORKERS", 0)):
        if loader[name] < least:
            raise ConfigError(f"DATALOADER.{name} is {loader[name]}: it must be {least} or more")
    if loader.SAMPLER_TRAIN:
        offered = tuple(_sampler_offers(cfg, (), 0))
        SAMPLER_REGISTRY.check(
            loader.SAMPLER_TRAIN, loader.SAMPLER_ARGS, offered=offered, key="DATALOADER.SAMPLER_ARGS"
        )


def _sampler_offers(cfg: CfgNode, dataset: Any, seed: int) -> dict[str, Any]:
    """What a sampler gets where its signature names it. One rank of one: the batch sampler shares the stream out."""
    seeds = dict.fromkeys(("seed", "seed_shuffle", "seed_subset"), seed)
    return {"cfg": cfg, "dataset": dataset, "size": len(dataset), **seeds, "rank": 0, "world_size": 1}


def _options(cfg: CfgNode) -> dict[str, Any]:
    return {
        "num_workers": cfg.DATALOADER.NUM_WORKERS,
        "pin_memory": resolve_device(cfg.MODEL.DEVICE).type == "cuda",
    }


def _loader(
    dataset: Dataset[Any],
    *,
    seed: int,
    num_workers: int,
    collate_fn: Callable[[Any], Any] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    # With a generator of its own, the loader draws nothing from the global one: a run's random numbers do not
    # depend on how often a loader is built or started over. Ranks differ, or their workers would draw the same.
    state = np.random.SeedSequence((seed, comm.get_rank())).generate_state(1, np.uint64)[0]
    return DataLoader(
        dataset,
        num_workers=num_workers,
        collate_fn=collate_fn or _own_collate_fn(dataset),
        worker_init_fn=worker_init_reset_seed,
        persistent_workers=num_workers > 0,
        generator=torch.Generator().manual_seed(int(state >> 1)),
        **options,
    )


def _own_collate_fn(dataset: Any) -> Callable[[Any], Any] | None:
    while isinstance(dataset, Subset) and not hasattr(dataset, "collate_fn"):
        dataset = dataset.dataset
    return getattr(dataset, "collate_fn", None)
