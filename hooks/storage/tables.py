"""Metrics as a table of pandas."""

from typing import Any

from ...config import ConfigError
from .history_buffer import HistoryBuffer

__all__ = ["Tables"]


class Tables:
    """Gives an :class:`~hookline.hooks.EventStorage` its tables."""

    def histories(self, prefix: str = "") -> dict[str, HistoryBuffer]:
        """Return the recent values of metrics, by name."""
        raise NotImplementedError

    def to_pandas(self, prefix: str = "") -> Any:
        """Return the kept values of all metrics, or of those whose name begins with ``prefix``, as a DataFrame.

        Values are as they were put, not smoothed. The index is the iteration; NaN where a metric has no value.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError(
                "to_pandas() needs the package pandas: pip install pandas. Without it: "
                "iterations, values = storage.history(name).arrays()"
            ) from None
        columns = {}
        for name, history in self.histories(prefix).items():
            column = pandas.Series(history.arrays()[1], index=history.arrays()[0], name=name)
            columns[name] = column[~column.index.duplicated(keep="last")]
        return pandas.DataFrame(columns).sort_index().rename_axis("iteration")
