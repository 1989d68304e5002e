"""Data sets, samplers and loaders."""

from .batch_sampler import PlacedBatch, RankBatchSampler
from .build import (
    build_batch_data_loader,
    build_test_loader,
    build_train_loader,
    check_data,
    check_same_length,
    worker_init_reset_seed,
)
from .collate import COLLATE_REGISTRY, pad_collate, trivial_batch_collator
from .common import AspectRatioGroupedDataset, DatasetFromList, MapDataset, ToIterableDataset
from .datasets import DATASET_REGISTRY, ArrayDataset, concat_datasets, get_dataset
from .epoch_iterator import EpochIterator
from .generators import seed_generators, stream_key
from .huggingface import HuggingFaceDataset
from .images import TRANSFORM_REGISTRY, ImageFolder
from .microbatch import split_batch
from .samplers import (
    SAMPLER_REGISTRY,
    EpochSampler,
    GlobalBatchSampler,
    GroupedBatchSampler,
    InferenceSampler,
    LengthGroupedSampler,
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    TrainingSampler,
)
from .seeding import SeededLoader, is_deterministic
from .stream import ShardedIterable, StreamLoader
from .text import TextLines, Tokens, python_docs_test, python_docs_train
from .transfer import move_to_device

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
    "TextLines",
    "ToIterableDataset",
    "Tokens",
    "TrainingSampler",
    "build_batch_data_loader",
    "build_test_loader",
    "build_train_loader",
    "check_data",
    "check_same_length",
    "concat_datasets",
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
