"""Build data loaders from a config."""

import functools
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset

from ...config import CfgNode, ConfigError, component, get_cfg, name_of
from ...config.components import ComponentKey
from ...hooks.common import length_of
from .. import comm
from ..modeling.build import resolve_device
from .batch_sampler import GlobalBatchSampler
from .batches import COLLATE_REGISTRY, CollateFn, trivial_batch_collator
from .datasets import ArrayDataset, AspectRatioGroupedDataset, MapDataset, get_dataset
from .loader import LimitedLoader, SeededLoader
from .mixing import MixedSampler, TokenBatchSampler
from .samplers import SAMPLER_REGISTRY, InferenceSampler, TrainingSampler
from .seeding import own_collate_fn
from .stream import ShardedIterable, SplitLoader, StreamLoader

logger = logging.getLogger(__name__)

COLLATE_KEY = ComponentKey(COLLATE_REGISTRY, "DATALOADER.COLLATE_FN.NAME", offers=())
TRAIN_COLLATE_KEY = ComponentKey(COLLATE_REGISTRY, "DATALOADER.TRAIN_COLLATE_FN.NAME", offers=())
SAMPLER_KEY = ComponentKey(
    SAMPLER_REGISTRY,
    "DATALOADER.SAMPLER_TRAIN",
    # "data_source" and "num_replicas" are torch's names.
    offers=(
        *("cfg", "dataset", "data_source", "size", "batch_size", "seed", "seed_shuffle", "seed_subset"),
        *("rank", "world_size", "num_replicas"),
    ),
)


def build_train_loader(cfg: CfgNode) -> Any:
    """Build the loader of ``DATASETS.TRAIN``: this rank's part of global batches of ``BATCH_SIZE`` samples.

    ``loader.batch_sampler`` is a :class:`GlobalBatchSampler`; its ``set_epoch(epoch, start)`` sets the position of the
    next ``iter(loader)``. For an iterable data set the loader is a :class:`StreamLoader`. Batches: tensors (n, ...).

    Raises:
        ConfigError: the data sets, the sampler or the batch size are wrong.
    """
    if not cfg.DATASETS.TRAIN:
        raise ConfigError('DATASETS.TRAIN is empty: name the training data, such as ["digits_train"]')
    parts, dataset = _training_data(cfg)
    settings, seed = cfg.DATALOADER, cfg.SEED if cfg.SEED >= 0 else comm.shared_random_seed()
    if is_loader(dataset):
        loader = use_loader(dataset, "DATASETS.TRAIN")
        if settings.TRAIN_COLLATE_FN.NAME:
            raise ConfigError("DATALOADER.TRAIN_COLLATE_FN: the training data is a loader, which collates by itself")
    elif isinstance(dataset, IterableDataset):
        if comm.get_data_size() > 1 and not isinstance(dataset, ShardedIterable) and not settings.ITERS_PER_EPOCH:
            raise ConfigError(
                f"DATALOADER.ITERS_PER_EPOCH: {type(dataset).__name__} splits itself between the ranks, which may then "
                "end at different steps, and wait for each other forever. Set the length of an epoch, or make the set "
                "a ShardedIterable, which ends on all ranks at the same step"
            )
        options = {"drop_last": settings.DROP_LAST, **_options(cfg, dataset, training=True)}
        loader = _stream(dataset, settings.BATCH_SIZE, seed=seed, **options)
    else:
        batches = functools.partial(_train_batches, cfg, dataset, parts, seed)
        options = {"batch_sampler": batches(), "make_batches": batches, **_options(cfg, dataset, training=True)}
        loader = SeededLoader(dataset, seed=seed, **options)
        if loader.persistent_workers and hasattr(dataset, "set_epoch"):
            logger.warning(
                "DATALOADER.PERSISTENT_WORKERS: the workers keep their copy of %s, which set_epoch() does not reach",
                type(dataset).__name__,
            )
    limit = settings.LIMIT_TRAIN_BATCHES
    return LimitedLoader(loader, limit) if limit else loader


