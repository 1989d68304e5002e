"""Scalars that were put and not read yet: conversion, and the copy from their devices."""

from typing import Any

import torch

__all__ = ["Series", "as_scalar", "by_name", "fetch_tensors"]

Pending = list[tuple[int, dict[str, Any], bool]]
"""(iteration, values by name, smoothing hint), in the order they were put."""

Series = dict[str, tuple[list[float], list[int], bool]]
"""Values, iterations and smoothing hint, by name."""


def as_scalar(name: str, value: Any) -> Any:
    """Return a float, or for a tensor on a device a copy of it that later in-place changes do not affect.

    Raises:
        TypeError: ``value`` is not one number.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(f"metric {name!r} must be one number, not a tensor of shape {tuple(value.shape)}")
        return value.item() if value.device.type == "cpu" else value.detach().clone().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} must be a number or a tensor with one element, not {value!r}") from error


def fetch_tensors(pending: Pending) -> None:
    """Replace tensors by floats, with one stack and one copy for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str]]] = {}
    for _, values, _ in pending:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                groups.setdefault((value.device, value.dtype), []).append((values, name))
    for places in groups.values():
        numbers = torch.stack([values[name] for values, name in places]).tolist()
        for (values, name), number in zip(places, numbers, strict=True):
            values[name] = float(number)


def by_name(pending: Pending) -> Series:
    """Return the values of each metric. A metric's first smoothing hint counts."""
    series: Series = {}
    for iteration, values, smoothing_hint in pending:
        for name, value in values.items():
            new = series.get(name)
            if new is None:
                new = series[name] = ([], [], smoothing_hint)
            new[0].append(value)
            new[1].append(iteration)
    return series
