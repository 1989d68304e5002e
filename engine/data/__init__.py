"""Data sets, samplers and loaders."""

from .batch_sampler import GlobalBatchSampler, PlacedBatch, RankBatchSampler
from .batches import COLLATE_REGISTRY, move_to_device, pad_collate, split_batch, trivial_batch_collator
from .build import (
    build_batch_data_loader,
    build_test_loader,
    build_train_loader,
    check_data,
    check_same_length,
    worker_init_reset_seed,
)
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
from .files import TRANSFORM_REGISTRY, HuggingFaceDataset, ImageFolder, Tokens, python_docs_test, python_docs_train
from .loader import SeededLoader
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
from .seeding import is_deterministic, seed_generators, stream_key
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
    "HuggingFaceDataset",
    "ImageFolder",
    "InferenceSampler",
    "LengthGroupedSampler",
    "MapDataset",
    "PlacedBatch",
    "RandomSubsetTrainingSampler",
    "RankBatchSampler",
    "RepeatFactorTrainingSampler",
    "SeededLoader",
    "ShardedIterable",
    "StreamLoader",
    "ToIterableDataset",
    "Tokens",
    "TrainingSampler",
    "build_batch_data_loader",
    "build_test_loader",
    "build_train_loader",
    "check_data",
    "check_same_length",
    "get_dataset",
    "is_deterministic",
    "move_to_device",
    "pad_collate",
    "python_docs_test",
    "python_docs_train",
    "seed_generators",
    "split_batch",
    "stream_key",
    "trivial_batch_collator",
    "worker_init_reset_seed",
]
