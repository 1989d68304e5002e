"""The report of a replayed step: text for the console, JSON, and the images of the batch."""

import json
import math
import os
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from ...config.files.atomic import replace_text

__all__ = ["report_text", "write_report"]

_SHOWN = 12  # rows of a table on the console


def write_report(report: Mapping[str, Any], images: torch.Tensor | None, folder: str) -> None:
    """Write ``report.json``, and with Pillow ``samples.png``, into a folder. JSON has null for NaN and infinity."""
    text = json.dumps(_finite(report), indent=1, allow_nan=False)
    replace_text(os.path.join(folder, "report.json"), text + "\n")
    if images is not None and find_spec("PIL"):
        write_images(images, os.path.join(folder, "samples.png"))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_text(report: Mapping[str, Any]) -> str:
    """Return the report as text for the console."""
    origin = f"checkpoint {report['checkpoint']}" if report["checkpoint"] else "the beginning"
    run = min(report["run"], os.path.relpath(report["run"]), key=len)
    lines = [f"Replayed iteration {report['iteration']} of {run}, from {origin}."]
    lines += _verdict(report)
    if "error" in report:
        error = [line for line in report["error"].splitlines() if line]
        lines.append(f"The step fails as in the run: {error[0]}")
        lines += [f"  {line}" for line in (*error[1:][-2:], *report["notes"])]  # in between is a worker's traceback
    for name, values in report["losses"].items():
        lines.append(f"{name}: {', '.join(f'{value:.9g}' for value in values)}")
    samples = report["samples"]
    if samples:
        each = report.get("losses_per_sample") or []
        rows = list(zip(samples, each, strict=True)) if len(each) == len(samples) else [(one, None) for one in samples]
        rows.sort(key=lambda row: (-row[0].get("nonfinite", 0), -_size(row[1])))
        lines.append(
            f"Samples of this rank ({len(samples)}){', highest loss first' if rows[0][1] is not None else ''}:"
        )
        for sample, loss in rows[:_SHOWN]:
            described = f"  {sample['is']}" if "is" in sample else ""
            if "nonfinite" in sample:
                described += f"  {sample['nonfinite']} values of its input are NaN or infinite"
            lines.append(f"  {sample['index']}" + ("" if loss is None else f"  loss {loss:.6g}") + described)
    elif "samples_unknown" in report:
        lines.append(f"Samples: not known ({report['samples_unknown']})")
    if report["first_nonfinite"]:
        where = report["first_nonfinite"]
        lines.append(f"First NaN or infinity: the {where['what']} of {where['module']} ({where['type']})")
    lines += _table("Modules", report["modules"])
    updates = report.get("updates", [])
    if updates:
        lines.append("Largest updates, relative to their weights:")
        lines += [f"  {row['ratio']:.3g}  {row['parameter']}" for row in updates[:_SHOWN]]
    return "\n".join(lines)


def _size(loss: float | None) -> float:
    return float("-inf") if loss is None else float("inf") if loss != loss else loss


def _verdict(report: Mapping[str, Any]) -> list[str]:
    compared = report["compared"]
    difference = compared["first_difference"]
    if difference is None:
        if compared["values"]:
            return [f"All {compared['values']} values on the way equal metrics.json to the bit."]
        return ["metrics.json has no rows on the way to compare with."]
    lines = [
        f"The replay differs from the run: at iteration {difference['iteration']} {difference['metric']} is "
        f"{difference['replay']!r}, and metrics.json has {difference['run']!r}."
    ]
    if report["overrides"]:
        lines.append(f"  other config: {' '.join(report['overrides'])}")
    if changes := report["config_changes"]:
        each = (f"{key} was {then} and is {now}" for key, (then, now) in changes.items())
        lines.append(f"  the run was resumed with another config: {', '.join(each)}")
        earlier = [f"{key} {shlex.quote(then)}" for key, (then, _) in changes.items() if then != "(not set)"]
        lines += [f"  with the earlier config: --set {' '.join(earlier)}"] if earlier else []
    there = report["environment"]
    if there["then"] != there["now"]:
        lines.append(f"  the run: {there['then']}\n  now: {there['now']}")
    return lines


def _table(title: str, entries: list[Mapping[str, Any]]) -> list[str]:
    rows = [entry for entry in entries if "output" in entry]
    if not rows:
        return []
    lines = [f"{title}, output and gradient (min, max, mean, norm, zeros, NaN, infinite):"]
    for entry in rows[: 4 * _SHOWN]:
        lines.append(f"  {entry['module']} ({entry['type']})")
        lines += [f"    {kind:<9}{_numbers(entry[kind])}" for kind in ("output", "gradient") if kind in entry]
    if len(rows) > 4 * _SHOWN:
        lines.append(f"  and {len(rows) - 4 * _SHOWN} more in report.json")
    return lines


def _numbers(values: Mapping[str, Any]) -> str:
    shown = [values[name] for name in ("min", "max", "mean", "norm")]
    text = "  ".join("-" if value is None else f"{value:.4g}" for value in shown)
    zeros = "-" if values["zeros"] is None else f"{values['zeros']:.0%}"
    return f"{text}  {zeros}  {values['nan']}  {values['inf']}"


def write_images(images: torch.Tensor, path: str) -> None:
    """Write images (N, 1 or 3, H, W) into one PNG, side by side in rows of 8, in the order of the batch.

    Finite values are scaled to the whole range; others are black.
    """
    from PIL import Image

    finite = images[images.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    scaled = ((images - low) / ((high - low) or 1.0) * 255).nan_to_num(0.0, 0.0, 0.0).clamp(0, 255).byte()
    rows = [torch.cat(list(row), dim=2) for row in scaled.split(8)]
    rows = [torch.nn.functional.pad(row, (0, rows[0].shape[2] - row.shape[2])) for row in rows]
    Image.fromarray(torch.cat(rows, dim=1).permute(1, 2, 0).squeeze(2).contiguous().numpy()).save(path, "PNG")
