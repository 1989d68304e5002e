"""What a part of ``hookline benchmark gpu`` reports, from its own process."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Report", "Row", "Skip", "first_line"]


class Skip(Exception):
    """This check cannot run here; the message says why."""


@dataclass
class Row:
    """One line of a table.

    Attributes:
        what: what was checked or measured.
        result: "passed", "failed" or "skipped".
        reason: why it failed or was skipped.
        numbers: what was measured, by the name of the column.
    """

    what: str
    result: str = "passed"
    reason: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


class Report:
    """Sends each row when it is known, so that rows of a part that hangs later are not lost.

    Args:
        send: receives the rows.
        device: "cuda", or "cpu" for a trial of this code with tiny models.

    Attributes:
        device: the device.
        cuda: whether it is a GPU.
    """

    def __init__(self, send: Callable[[Row], None], device: str) -> None:
        self.device, self.cuda = device, device == "cuda"
        self._send = send
        self._folders = 0

    def passed(self, what: str, **numbers: Any) -> None:
        """Report what was measured."""
        self._send(Row(what, numbers=numbers))

    @contextmanager
    def attempt(self, what: str, report_success: bool = True) -> Iterator[dict[str, Any]]:
        """Report whether the block fails, and the numbers that it puts into the dict. Later blocks run in any case."""
        row = Row(what)
        try:
            yield row.numbers
        except (Skip, torch.cuda.OutOfMemoryError) as error:
            row.result, row.reason = "skipped", first_line(error)
        except Exception as error:
            traceback.print_exc()
            row.result, row.reason = "failed", first_line(error)
        if report_success or row.result != "passed":
            self._send(row)

    def needs_cuda(self, why: str) -> None:
        """Skip this check on the CPU."""
        if not self.cuda:
            raise Skip(why)

    def half(self) -> str:
        """The type for mixed precision: "bfloat16", or "" where the GPU has none."""
        has_it = not self.cuda or torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if has_it else ""

    def folder(self) -> str:
        """A new folder, in the current one, for a run."""
        self._folders += 1
        return os.path.abspath(f"run{self._folders}")


def first_line(error: BaseException) -> str:
    """The type and the first line of an error, and where it was raised."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, Skip):
        return text
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {text} ({os.path.basename(last.filename)}:{last.lineno})"
