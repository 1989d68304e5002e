"""Makes the files of runs comparable."""

import csv
import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch


def frozen(value: Any) -> Any:
    """Copy a value so that it can be compared bit by bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    return value


def json_rows(path: Path, timings: Container[str]) -> list[dict[str, Any]]:
    """Return the rows of a metrics.json without the values of timings."""
    return [_untimed(json.loads(line), timings) for line in path.read_text().splitlines()]


def csv_rows(path: Path, timings: Container[str]) -> list[dict[str, Any]]:
    """Return the rows of a metrics.csv without empty cells and the values of timings."""
    with path.open() as file:
        return [_untimed(row, timings) for row in csv.DictReader(file)]


def tensorboard(folder: Path, timings: Container[str]) -> dict[tuple[str, str], Any]:
    """Return the steps and values that TensorBoard shows, by kind and name, without the values of timings."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not list(folder.glob("events.*")):
        return {}
    kinds = {"scalars": "value", "images": "encoded_image_string", "histograms": "histogram_value"}
    events = EventAccumulator(str(folder), size_guidance=dict.fromkeys(kinds, 0)).Reload()
    shown = {}
    for kind, value in kinds.items():
        for tag in events.Tags()[kind]:
            timing = tag.rpartition("/")[2] in timings
            found = getattr(events, kind.capitalize())(tag)
            shown[kind, tag] = [(event.step, None if timing else getattr(event, value)) for event in found]
    return shown


def _untimed(row: dict[str, Any], timings: Container[str]) -> dict[str, Any]:
    return {name: None if name in timings else value for name, value in row.items() if value != ""}
