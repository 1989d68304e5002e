"""Write a model's predictions for a data set to a file, in the order of the data set, on any number of ranks.

No rank holds more than a batch. Each rank writes its rows to a part beside the file; the main rank merges the parts.
"""

import codecs
import csv
import dataclasses
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from ...config import ConfigError, suggest
from ...config.files.atomic import remove_leftovers, replace_file, temporary_path
from ...config.files.run_folder import claim
from .. import comm
from ..data.iterate import whole_pass
from ..data.transfer import move_to_device
from ..modeling.outputs import without_loss
from .evaluator import inference_context
from .lockstep import counted

__all__ = ["FORMATS", "check_format", "outputs_of", "predict_dataset", "write_predictions"]

FORMATS = ("jsonl", "csv", "npz")
"""JSON lines, one per sample; a table; or one array per output for ``numpy.load``."""

_ROWS = "rows.txt"  # of a part

Columns = dict[str, Any]
"""Outputs of a batch by name: arrays or lists with one entry per sample."""


def check_format(format: str, key: str = "format") -> None:
    """Raise ConfigError unless ``format`` is in :data:`FORMATS`."""
    if format not in FORMATS:
        raise ConfigError(
            f"{key}: unknown format {format!r}, not one of {', '.join(FORMATS)}{suggest(format, FORMATS)}"
        )


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
        folder: shared by all machines.
        format: one of :data:`FORMATS`.
        predict: ``predict(model, batch)``. Default: ``model(batch)``.
        device: device for the batches; None does not move them.

    Returns:
        The file and its number of samples.

    Raises:
        ConfigError: as for :func:`write_predictions`.
    """
    return write_predictions(outputs_of(model, data_loader, predict, device), folder, format=format)


def outputs_of(
    model: Any,
    data_loader: Iterable[Any],
    predict: Callable[[Any, Any], Any] | None = None,
    device: torch.device | str | None = None,
) -> Iterator[Any]:
    """Yield the predictions for each batch, without gradients; see :func:`predict_dataset`.

    Consume all of them: with a sharded model (FSDP2) each batch needs all ranks. If ranks share a batch, only the first
    yields it.
    """
    # The caller may change the model's mode between batches, so it is set for each.
    own = whole_pass(data_loader)
    for batch, counts in counted(model, own):
        if device is not None:
            batch = move_to_device(batch, device)
        with inference_context(model), torch.no_grad():
            outputs = model(batch) if predict is None else predict(model, batch)
        if counts:
            yield outputs


def write_predictions(outputs: Iterable[Any], folder: str, *, format: str = "jsonl") -> tuple[str, int]:
    """Write predictions atomically to ``<folder>/predictions.<format>``. All ranks call it.

    Args:
        outputs: outputs of this rank, batch by batch: a tensor (N, ...), a list of N values, or several of these in a
            dict, dataclass or named tuple. An output without a name is named "prediction".
        folder: see :func:`predict_dataset`.
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
    part = _part(base, comm.get_rank())
    os.makedirs(part)
    write, merge = _FORMATS[format]
    try:
        rows = write(Path(part), map(_columns, outputs))
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    counts: list[int] = comm.all_gather(rows)  # all parts are written
    parts = [Path(_part(base, rank)) for rank in range(len(counts))]

    def end() -> None:
        for rank, one in enumerate(parts):
            if not one.is_dir():
                raise ConfigError(f"{one} of rank {rank} is not here: {folder} must be one folder of all machines")
        try:
            replace_file(path, lambda file: merge(file, parts, counts))
        finally:
            for one in parts:
                shutil.rmtree(one)

    comm.on_main_process(end)
    return path, sum(counts)


def _part(base: str, rank: int) -> str:
    return f"{base}.part{rank}"


# ---------------------------------------------------------------------------- writing a part: a folder


def _write_lines(folder: Path, batches: Iterable[Columns]) -> int:
    """Write a JSON object for each sample, and return their number."""
    rows = 0
    with (folder / _ROWS).open("w", encoding="utf-8") as file:
        for columns in batches:
            lists = [values.tolist() if isinstance(values, np.ndarray) else values for values in columns.values()]
            for row in zip(*lists, strict=True):
                try:
                    file.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")
                except TypeError as error:
                    raise ConfigError(f"a prediction cannot be written as JSON ({error})") from error
                rows += 1
    return rows


