"""Metrics as a table that any spreadsheet opens."""

import csv
import io
import os
from collections.abc import Sequence

from ..config.files import replace_file
from .events import Row
from .writers import WRITER_REGISTRY, RowWriter

__all__ = ["CSVWriter"]


@WRITER_REGISTRY.register()
class CSVWriter(RowWriter):
    """One line for each iteration with metrics, one column for each metric; empty where there is no value.

    When a new metric appears the file is written anew, in one go, with a column more.

    Args:
        csv_file: path of the file. Rows are appended to what is there.
        window_size: see :class:`RowWriter`.
        output_dir: the run's folder, used where ``csv_file`` is not given: ``metrics.csv`` in it.
    """

    def __init__(self, csv_file: str | None = None, window_size: int = 20, output_dir: str = ".") -> None:
        super().__init__(window_size)
        self._path = os.path.join(output_dir, "metrics.csv") if csv_file is None else csv_file
        self._columns: list[str] = []  # of the file, once it has been looked at

    def resume(self, start_iter: int) -> None:
        """Cut the rows from where this run goes on; one that starts from 0 keeps the file under a name in ``.old``."""
        super().resume(start_iter)
        self._columns = []
        if not os.path.isfile(self._path):
            return
        if start_iter == 0:
            os.replace(self._path, self._path + ".old")
            return
        header, rows = self._read()
        first = self._first_to_write(start_iter)
        self._replace(header, [row for row in rows if row["iteration"].isdigit() and int(row["iteration"]) < first])

    def write_rows(self, rows: Sequence[Row]) -> None:
        new = [{"iteration": str(iteration), **{n: repr(v) for n, v in values.items()}} for iteration, values in rows]
        added = sorted({name for row in new for name in row} - set(self._columns))
        if added:
            before = self._read() if os.path.isfile(self._path) else (["iteration"], [])
            columns = before[0] + [name for name in added if name not in before[0]]
            self._replace(columns, [*before[1], *new])
            self._columns = columns
            return
        with open(self._path, "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerows(new)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        with open(self._path, encoding="utf-8", errors="replace", newline="") as file:
            reader = csv.DictReader(file)
            rows = [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
            return list(reader.fieldnames or ["iteration"]), rows

    def _replace(self, columns: list[str], rows: Sequence[dict[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
        replace_file(self._path, lambda file: file.write(text.getvalue().encode()))