def _train_batches(cfg: CfgNode, dataset: Any, parts: list[Any], seed: int) -> GlobalBatchSampler:
    settings = cfg.DATALOADER
    if settings.MAX_TOKENS:
        lengths = [length for part in parts for length in getattr(part, "lengths", ())]
        if len(lengths) != len(dataset):
            raise ConfigError(
                f"DATALOADER.MAX_TOKENS: needs the tokens of each of {len(dataset)} samples: give the class "
                f"{type(parts[0]).__name__} (for a list a subclass) an attribute lengths, a list of ints"
            )
        return TokenBatchSampler(lengths, settings.MAX_TOKENS, seed=seed)
    if ratios := _ratios(cfg):
        sampler: Any = MixedSampler([len(part) for part in parts], ratios, seed)
    else:
        data = {"dataset": dataset, "data_source": dataset, "size": len(dataset), "batch_size": settings.BATCH_SIZE}
        seeds = dict.fromkeys(("seed", "seed_shuffle", "seed_subset"), seed)
        # The batch sampler splits the stream of one sampler over the ranks.
        sampler = SAMPLER_KEY.build(cfg, **data, **seeds, rank=0, world_size=1, num_replicas=1)
    if isinstance(sampler, TrainingSampler):  # a subclass may not take rank and world_size
        sampler.yield_for_all_ranks()
    batches = GlobalBatchSampler(sampler, settings.BATCH_SIZE, settings.DROP_LAST, seed=seed)
    if batches.batches_after(0) == 0:
        raise ConfigError(
            f"DATALOADER.BATCH_SIZE: an epoch has fewer than {settings.BATCH_SIZE} samples, and DATALOADER.DROP_LAST "
            "drops a batch that is not full: no batch is left. Use smaller batches, or set DROP_LAST to False"
        )
    if settings.ITERS_PER_EPOCH and length_of(sampler) is not None:
        raise ConfigError(
            f"DATALOADER.ITERS_PER_EPOCH: epochs of {settings.SAMPLER_TRAIN} have a length, {len(batches)} batches; "
            "to make them shorter, set LIMIT_TRAIN_BATCHES"
        )
    return batches


def _training_data(cfg: CfgNode) -> tuple[list[Any], Any]:
    """Build the training sets. Returns them, and what is made of them; with OVERFIT_BATCHES that is the first samples.

    Raises:
        ConfigError: one is iterable, and something needs indices.
    """
    parts: list[Any] = []
    ratios = _ratios(cfg)  # an error, if any, before data is read
    for i, entry in enumerate(cfg.DATASETS.TRAIN):
        part = get_dataset(entry, f"DATASETS.TRAIN[{i}]")
        if not isinstance(part, IterableDataset) and length_of(part) == 0:
            size = getattr(part, "drop_last", False) and getattr(part, "batch_size", 0)
            dropped = f": its drop_last drops a batch of fewer than batch_size={size}" if size else ""
            raise ConfigError(f"DATASETS.TRAIN[{i}]: the data set {component(entry)[0]} has no samples{dropped}")
        parts.append(part)
    what = ""
    if len(parts) > 1 or ratios:
        what = "DATASETS.TRAIN: RATIO, or more than one set,"
    for key in ("MAX_TOKENS", "OVERFIT_BATCHES"):
        if cfg.DATALOADER[key]:
            what = f"DATALOADER.{key}"
    for part in parts if what else ():
        if is_loader(part) or isinstance(part, IterableDataset):
            raise ConfigError(
                f"{what} needs data sets with indices, and {type(part).__name__} is iterable: use it alone, or put "
                "its samples into a list"
            )
    dataset = parts[0] if len(parts) == 1 else ConcatDataset(parts)
    if number := cfg.DATALOADER.OVERFIT_BATCHES * cfg.DATALOADER.BATCH_SIZE:
        dataset = Subset(dataset, range(min(number, len(dataset))))
        logger.info("DATALOADER.OVERFIT_BATCHES: training and evaluation use the same %d samples", len(dataset))
    return parts, dataset


def _ratios(cfg: CfgNode) -> list[float]:
    """The ratios in which the training sets are mixed; empty if they are not.

    Raises:
        ConfigError: some have none, or something else decides the order or number of samples, too.
    """
    ratios = []
    for entry in cfg.DATASETS.TRAIN:
        if isinstance(entry, Mapping) and "RATIO" in entry:
            ratios.append(entry["RATIO"])
    if not ratios and not cfg.DATALOADER.MAX_TOKENS:
        return []
    what = "RATIO" if ratios else "DATALOADER.MAX_TOKENS"
    if ratios and len(ratios) < len(cfg.DATASETS.TRAIN):
        raise ConfigError("DATASETS.TRAIN: give each set a RATIO, or none")
    defaults, settings = get_cfg().DATALOADER, cfg.DATALOADER
    others = ("MAX_TOKENS",) if ratios else ("DROP_LAST",)
    for key in ("SAMPLER_TRAIN", "SAMPLER_ARGS", "OVERFIT_BATCHES", "ITERS_PER_EPOCH", *others):
        if settings[key] != defaults[key]:
            raise ConfigError(f"DATALOADER.{key}: does not go together with {what}, which decides that itself")
    return ratios


