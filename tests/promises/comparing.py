"""Makes the files of runs comparable."""

import csv
import json
import os
import re
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


# Values that differ from run to run.
TIMINGS = (
    *("time", "data_time", "eta_seconds", "samples_per_s", "flops_per_s", "mfu"),
    *("eval_time", "eval_samples_per_s"),
)


def left_behind(run: Path, kept: str = r".*\.old") -> dict[str, Any]:
    """Return everything that a finished run left, by name, without timings.

    Args:
        kept: a pattern of files that a resume keeps of what was there before.

    Returns:
        Also ``state``, that of the trainer.
    """
    files = (name for name in os.listdir(run) if not re.fullmatch(rf"events\..*|log.*|{kept}", name))
    final, best = torch.load(run / "model_final.pth", weights_only=True), run / "model_best.pth"
    state, table = final["trainer"], run / "metrics.csv"
    return {
        "state": state,
        "weights": frozen(final["model"]),
        "optimizer": frozen(state["optimizer"]),
        "random numbers": frozen(state["rng"]),
        "averages": {key: frozen(hook) for key, hook in state["hooks"].items() if "averaged_model" in hook},
        "best weights": frozen(torch.load(best, weights_only=True)["model"]) if best.exists() else None,
        "last_checkpoint": (run / "last_checkpoint").read_text(),
        "rows": json_rows(run / "metrics.json", TIMINGS),
        "table": csv_rows(table, TIMINGS) if table.exists() else [],
        "tensorboard": tensorboard(run, TIMINGS),
        "files": sorted(files),
    }


def _untimed(row: dict[str, Any], timings: Container[str]) -> dict[str, Any]:
    return {name: None if name in timings else value for name, value in row.items() if value != ""}
