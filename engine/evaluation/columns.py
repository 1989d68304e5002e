"""The columns of prediction files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Subset

from ...config import ConfigError
from ...hooks.common.tensors import class_names_of, samples_in
from ..modeling import ModelAdapter
from ..modeling.outputs import entries_of

__all__ = ["prediction_rows"]


def prediction_rows(
    pairs: Iterable[tuple[Any, Any]], columns: Sequence[str], adapter: ModelAdapter, loader: Any = None
) -> Iterator[Any]:
    """Yield what is written for each batch; see ``write_predictions``.

    Args:
        pairs: a batch and the model's predictions for it, as from ``trainer.predict(loader, with_batches=True)``.
        columns: names of the columns. "prediction": all outputs; "class": the index of the highest score, or of a
            binary score above 0; "class_name": its name in the data set; "probability": that of the class; "target";
            "file": the sample's file in the data set; or an entry of the batches, if they are dicts. Empty: all
            outputs.
        adapter: reads the targets.
        loader: the loader of the batches, by :func:`~hookline.engine.data.build_test_loader`. Its data set has the
            attributes ``classes`` and ``files`` for "class_name" and "file", as ``ImageFolder`` has.

    Raises:
        ConfigError: the batches or predictions have no such column.
    """
    names = class_names_of(loader)
    files = _files(loader)
    for batch, outputs in pairs:
        if not columns:
            yield outputs
            continue
        row: dict[str, Any] = {}
        for column in columns:
            if column == "prediction":
                named = entries_of(outputs)
                row.update(named if named is not None else {"prediction": outputs})
            elif column == "class":
                row["class"] = _probabilities(outputs, column).argmax(1)
            elif column == "class_name" and names:
                classes = _probabilities(outputs, column).argmax(1).tolist()
                row["class_name"] = [names[number] if number < len(names) else str(number) for number in classes]
            elif column == "probability":
                row["probability"] = _probabilities(outputs, column).amax(1)
            elif column == "target":
                row["target"] = adapter.targets(batch)
            elif isinstance(batch, Mapping) and column in batch:
                row[column] = batch[column]
            elif column == "file" and files is not None:
                row["file"] = list(islice(files, samples_in(batch) or 0))
            else:
                there = (
                    f"its entries are {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "it is no dict"
                )
                raise ConfigError(
                    f"TEST.PREDICTIONS_COLUMNS: {column!r} is not prediction, class, probability or target, not an "
                    f"entry of the batch ({there}), and not class_name or file of a data set with classes or files"
                )
        yield row


def _files(loader: Any) -> Iterator[str] | None:
    """The file of each sample that a test loader reads, in order; None if its data set has no files."""
    dataset: Any = getattr(loader, "dataset", None)
    indices = getattr(getattr(loader, "batch_sampler", None), "sampler", ())
    while isinstance(dataset, Subset):
        dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
    files = getattr(dataset, "files", None) or getattr(dataset, "samples", None)  # torchvision's name
    if not isinstance(files, Sequence):
        return None
    chosen = (files[index] for index in indices)
    return (str(one[0] if isinstance(one, tuple) else one) for one in chosen)


def _probabilities(outputs: Any, column: str) -> torch.Tensor:
    """The probability of each class (N, C), from scores."""
    named = entries_of(outputs)
    if named is not None:
        outputs = next(iter(named.values())) if len(named) == 1 else named.get("logits")
    if not isinstance(outputs, torch.Tensor) or outputs.ndim not in (1, 2) or not outputs.is_floating_point():
        raise ConfigError(
            f"TEST.PREDICTIONS_COLUMNS: {column!r} needs scores (N, C) of classes, or (N,) of two; select them with "
            "MODEL.OUTPUT_MAPPING"
        )
    scores = outputs.float()
    if scores.ndim == 2 and scores.shape[1] > 1:
        return scores.softmax(1)
    positive = scores.reshape(len(scores)).sigmoid()
    return torch.stack((1 - positive, positive), dim=1)