def build_test_loader(cfg: CfgNode, dataset_name: str) -> Any:
    """Build the loader of a test set: this rank's part, every sample once, in order. Batches: tensors (n, ...).

    Args:
        cfg: the whole config.
        dataset_name: name of an entry of ``DATASETS.TEST``, or of any registered data set.
    """
    batch_size = cfg.DATALOADER.TEST_BATCH_SIZE or cfg.DATALOADER.BATCH_SIZE
    total, limit = batch_size * comm.get_data_size(), cfg.DATALOADER.LIMIT_TEST_BATCHES
    seed = max(cfg.SEED, 0)
    if cfg.DATALOADER.OVERFIT_BATCHES and cfg.DATASETS.TRAIN:
        dataset = _training_data(cfg)[1]  # the samples that are trained on
    else:
        entries = {name_of(entry): (entry, f"DATASETS.TEST[{i}]") for i, entry in enumerate(cfg.DATASETS.TEST)}
        dataset = get_dataset(*entries.get(dataset_name, (dataset_name, "DATASETS.TEST")))
    if is_loader(dataset):
        loader = use_loader(dataset, "DATASETS.TEST")
    elif isinstance(dataset, IterableDataset):
        loader = _stream(dataset, total, seed=seed, keep_rest=True, **_options(cfg, dataset))
    else:
        size = min(len(dataset), limit * total) if limit else len(dataset)
        batches = BatchSampler(InferenceSampler(size), batch_size, drop_last=False)
        return SeededLoader(dataset, seed=seed, batch_sampler=batches, **_options(cfg, dataset))
    return LimitedLoader(loader, limit) if limit else loader


def check_same_length(loader: Any, key: str) -> Any:
    """Check that a data set that is split between the ranks has the same length on all of them. All ranks call it.

    Data sets and loaders that each rank splits itself are not compared.

    Args:
        loader: of :func:`build_train_loader` or :func:`build_test_loader`, or another one.
        key: names the data set in the error.

    Returns:
        The loader.

    Raises:
        ConfigError: a rank's length differs from that of rank 0.
    """
    if comm.get_world_size() == 1:
        return loader
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    is_split = isinstance(batches, GlobalBatchSampler) or isinstance(sampler, InferenceSampler)
    lengths = comm.all_gather(len(loader.dataset) if is_split else None)
    for rank, length in enumerate(lengths):
        if None not in (length, lengths[0]) and length != lengths[0]:
            raise ConfigError(
                f"{key}: the data set has {length} samples on rank {rank}, and {lengths[0]} on rank 0. Each rank must "
                "build the whole data set, which is then split between the ranks"
            )
    return loader


