"""Write a model's predictions for a data set to a file, in the order of the data set, on any number of ranks.

Each rank writes its rows to a part beside the file; the main rank merges the parts. No rank holds more than a batch,
but for "npz", whose arrays the main rank holds.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import Subset

from ...config import ConfigError
from ...config.atomic import replace_file, temporary_path
from ...hooks.common import class_names_of, fields_of
from .. import comm
from ..data.batches import batch_size_of
from ..modeling.adapters import ModelAdapter
from ..modeling.outputs import entries_of, without_loss
from .evaluator import Batch, Outputs

_Columns = dict[str, Any]  # outputs of a batch by name: arrays or lists with one entry per sample


def write_predictions(outputs: Iterable[Outputs], path: str) -> int:
    """Write predictions atomically to a file. All ranks call it.

    Args:
        outputs: outputs of this rank, batch by batch: a tensor (N, ...), a list of N values, or several of these in a
            dict, dataclass or named tuple. An output without a name is named "prediction".
        path: the file, in a folder that all machines share. ".jsonl" has an object for each sample, with the entry
            "index", the sample's index over all ranks; ".npz" has one array (N, ...) per output.

    Returns:
        The number of samples.

    Raises:
        ConfigError: the file has another ending, the outputs are not a batch, or have (for ".npz") different names or
            shapes.
    """
    folder, format = os.path.dirname(os.path.abspath(path)), os.path.splitext(path)[1].removeprefix(".")
    if format not in _MERGE:
        raise ConfigError(f"{path}: predictions are written to a file whose name ends in .jsonl or .npz")

    def begin() -> str:
        os.makedirs(folder, exist_ok=True)
        return temporary_path(path)

    base = comm.on_main_process(begin)
    part = Path(f"{base}.part{comm.get_rank()}")
    try:
        counts: list[int] = comm.all_gather(_write_part(part, map(_columns, outputs)))
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    parts = [Path(f"{base}.part{rank}") for rank in range(len(counts))]

    def end() -> None:
        try:
            if missing := [one for one in parts if not one.is_file()]:
                raise ConfigError(f"{missing[0]} is not here: {folder} must be one folder of all machines")
            replace_file(path, lambda file: _MERGE[format](file, _batches(parts)))
        finally:
            for one in parts:
                one.unlink(missing_ok=True)

    comm.on_main_process(end)
    return sum(counts)


def _columns(outputs: Outputs) -> _Columns:
    named = entries_of(without_loss(outputs))
    if named is None:
        named = {"prediction": outputs}
    columns = {str(name): _values(str(name), value) for name, value in named.items() if value is not None}
    if not columns:
        raise ConfigError("the model's outputs are empty: there is nothing to write")
    if "index" in columns:
        raise ConfigError('an output is named "index", which is the column of the sample\'s index; rename it')
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"the outputs of a batch must have one value per sample, but their lengths are {lengths}")
    return columns


def _values(name: str, value: Outputs) -> np.ndarray | list[Any]:
    if isinstance(value, torch.Tensor) and value.ndim:
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # numpy has no bfloat16
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if isinstance(value, list | tuple):
        return [item.tolist() if isinstance(item, torch.Tensor | np.ndarray | np.generic) else item for item in value]
    what = "single number" if isinstance(value, torch.Tensor | np.ndarray | float | int) else type(value).__name__
    raise ConfigError(f"the output {name!r} is a {what}, not a tensor or list with a value for each sample")


# ---------------------------------------------------------------------------- parts and formats


def _write_part(path: Path, batches: Iterable[_Columns]) -> int:
    """Write the batches of this rank one by one, and return their number of samples."""
    rows = 0
    with path.open("wb") as file:
        for columns in batches:
            pickle.dump(columns, file)  # read by this call's main rank only
            rows += len(next(iter(columns.values())))
    return rows


def _batches(parts: Iterable[Path]) -> Iterator[_Columns]:
    for path in parts:
        with path.open("rb") as file:
            while file.peek(1):
                yield pickle.load(file)


def _merge_lines(file: IO[bytes], batches: Iterable[_Columns]) -> None:
    """Write each sample's JSON object on a line."""
    index = 0
    for columns in batches:
        lists = [values.tolist() if isinstance(values, np.ndarray) else values for values in columns.values()]
        for row in zip(*lists, strict=True):
            file.write(f"{json.dumps({'index': index, **dict(zip(columns, row, strict=True))})}\n".encode())
            index += 1


