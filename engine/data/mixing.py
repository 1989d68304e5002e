"""Samples drawn by weight, data sets mixed by ratio, and batches of a budget of tokens.

All follow from the seed and the epoch, so they are the same on any number of ranks and after a resume.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...config import ConfigError
from ...config.components import errors_at
from ...config.registry import locate
from .batch_sampler import GlobalBatchSampler
from .samplers import SAMPLER_REGISTRY, EpochSampler
from .seeding import seeded_generator

_ARGS = "DATALOADER.SAMPLER_ARGS"


@SAMPLER_REGISTRY.register()
class WeightedSampler(EpochSampler):
    """Draws samples with replacement, each with a probability proportional to its weight.

    Args:
        dataset: the training set; for ``"balanced"`` it has ``targets`` or ``labels``, (size,) ints or names, or its
            last tensor in memory is that.
        weights: "balanced": each class is drawn equally often; or (size,) numbers of at least 0; or a function of the
            data set that returns them, as ``"module:function"``.
        num_samples: draws per epoch; 0: the size of the data set.
        seed: the same on all ranks.

    Raises:
        ConfigError: there are no labels, not one weight per sample, a weight is negative or not finite, or all are 0.
    """

    def __init__(
        self, dataset: Any, weights: str | Sequence[float] = "balanced", num_samples: int = 0, seed: int = 0
    ) -> None:
        super().__init__(len(dataset), True, seed)
        values: Any = weights
        if isinstance(weights, str):
            with errors_at(f"{_ARGS}.weights"):
                values = (_balanced if weights == "balanced" else locate(weights))(dataset)
        numbers = torch.as_tensor(values, dtype=torch.float64)
        if numbers.shape != (self.size,) or not (numbers.isfinite() & (numbers >= 0)).all() or not numbers.sum() > 0:
            raise ConfigError(
                f"{_ARGS}.weights: WeightedSampler needs {self.size} finite numbers of at least 0, one per sample and "
                f"not all 0, and got shape {tuple(numbers.shape)}"
            )
        self._sums = numbers.cumsum(0)
        self.num_samples = num_samples or self.size

    def _epoch(self) -> torch.Tensor:
        draws = torch.rand(self.num_samples, generator=seeded_generator(self.seed, self.epoch), dtype=torch.float64)
        return torch.searchsorted(self._sums, draws * self._sums[-1], right=True)

    def __len__(self) -> int:
        return self.num_samples


def _balanced(dataset: Any) -> torch.Tensor:
    """One over the number of samples of each sample's class."""
    tensors = getattr(dataset, "tensors", None)
    labels = next((getattr(dataset, name) for name in ("targets", "labels") if hasattr(dataset, name)), None)
    labels = tensors[-1] if labels is None and isinstance(tensors, Sequence) and tensors else labels
    classes = None if labels is None else np.asarray(labels)
    if classes is None or classes.ndim != 1 or classes.dtype.kind not in "iubUSO":
        raise ConfigError(
            f'"balanced" needs the class of each sample: give {type(dataset).__name__} an attribute '
            "targets, (size,) ints or names, or pass weights"
        )
    _, numbers, counts = np.unique(classes, return_inverse=True, return_counts=True)
    return torch.from_numpy(1.0 / counts[numbers])


class MixedSampler(EpochSampler):
    """Reads several concatenated data sets in the ratio of their ``RATIO``.

    Each epoch has the same number of samples of each set, in random order. A set goes on where it was in the epoch
    before, and is shuffled again whenever it ends; so epochs do not hold each sample once.

    Args:
        sizes: samples of each data set. An epoch has as many in all.
        ratios: of the samples of an epoch, one positive number per set. They need not add up to 1.
        seed: the same on all ranks.

    Raises:
        ConfigError: a ratio is so small that no sample of an epoch is of its set.
    """

    def __init__(self, sizes: Sequence[int], ratios: Sequence[float], seed: int = 0) -> None:
        super().__init__(sum(sizes), True, seed)
        self.sizes = sizes
        ends = torch.tensor([0.0, *ratios], dtype=torch.float64).cumsum(0)
        self.counts = (ends / ends[-1] * self.size).round().diff().long().tolist()
        if 0 in self.counts:
            number = self.counts.index(0)
            raise ConfigError(f"DATASETS.TRAIN[{number}].RATIO: {ratios[number]} is less than one sample of an epoch")

    def _epoch(self) -> torch.Tensor:
        indices = torch.empty(self.size, dtype=torch.int64)
        places = torch.randperm(self.size, generator=seeded_generator(self.seed, self.epoch)).split(self.counts)
        first = 0
        for number, (mine, size) in enumerate(zip(places, self.sizes, strict=True)):
            begin = self.epoch * len(mine)
            passes = range(begin // size, -(-(begin + len(mine)) // size))
            orders = [torch.randperm(size, generator=seeded_generator(self.seed, number, p)) for p in passes]
            indices[mine.sort().values] = first + torch.cat(orders)[begin % size :][: len(mine)]
            first += size
        return indices


class TokenBatchSampler(GlobalBatchSampler):
    """Global batches of samples of similar length, as many as fit into a budget of tokens after padding.

    Samples are sorted by length, and cut into batches whose number of samples times the longest length is at most
    ``max_tokens``. Each epoch has the same numbers of samples in its batches; the order of the batches, and which of
    the samples of one length stand together, follow from seed and epoch. Positions are counted in batches.

    Args:
        lengths: (size,) ints, tokens of each sample.
        max_tokens: of a global batch, padded.
        **options: as for :class:`GlobalBatchSampler`.

    Raises:
        ConfigError: a sample is longer than the budget, or a batch has fewer samples than there are ranks.
    """

    def __init__(self, lengths: Any, max_tokens: int, **options: Any) -> None:
        self._lengths = torch.as_tensor(lengths, dtype=torch.float64).ceil().long()
        self._sizes = list[int]()
        ordered = self._lengths.sort(descending=True).values.tolist()
        if ordered[0] > max_tokens:
            raise ConfigError(f"DATALOADER.MAX_TOKENS: is {max_tokens}, and a sample has {ordered[0]} tokens")
        begin = 0
        while begin < len(ordered):
            self._sizes.append(min(max_tokens // max(ordered[begin], 1), len(ordered) - begin))
            begin += self._sizes[-1]
        super().__init__(None, max_tokens, **options)
        self.batch_size = 1  # the unit of positions
        if min(self._sizes) < self.world_size:
            raise ConfigError(
                f"DATALOADER.MAX_TOKENS: a batch has {min(self._sizes)} sample(s) for {self.world_size} ranks: use a "
                "larger budget, or leave out the longest samples"
            )

    def batches_after(self, start: int) -> int:
        """Batches left in an epoch after ``start`` of them."""
        return max(0, len(self._sizes) - start)

    def _global_batches(self) -> Iterator[tuple[int, list[int]]]:
        start, self._start = self._start or 0, None
        generator = seeded_generator(self.seed, self._epoch)
        shuffled = torch.randperm(len(self._lengths), generator=generator)
        ordered = shuffled[self._lengths[shuffled].argsort(descending=True, stable=True)].split(self._sizes)
        batches = [ordered[number] for number in torch.randperm(len(ordered), generator=generator)]
        place = sum(map(len, batches[:start]))
        for batch in batches[start:]:
            yield place, batch.tolist()
            place += len(batch)
