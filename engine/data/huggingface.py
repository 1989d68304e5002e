"""Data sets of the package ``datasets``."""

import os
from collections.abc import Sequence
from typing import Any

from ...config import ConfigError, suggest
from .datasets import DATASET_REGISTRY

__all__ = ["HuggingFaceDataset"]


@DATASET_REGISTRY.register()
def HuggingFaceDataset(  # named like the data set that it returns
    path: str,
    split: str | None = None,
    name: str | None = None,
    columns: Sequence[str] | None = None,
    data_files: Any = None,
    streaming: bool = False,
) -> Any:
    """A data set of Hugging Face's ``datasets``, which must be installed. Samples are dicts of tensors.

    Args:
        path: a folder written by ``save_to_disk()``; or a name on the Hub, or "csv", "json", "parquet", "text" with
            ``data_files``: what ``load_dataset()`` takes.
        split: such as "train" or "train[:10%]". Not for folders that hold one data set.
        name: the configuration of a data set on the Hub.
        columns: the columns of a sample. Default: all.
        data_files: see ``path``.
        streaming: read samples while training, without random access. The position is saved with checkpoints.

    Raises:
        ConfigError: there is no such data set, split or column; or the package is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("HuggingFaceDataset needs datasets: pip install 'hookline[huggingface]'") from error
    saved = [file for file in ("dataset_info.json", "dataset_dict.json") if os.path.isfile(os.path.join(path, file))]
    try:
        if saved:
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, name, data_files=data_files, split=split, streaming=streaming)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"{type(error).__name__}: {error}") from error
    if isinstance(found, dict):
        if split not in found:
            hint = suggest(split or "", found)
            raise ConfigError(f"split: {path} has the splits {', '.join(found)}, not {split!r}{hint}")
        found = found[split]
    for column in columns or ():
        if found.column_names and column not in found.column_names:
            raise ConfigError(
                f"columns: there is no column {column!r} among {', '.join(found.column_names)}"
                f"{suggest(column, found.column_names)}"
            )
    if columns is not None:
        found = found.select_columns(list(columns))
    found = found.with_format("torch")
    if not streaming:
        found.deterministic = True
    return found
