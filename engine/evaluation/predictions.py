"""Write a model's predictions for a data set to a file, in the order of the data set, on any number of ranks.

No rank holds more than a batch. Each rank writes its rows to a part beside the file; the main rank merges the parts.
"""

import codecs
import csv
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from ...config import ConfigError
from ...config.files.atomic import remove_leftovers, replace_file, temporary_path
from ...config.files.run_folder import claim
from ...hooks.common.tensors import class_names_of, samples_in
from .. import comm
from ..modeling.adapters import ModelAdapter
from ..modeling.outputs import entries_of, without_loss
from .build import check_format
from .evaluator import outputs_of

__all__ = ["predict_dataset", "prediction_rows", "write_predictions"]

_Columns = dict[str, Any]  # outputs of a batch by name: arrays or lists with one entry per sample


def predict_dataset(
    model: nn.Module | Callable[[Any], Any],
    data_loader: Iterable[Any],
    folder: str,
    *,
    format: str = "jsonl",
    predict: Callable[[Any, Any], Any] | None = None,
    device: torch.device | str | None = None,
) -> tuple[str, int]:
    """Run a model over a data set and write its predictions to ``<folder>/predictions.<format>``.

    Args:
        model: a module (put into eval mode), or any callable.
        data_loader: batches of this rank, a contiguous part of the data set as from ``build_test_loader``.
        folder, format: see :func:`write_predictions`.
        predict: ``predict(model, batch)``. Default: ``model(batch)``.
        device: device for the batches; None does not move them.

    Returns:
        The file and its number of samples.

    Raises:
        ConfigError: as for :func:`write_predictions`.
    """
    return write_predictions(outputs_of(model, data_loader, predict, device), folder, format=format)


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
    check_format(format)
    path = os.path.join(folder, f"predictions.{format}")

    def begin() -> str:
        claim(path)
        os.makedirs(folder, exist_ok=True)
        remove_leftovers(folder)
        return temporary_path(path)

    base = comm.on_main_process(begin)
    part = Path(f"{base}.part{comm.get_rank()}")
    part.mkdir()
    write, merge = _FORMATS[format]
    try:
        rows = write(part, map(_columns, outputs))
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    counts: list[int] = comm.all_gather(rows)  # all parts are written
    parts = [Path(f"{base}.part{rank}") for rank in range(len(counts))]

    def end() -> None:
        for rank, one in enumerate(parts):
            if not one.is_dir():
                raise ConfigError(f"{one} of rank {rank} is not here: {folder} must be one folder of all machines")
        try:
            replace_file(path, lambda file: merge(file, parts, sum(counts)))
        finally:
            for one in parts:
                shutil.rmtree(one)

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


# ---------------------------------------------------------------------------- JSON lines and tables


def _write_lines(part: Path, batches: Iterable[_Columns]) -> int:
    """Write a JSON object for each sample, and return their number."""
    rows = 0
    with (part / "rows.txt").open("w", encoding="utf-8") as file:
        for columns in batches:
            lists = [values.tolist() if isinstance(values, np.ndarray) else values for values in columns.values()]
            for row in zip(*lists, strict=True):
                try:
                    file.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")
                except TypeError as error:
                    raise ConfigError(f"a prediction cannot be written as JSON ({error})") from error
                rows += 1
    return rows


def _lines(parts: Iterable[Path]) -> Iterator[tuple[int, bytes]]:
    index = 0
    for part in parts:
        with (part / "rows.txt").open("rb") as rows:
            for line in rows:
                yield index, line
                index += 1


def _merge_lines(file: IO[bytes], parts: Sequence[Path], count: int) -> None:
    for index, line in _lines(parts):
        file.write(b'{"index": %d, ' % index + line[1:])


def _merge_table(file: IO[bytes], parts: Sequence[Path], count: int) -> None:
    # Text is quoted: Python 3.11 would not quote a carriage return, which readers take for the end of a row.
    table = csv.writer(codecs.getwriter("utf-8")(file), lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    header: list[str] = []
    for index, line in _lines(parts):
        cells = {"index": index, **dict(_flat(json.loads(line), ""))}
        if not header:
            header = list(cells)
            table.writerow(header)
        if list(cells) != header:
            raise ConfigError(
                f"sample {index} has the columns {list(cells)[1:9]}, and the first one {header[1:9]}; use jsonl"
            )
        table.writerow(cells.values())


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(item, f"{name}_{key}" if name else str(key))
    else:
        yield name, value


# ---------------------------------------------------------------------------- arrays


def _write_arrays(part: Path, batches: Iterable[_Columns]) -> int:
    """Write the arrays of each output one after the other to a file, and return the number of samples."""
    rows, names = 0, None
    with ExitStack() as stack:
        for columns in batches:
            if names is None:
                names = list(columns)
                files = [stack.enter_context((part / str(number)).open("wb")) for number in range(len(names))]
            if list(columns) != names:
                raise ConfigError(f"a batch has the outputs {list(columns)}, one before had {names}")
            for file, (name, values) in zip(files, columns.items(), strict=True):
                try:
                    np.save(file, np.asarray(values), allow_pickle=False)
                except ValueError as error:
                    raise ConfigError(f"npz cannot hold the output {name!r} ({error}); use jsonl") from error
            rows += len(values)
    (part / "names.json").write_text(json.dumps(names or []), encoding="utf-8")
    return rows


def _merge_arrays(file: IO[bytes], parts: Sequence[Path], count: int) -> None:
    named = [(part, json.loads((part / "names.json").read_text(encoding="utf-8"))) for part in parts]
    named = [(part, names) for part, names in named if names]  # without the ranks that have no samples
    for _, names in named:
        if sorted(names) != sorted(named[0][1]):
            raise ConfigError(f"one rank has the outputs {names}, another one {named[0][1]}")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in named[0][1] if named else ():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                kind: Any = None
                for array in _arrays(part / str(names.index(name)) for part, names in named):
                    own = np.lib.format.dtype_to_descr(array.dtype), array.shape[1:]
                    if kind is None:
                        kind = own
                        header = {"descr": own[0], "fortran_order": False, "shape": (count, *own[1])}
                        np.lib.format.write_array_header_1_0(entry, header)
                    if own != kind:
                        raise ConfigError(
                            f"the output {name!r} is {kind[0]} of shape {list(kind[1])} for one sample, and {own[0]} "
                            f"of {list(own[1])} for another: npz cannot hold it; use jsonl"
                        )
                    entry.write(array.tobytes())


def _arrays(files: Iterable[Path]) -> Iterator[np.ndarray]:
    for path in files:
        with path.open("rb") as file:
            while file.peek(1):
                yield np.load(file, allow_pickle=False)


_FORMATS: dict[str, tuple[Callable[[Path, Iterable[_Columns]], int], Callable[[IO[bytes], Sequence[Path], int], None]]]
_FORMATS = {
    "jsonl": (_write_lines, _merge_lines),
    "csv": (_write_lines, _merge_table),
    "npz": (_write_arrays, _merge_arrays),
}


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
                there = f"has {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "is no dict"
                raise ConfigError(
                    f"TEST.PREDICTIONS_COLUMNS: {column!r} is not prediction, class, probability or target, not an "
                    f"entry of the batch, which {there}, and not class_name or file of a data set with classes or files"
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
