"""Tables in CSV or Parquet files."""

import csv
import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ...config import ConfigError, suggest
from .datasets import DATASET_REGISTRY, ArrayDataset

__all__ = ["table"]

logger = logging.getLogger(__name__)

Columns = dict[str, list[Any]]


@DATASET_REGISTRY.register()
def table(
    path: str,
    target: str,
    task: Literal["classification", "regression"],
    features: Sequence[str] | None = None,
    categories: Sequence[str] = (),
    standardize: bool = True,
    like: str | None = None,
) -> ArrayDataset:
    """Rows of a CSV file with a header, or of a Parquet file (needs pyarrow), in memory.

    Args:
        path: the file, ".csv" or ".parquet".
        target: the column to predict.
        task: "classification": the target is the index of its value among all values, sorted. "regression": a number.
        features: the input columns, numbers. Default: all columns but ``target`` and ``categories``.
        categories: further input columns: one input per value, 1 for the row's value. A value that ``like`` does not
            have gives zeros.
        standardize: subtract the mean of each feature, and divide by its standard deviation.
        like: the file that gives classes, categories, means and deviations. For a test set, the training file. Default:
            ``path``.

    Returns:
        Inputs (N, inputs) float32, and targets: classes (N,) int64, or numbers (N, 1) float32.

    Raises:
        ConfigError: the file or a column does not exist, or a value is not a number; the message names its row.
    """
    columns = _read(path)
    known = columns if like is None else _read(like)
    for name in (target, *(features or ()), *categories):
        for file, found in ((path, columns), (like, known)):
            if name not in found:
                raise ConfigError(f"{file} has no column {name!r}{suggest(name, found)}")
    numeric = [name for name in known if name not in {target, *categories}] if features is None else list(features)
    inputs = []
    for name in numeric:
        values, reference = (_numbers(file, found, name) for file, found in ((path, columns), (like or path, known)))
        if standardize:
            std = reference.std(correction=0)
            values = (values - reference.mean()) / (std if std > 0 else 1.0)
        inputs.append(values)
    for name in categories:
        inputs += [_equal(columns[name], value) for value in _values(known[name])]
    if not inputs:
        raise ConfigError(f"{path}: there is no input column besides {target!r}")
    x = torch.stack(inputs, dim=1).float()
    if task == "regression":
        y = _numbers(path, columns, target).float().unsqueeze(1)
    else:
        y = _classes(path, columns[target], _values(known[target]))
    logger.debug("%s: %d rows, %d inputs, %s", path, len(x), x.shape[1], task)
    return ArrayDataset(x, y)


def _read(path: str) -> Columns:
    if path.endswith(".parquet"):
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise ConfigError("Parquet files need pyarrow: pip install 'hookline[tables]'") from error
        return dict(parquet.read_table(path).to_pydict())
    if not path.endswith(".csv"):
        raise ConfigError(f"{path} is neither a .csv nor a .parquet file")
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        columns: Columns = {name: [] for name in header}
        if not header or len(columns) != len(header):
            raise ConfigError(f"{path}: the first line has no names of columns, or one of them twice")
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise ConfigError(f"{path}, line {reader.line_num}: {len(row)} values for {len(header)} columns")
            for name, value in zip(header, row, strict=True):
                columns[name].append(value)
    if not columns[header[0]]:
        raise ConfigError(f"{path} has no rows")
    return columns


def _numbers(path: str, columns: Columns, name: str) -> torch.Tensor:
    numbers = []
    for row, value in enumerate(columns[name]):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            hint = "; a column of text is one of categories" if isinstance(value, str) and value else ""
            raise ConfigError(f"{path}, row {row}, column {name!r}: {value!r} is not a number{hint}")
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float64)


def _values(column: list[Any]) -> list[Any]:
    """The different values, sorted; as numbers if all are numbers."""
    try:
        return sorted(set(column), key=float)
    except (TypeError, ValueError):
        return sorted(set(column), key=str)


def _equal(column: list[Any], value: Any) -> torch.Tensor:
    return torch.tensor([one == value for one in column], dtype=torch.float64)


def _classes(path: str, column: list[Any], values: list[Any]) -> torch.Tensor:
    index = {value: i for i, value in enumerate(values)}
    for row, value in enumerate(column):
        if value not in index or value in ("", None):
            raise ConfigError(f"{path}, row {row}: the target {value!r} is not one of {', '.join(map(str, values))}")
    return torch.tensor([index[value] for value in column], dtype=torch.int64)