def _merge_arrays(file: IO[bytes], batches: Iterable[_Columns]) -> None:
    """Write one array (N, ...) for each output."""
    of_batches = list(batches)
    names = of_batches[0].keys() if of_batches else ()
    arrays: dict[str, np.ndarray] = {}
    try:
        if any(columns.keys() != names for columns in of_batches):
            raise ValueError("the outputs differ in names between samples")
        for name in names:
            parts = [np.asarray(columns[name]) for columns in of_batches]
            arrays[name] = np.concatenate(parts)  # ValueError: sizes that differ
            if len({part.dtype.kind in "US" for part in parts}) > 1:
                raise ValueError(f"{name!r} is a text for some samples and a number for others")
            if arrays[name].dtype.hasobject:
                raise ValueError(f"{name!r} has Python objects")
            if name in ("file", "allow_pickle"):
                raise ValueError(f"{name!r} is an argument of numpy.savez")
    except ValueError as error:
        raise ConfigError(f"npz cannot hold the outputs: {error}; use jsonl") from error
    np.savez(file, **arrays)  # type: ignore[arg-type]


_MERGE: dict[str, Callable[[IO[bytes], Iterable[_Columns]], None]] = {"jsonl": _merge_lines, "npz": _merge_arrays}


# ---------------------------------------------------------------------------- the columns


def prediction_rows(
    pairs: Iterable[tuple[Batch, Outputs]], columns: Sequence[str], adapter: ModelAdapter, loader: object = None
) -> Iterator[_Columns]:
    """Yield what is written for each batch; see :func:`write_predictions`.

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
    names, files = class_names_of(loader), _files(loader)
    for batch, outputs in pairs:
        entries = batch if isinstance(batch, Mapping) else fields_of(batch)
        row: _Columns = {}
        for column in columns or ("prediction",):
            if column == "prediction":
                named = entries_of(outputs)
                row.update({"prediction": outputs} if named is None else named)
            elif column == "class" or (column == "class_name" and names):
                found = _probabilities(outputs, column).argmax(1)
                as_name = [names[one] if one < len(names) else str(one) for one in found.tolist()] if names else []
                row[column] = found if column == "class" else as_name
            elif column == "probability":
                row[column] = _probabilities(outputs, column).amax(1)
            elif column == "target":
                row[column] = adapter.targets(batch)
            elif column in entries:
                row[column] = entries[column]
            elif column == "file" and files is not None:
                row[column] = list(islice(files, batch_size_of(batch)))
            else:
                there = ", ".join(map(str, entries)) or "none"
                raise ConfigError(
                    f"TEST.PREDICTIONS_COLUMNS: {column!r} is not prediction, class, probability or target, not among "
                    f"the entries of the batch ({there}), and not class_name or file of a data set with these"
                )
        yield row


def _files(loader: object) -> Iterator[str] | None:
    """The file of each sample that a test loader reads, in order; None if its data set has no files."""
    dataset: Any = getattr(loader, "dataset", None)
    indices = getattr(getattr(loader, "batch_sampler", None), "sampler", ())
    while isinstance(dataset, Subset):
        dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
    files: Any = getattr(dataset, "files", getattr(dataset, "samples", None))  # torchvision's name
    if not isinstance(files, Sequence | np.ndarray):
        return None
    chosen = (files[index] for index in indices)
    return (str(one[0] if isinstance(one, tuple) else one) for one in chosen)


def _probabilities(outputs: Outputs, column: str) -> torch.Tensor:
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
