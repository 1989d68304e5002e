"""Write a model's predictions for a data set to a file, in the order of the data set, on any number of ranks.

No rank holds more than a batch. Each rank writes its rows to a part beside the file; the main rank merges the parts.
"""

import codecs
import csv
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import Subset

from ...config import ConfigError
from ...config.files.atomic import replace_file, temporary_path
from ...config.values import one_of
from ...hooks.common import class_names_of, fields_of
from .. import comm
from ..data.loader import batch_size_of
from ..modeling.adapters import ModelAdapter, entries_of, without_loss

__all__ = ["prediction_rows", "write_predictions"]

_Columns = dict[str, Any]  # outputs of a batch by name: arrays or lists with one entry per sample


def write_predictions(outputs: Iterable[Any], folder: str, *, format: str = "jsonl") -> tuple[str, int]:
    """Write predictions atomically to ``<folder>/predictions.<format>``. All ranks call it.

    Args:
        outputs: outputs of this rank, batch by batch: a tensor (N, ...), a list of N values, or several of these in a
            dict, dataclass or named tuple. An output without a name is named "prediction".
        folder: shared by all machines.
        format: "jsonl" and "csv" have the column "index", the sample's index over all ranks. In "csv" an output of
            several numbers has the columns "name_0", "name_1", ... "npz" has one array (N, ...) per output.

    Returns:
        The file and its number of samples.

    Raises:
        ConfigError: the outputs are not a batch, or have different names or (for "csv" and "npz") different shapes.
    """
    one_of(*_MERGE)(format)
    path = os.path.join(folder, f"predictions.{format}")

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
            replace_file(path, lambda file: _MERGE[format](file, parts, sum(counts)))
        finally:
            for one in parts:
                one.unlink(missing_ok=True)

    comm.on_main_process(end)
    return path, sum(counts)


def _columns(outputs: Any) -> _Columns:
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


def _values(name: str, value: Any) -> Any:
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


def _lines(parts: Iterable[Path]) -> Iterator[str]:
    """Yield each sample's JSON object."""
    index = 0
    for columns in _batches(parts):
        lists = [values.tolist() if isinstance(values, np.ndarray) else values for values in columns.values()]
        for row in zip(*lists, strict=True):
            yield json.dumps({"index": index, **dict(zip(columns, row, strict=True))})
            index += 1


def _merge_lines(file: IO[bytes], parts: Sequence[Path], count: int) -> None:
    for line in _lines(parts):
        file.write(f"{line}\n".encode())


def _merge_table(file: IO[bytes], parts: Sequence[Path], count: int) -> None:
    # Text is quoted: Python 3.11 would not quote a carriage return, which readers take for the end of a row.
    table = csv.writer(codecs.getwriter("utf-8")(file), lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    header: list[str] = []
    for line in _lines(parts):
        cells = dict(_flat(json.loads(line), ""))
        if not header:
            header = list(cells)
            table.writerow(header)
        if list(cells) != header:
            raise ConfigError(
                f"sample {cells['index']} has the columns {list(cells)[1:9]}, the first one {header[1:9]}; use jsonl"
            )
        table.writerow(cells.values())


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(item, f"{name}_{key}" if name else str(key))
    else:
        yield name, value


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError as error:  # lists of other lengths
        raise ConfigError(f"npz cannot hold the output {name!r} ({error}); use jsonl") from error


def _merge_arrays(file: IO[bytes], parts: Sequence[Path], count: int) -> None:
    """Write one array (count, ...) for each output, batch by batch: :func:`numpy.savez` needs whole arrays."""
    first = {name: _array(name, values) for name, values in next(_batches(parts), {}).items()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, head in first.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                header = {"descr": np.lib.format.dtype_to_descr(head.dtype), "fortran_order": False}
                np.lib.format.write_array_header_1_0(entry, {**header, "shape": (count, *head.shape[1:])})
                for columns in _batches(parts):
                    array = _array(name, columns.get(name))
                    same = (array.dtype, array.shape[1:]) == (head.dtype, head.shape[1:])
                    if not same or array.dtype.hasobject or columns.keys() != first.keys():
                        raise ConfigError(
                            f"the output {name!r} has other types or sizes in some samples, or Python objects, or is "
                            "not the same in all batches: npz cannot hold it; use jsonl"
                        )
                    entry.write(array.tobytes())


_MERGE: dict[str, Callable[[IO[bytes], Sequence[Path], int], None]]
_MERGE = {"jsonl": _merge_lines, "csv": _merge_table, "npz": _merge_arrays}


# ---------------------------------------------------------------------------- the columns


def prediction_rows(
    pairs: Iterable[tuple[Any, Any]], columns: Sequence[str], adapter: ModelAdapter, loader: Any = None
) -> Iterator[Any]:
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
        row: dict[str, Any] = {}
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


def _files(loader: Any) -> Iterator[str] | None:
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
