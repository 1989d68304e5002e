"""A table of a model's submodules and parameters."""

from torch import nn

__all__ = ["model_summary"]


def model_summary(model: nn.Module) -> str:
    """Return a table of the model's children with their numbers of parameters.

    The total counts shared parameters once.
    """
    rows = [(name, type(child).__name__, *_count(child)) for name, child in model.named_children()]
    rows.append(("total", type(model).__name__, *_count(model)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"  {n:<{widths[0]}}  {t:<{widths[1]}}  {c:>{widths[2]}}{note}" for n, t, c, note in rows)


def _count(module: nn.Module) -> tuple[str, str]:
    """Return the number of parameters, and a note if some are frozen."""
    parameters = list(module.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return f"{total:,}", "" if trained == total else f"  ({trained:,} trained)"
