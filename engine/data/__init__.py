"""Data sets, samplers and loaders."""

from .batch_sampler import GlobalBatchSampler
from .batches import COLLATE_REGISTRY, pad_collate, trivial_batch_collator
from .build import build_batch_data_loader, build_test_loader, build_train_loader, worker_init_reset_seed
from .datasets import (
    DATASET_REGISTRY,
    ArrayDataset,
    AspectRatioGroupedDataset,
    DatasetFromList,
    MapDataset,
    ToIterableDataset,
    get_dataset,
)
from .epoch_iterator import EpochIterator
from .files import TRANSFORM_REGISTRY, ImageFolder, Tokens
from .loader import SeededLoader, move_to_device
from .mixing import WeightedSampler
from .samplers import (
    SAMPLER_REGISTRY,
    EpochSampler,
    GroupedBatchSampler,
    InferenceSampler,
    LengthGroupedSampler,
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    TrainingSampler,
)
from .stream import ShardedIterable, StreamLoader

__all__ = [
    "COLLATE_REGISTRY",
    "DATASET_REGISTRY",
    "SAMPLER_REGISTRY",
    "TRANSFORM_REGISTRY",
    "ArrayDataset",
    "AspectRatioGroupedDataset",
    "DatasetFromList",
    "EpochIterator",
    "EpochSampler",
    "GlobalBatchSampler",
    "GroupedBatchSampler",
    "ImageFolder",
    "InferenceSampler",
    "LengthGroupedSampler",
    "MapDataset",
    "RandomSubsetTrainingSampler",
    "RepeatFactorTrainingSampler",
    "SeededLoader",
    "ShardedIterable",
    "StreamLoader",
    "ToIterableDataset",
    "Tokens",
    "TrainingSampler",
    "WeightedSampler",
    "build_batch_data_loader",
    "build_test_loader",
    "build_train_loader",
    "get_dataset",
    "move_to_device",
    "pad_collate",
    "trivial_batch_collator",
    "worker_init_reset_seed",
]