def _write_arrays(folder: Path, batches: Iterable[Columns]) -> int:
    """Write the bytes of each output to a file, and their types to ``columns.json``. Return the number of samples."""
    rows = 0
    kinds: dict[str, tuple[str, list[int]]] = {}
    with ExitStack() as files:
        opened: dict[str, IO[bytes]] = {}
        for columns in batches:
            for index, (name, values) in enumerate(columns.items()):
                array = np.ascontiguousarray(values)
                if array.dtype.hasobject:
                    raise ConfigError(
                        f"the output {name!r} is not of numbers of one shape: npz cannot hold it; use jsonl"
                    )
                kind = array.dtype.str, list(array.shape[1:])
                if name not in kinds:
                    kinds[name] = kind
                    opened[name] = files.enter_context((folder / f"{index}.bin").open("wb"))
                _same_kind(name, kinds[name], kind)
                opened[name].write(array.data)
            if columns.keys() != kinds.keys():
                raise ConfigError(f"a batch has the outputs {list(columns)}, one before had {list(kinds)}")
            rows += len(array)
    (folder / "columns.json").write_text(json.dumps(kinds), encoding="utf-8")
    return rows


def _same_kind(name: str, kind: Any, other: Any) -> None:
    if list(kind) != list(other):
        raise ConfigError(
            f"the output {name!r} is {kind[0]} of shape {kind[1]} for one sample, and {other[0]} of {other[1]} for "
            "another: npz cannot hold it; use jsonl"
        )


def _columns(outputs: Any) -> Columns:
    outputs = without_loss(outputs)
    if isinstance(outputs, Mapping):
        named: Mapping[str, Any] = outputs
    elif dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        named = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    elif isinstance(outputs, tuple) and hasattr(outputs, "_asdict"):
        named = outputs._asdict()
    else:
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


# ---------------------------------------------------------------------------- merging the parts


def _merge_lines(file: IO[bytes], parts: list[Path], counts: list[int]) -> None:
    index = 0
    for part in parts:
        with (part / _ROWS).open("rb") as rows:
            for line in rows:
                file.write(b'{"index": %d, ' % index + line[1:])
                index += 1


def _merge_table(file: IO[bytes], parts: list[Path], counts: list[int]) -> None:
    header: list[str] = []
    text = codecs.getwriter("utf-8")(file)
    plain = csv.writer(text, lineterminator="\n").writerow
    # Python 3.11 does not quote a carriage return, which readers take for the end of a row.
    quoted = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).writerow
    index = 0
    for part in parts:
        with (part / _ROWS).open("rb") as rows:
            for line in rows:
                cells = {"index": index, **dict(_flat(json.loads(line), ""))}
                if not header:
                    header = list(cells)
                    plain(header)
                if list(cells) != header:
                    raise ConfigError(
                        f"sample {index} has the columns {list(cells)[1:9]}, and the first one {header[1:9]}; use jsonl"
                    )
                row = list(cells.values())
                (quoted if any(type(cell) is str and "\r" in cell for cell in row) else plain)(row)
                index += 1


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(item, f"{name}_{key}" if name else str(key))
    else:
        yield name, value


def _merge_arrays(file: IO[bytes], parts: list[Path], counts: list[int]) -> None:
    kinds: dict[str, Any] = {}
    holders = []
    for part in parts:
        own = json.loads((part / "columns.json").read_text(encoding="utf-8"))
        if not own:
            continue
        for name, kind in own.items():
            _same_kind(name, kinds.setdefault(name, kind), kind)
        if own.keys() != kinds.keys():
            raise ConfigError(f"one rank has the outputs {list(own)}, another one {list(kinds)}")
        holders.append((part, list(own)))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, (dtype, shape) in kinds.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                header = {"descr": dtype, "fortran_order": False, "shape": (sum(counts), *shape)}
                np.lib.format.write_array_header_1_0(entry, header)
                for part, names in holders:
                    with (part / f"{names.index(name)}.bin").open("rb") as column:
                        shutil.copyfileobj(column, entry, 1 << 22)


_FORMATS: dict[str, tuple[Callable[[Path, Iterable[Columns]], int], Callable[[IO[bytes], list[Path], list[int]], None]]]
_FORMATS = {
    "jsonl": (_write_lines, _merge_lines),
    "csv": (_write_lines, _merge_table),
    "npz": (_write_arrays, _merge_arrays),
}
