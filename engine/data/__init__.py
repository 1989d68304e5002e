"""Data sets, samplers and loaders.

- The order of samples follows from seed and epoch. A sampler yields it for all ranks (``samplers``, ``mixing``), and
  ``batch_sampler.GlobalBatchSampler`` cuts it into batches and takes this rank's samples of each.
- The random numbers of a sample follow from seed, epoch and its place in that order. What reads it seeds the
  generators: ``loader`` for data sets with indices, ``stream`` for iterable ones.
- ``epoch_iterator.EpochIterator`` owns the position: epoch, batches, and samples over all ranks. Streams and loaders
  of a person's with ``state_dict()`` own theirs.
- What collates a batch knows its number of samples: ``loader.Collate``.
- Loader workers start and end in ``workers``.
- ``build`` makes all of these from a config.
"""

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
from .stream import ShardedIterable

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
    "ToIterableDataset",
    "Tokens",
    "TrainingSampler",
    "WeightedSampler",
    "build_batch_data_loader",
    "build_test_loader",
    "build_train_loader",
    "move_to_device",
    "pad_collate",
    "trivial_batch_collator",
    "worker_init_reset_seed",
]