def build_batch_data_loader(
    dataset: Dataset[Any],
    sampler: Sampler[int] | None,
    total_batch_size: int,
    *,
    aspect_ratio_grouping: bool = False,
    num_workers: int = 0,
    collate_fn: CollateFn | None = None,
    drop_last: bool = True,
    seed: int | None = None,
    **options: Any,
) -> Any:
    """Build a loader of batches without a config.

    Args:
        dataset: map-style, or iterable with ``sampler=None``.
        sampler: any. On several ranks a sampler that is no :class:`TrainingSampler` splits its indices between the
            ranks itself, as an :class:`InferenceSampler` does.
        total_batch_size: samples per batch over all ranks, a multiple of the number of ranks.
        aspect_ratio_grouping: return an :class:`AspectRatioGroupedDataset` of the samples, which are dicts with
            ``width`` and ``height``. A resume cannot position it: its epoch starts again.
        num_workers: worker processes; 0 reads in this process.
        collate_fn: makes a batch from samples. Default: the data set's ``collate_fn``, or
            :func:`trivial_batch_collator`. torch's ``default_collate`` makes tensors (n, ...) from tensors (...).
        drop_last: drop the last batch if it is not full.
        seed: seed of the samples' random numbers and of the sampler's generator, the same on all ranks. Default: a
            random seed shared by the ranks, drawn from numpy's generator; the sampler's generator stays as it is.
        **options: others of torch's DataLoader, such as ``pin_memory`` and ``prefetch_factor``.

    Raises:
        ValueError: ``total_batch_size`` is not a positive multiple of the number of ranks, or a map-style data set has
            no sampler.
    """
    world_size = comm.get_data_size()
    if total_batch_size < 1 or total_batch_size % world_size:
        raise ValueError(
            f"total_batch_size must be a positive multiple of {world_size} rank(s), not {total_batch_size}"
        )
    splits_itself = world_size > 1
    if isinstance(sampler, TrainingSampler) and type(sampler).__iter__ is TrainingSampler.__iter__:
        splits_itself = False
        sampler.yield_for_all_ranks()
    own_seed = comm.shared_random_seed() if seed is None else seed
    options |= {"num_workers": num_workers, "seed": own_seed}
    options["collate_fn"] = collate_fn or own_collate_fn(dataset) or trivial_batch_collator
    size = total_batch_size
    if aspect_ratio_grouping:  # the loader reads single samples
        size, drop_last, options["collate_fn"] = world_size, False, itemgetter(0)
    if isinstance(dataset, IterableDataset):
        loader = _stream(dataset, size, drop_last=drop_last, **options)
    elif sampler is None:
        raise ValueError("a map-style data set needs a sampler, such as TrainingSampler(len(dataset))")
    elif splits_itself:
        loader = SeededLoader(dataset, batch_sampler=BatchSampler(sampler, size // world_size, drop_last), **options)
    else:
        batches = GlobalBatchSampler(sampler, size, drop_last, seed=own_seed, seeds_own=seed is not None)
        loader = SeededLoader(dataset, batch_sampler=batches, **options)
    if not aspect_ratio_grouping:
        return loader
    groups = AspectRatioGroupedDataset(loader, total_batch_size // world_size)
    return groups if collate_fn is None else MapDataset(groups, collate_fn)


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed python, numpy and torch in a loader worker, with a different seed in each worker.

    For your own loaders.
    """
    seed = torch.initial_seed() % 2**31
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _options(cfg: CfgNode, dataset: Any, training: bool = False) -> dict[str, Any]:
    settings, pin = cfg.DATALOADER, cfg.DATALOADER.PIN_MEMORY
    return {
        "num_workers": settings.NUM_WORKERS,
        "pin_memory": resolve_device(cfg.MODEL.DEVICE).type == "cuda" if pin == "auto" else pin,
        "prefetch_factor": (settings.PREFETCH_FACTOR or None) if settings.NUM_WORKERS else None,
        "persistent_workers": settings.PERSISTENT_WORKERS and settings.NUM_WORKERS > 0,
        "collate_fn": build_collate_fn(cfg, dataset, training),
    }


def build_collate_fn(cfg: CfgNode, dataset: Any, training: bool = False) -> CollateFn | None:
    """Return the collate function of ``cfg.DATALOADER`` for a data set; its own one if that is not set.

    The function gets a list of samples, also if the data set is an :class:`ArrayDataset`, which returns whole batches.

    Args:
        cfg: the whole config.
        dataset: the data set.
        training: whether ``TRAIN_COLLATE_FN`` comes before ``COLLATE_FN``.
    """
    own = own_collate_fn(dataset)
    key = TRAIN_COLLATE_KEY if training and TRAIN_COLLATE_KEY.name(cfg) else COLLATE_KEY
    if not key.name(cfg):
        return own
    collate = key.build(cfg)
    return functools.partial(_collate_rows, collate) if own is ArrayDataset.collate_fn else collate


def _collate_rows(collate: CollateFn, batch: tuple[torch.Tensor, ...]) -> Any:
    return collate(list(zip(*batch, strict=True)))


def _stream(
    dataset: IterableDataset[Any], batch_size: int, *, seed: int, keep_rest: bool = False, **options: Any
) -> DataLoader[Any]:
    options["persistent_workers"] = False  # they would not see the epoch of the next pass
    readers = comm.get_data_size() * max(1, options["num_workers"])
    if isinstance(dataset, ShardedIterable) or readers == 1:
        return StreamLoader(dataset, batch_size, seed=seed, keep_rest=keep_rest, **options)
    name = type(dataset).__name__
    if not getattr(dataset, "shares_itself_out", False):
        raise ConfigError(
            f"DATASETS: {name} is iterable, and would be read {readers} times: in each loader worker of each rank. "
            f"Use ShardedIterable({name}(...)), which splits it; or set shares_itself_out = True on a data set that "
            "splits itself; or set DATALOADER.NUM_WORKERS to 0, with one rank"
        )
    return SplitLoader(dataset, batch_size, seed=seed, **options)


class NoTrainData:
    """The training data of a trainer that only evaluates and predicts."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[NoReturn]:
        raise ConfigError("train_data: this trainer has none, so it can only evaluate and predict")


def is_loader(data: object) -> bool:
    """Return whether an object is a loader of batches: a ``DataLoader``, or an iterable without indices that is no
    data set."""
    if isinstance(data, DataLoader | NoTrainData):
        return True
    return isinstance(data, Iterable) and not isinstance(data, Dataset) and not hasattr(data, "__getitem__")


def use_loader(loader: Any, key: str) -> Any:
    """Return a loader that is used in the place of a data set.

    Args:
        loader: see :func:`is_loader`.
        key: the key that names or holds the loader.

    Raises:
        ConfigError: there are several ranks, and the loader gives all of them the same batches.
    """
    samplers = [type(getattr(loader, name, None)) for name in ("sampler", "batch_sampler")]
    shared = all(sampler.__module__ == "torch.utils.data.sampler" for sampler in samplers)
    if comm.get_data_size() > 1 and type(loader) is DataLoader and shared:
        raise ConfigError(
            f"{key}: a DataLoader gives each of {comm.get_data_size()} ranks all samples; pass the data set, which is "
            "split between the ranks, or give the loader a DistributedSampler"
        )
    return loader
