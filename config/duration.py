"""One type for every length and period: ``500``, ``"500it"``, ``"2ep"``, ``"30min"``."""

import re
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, cast

from .errors import ConfigError

FORMS = "an int (iterations), '500it', '2ep', '45s', '30min' or '2h'"
TIME_FORMS = "'45s', '30min' or '2h'"
LENGTH_FORMS = "an int (iterations), '500it' or '2ep'"

# Spelling: (unit, size in that unit).
SPELLINGS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("", "it", "iter", "iters", "iteration", "iterations"), ("it", 1)),
    **dict.fromkeys(("ep", "epoch", "epochs"), ("ep", 1)),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), ("s", 1)),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), ("s", 60)),
    **dict.fromkeys(("h", "hour", "hours"), ("s", 3600)),
}
# Device counters, and torch's deadlines in nanoseconds, are 64-bit integers.
_MOST_COUNTED = 2**63 - 1
_MOST_SECONDS = 10**9
_PATTERN = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True)
class Duration:
    """A length or a period, in iterations, epochs or seconds; 0 means never.

    Attributes:
        value: the number; whole for iterations.
        unit: ``"it"`` (iterations), ``"ep"`` (epochs) or ``"s"`` (seconds).
    """

    value: int | float
    unit: Literal["it", "ep", "s"] = "it"

    def __post_init__(self) -> None:
        most = _MOST_SECONDS if self.unit == "s" else _MOST_COUNTED
        is_number = isinstance(self.value, Real) and not isinstance(self.value, bool)
        if not is_number or not 0 <= self.value <= most:
            raise ConfigError(f"{self.value!r} is no number from 0, which means never, to {most}")
        # 500.0 and 500 iterations compare and print the same.
        value = int(self.value) if self.value == int(self.value) else float(self.value)
        if self.unit == "it" and isinstance(value, float):
            raise ConfigError(f"iterations must be a whole number, not {value!r}")
        object.__setattr__(self, "value", value)
        if value == 0:
            object.__setattr__(self, "unit", "it")

    @classmethod
    def parse(cls, x: object, forms: str = FORMS) -> "Duration":
        """Parse a duration.

        Args:
            x: an int (iterations), a string such as ``"500"``, ``"500it"``, ``"0.5ep"``, ``"45s"``, ``"30min"``,
                ``"1.5h"``, or a Duration. 0, None and ``""`` mean never.
            forms: the forms that the error lists.

        Returns:
            The duration.

        Raises:
            ConfigError: it is none of these; the message lists the forms.
        """
        if isinstance(x, Duration):
            return x
        number: Any
        match = _PATTERN.fullmatch(x or "0") if isinstance(x, str | None) else None
        number, spelling = (float(match[1].replace("_", "")), match[2].lower()) if match else (x, "")
        problem = f"{x!r} is not a duration; write {forms}"
        if (isinstance(x, str) and not match) or spelling not in SPELLINGS:
            raise ConfigError(problem)
        unit, scale = SPELLINGS[spelling]
        try:
            return cls(number * scale if match else number, cast(Literal["it", "ep", "s"], unit))
        except ConfigError as error:
            raise ConfigError(f"{problem} ({error})") from None

    @classmethod
    def parse_length(cls, x: object) -> "Duration":
        """Parse a duration in iterations or epochs, as :meth:`parse` without units of time.

        Args:
            x: as for :meth:`parse`.

        Returns:
            The duration, in iterations or epochs.

        Raises:
            ConfigError: it is not a duration, or a time.
        """
        duration = cls.parse(x, LENGTH_FORMS)
        if duration.unit == "s":
            raise ConfigError(f"{x!r} is a time; write {LENGTH_FORMS}. SOLVER.TIME_LIMIT stops a run after a time")
        return duration

    @staticmethod
    def fraction(x: object) -> float | None:
        """Return a fraction of the run, such as 0.1, also as a string; None for anything else."""
        try:
            part = float(x) if isinstance(x, str | float) else 0.0
        except ValueError:
            return None
        return part if 0 < part < 1 else None

    @classmethod
    def parse_part(cls, x: object) -> "Duration | float":
        """Parse a fraction of the run between 0 and 1, or a length as :meth:`parse_length` does.

        Raises:
            ConfigError: it is neither.
        """
        return cls.fraction(x) or cls.parse_length(x)

    @classmethod
    def parse_time(cls, x: object) -> "Duration":
        """Parse a time, as :meth:`parse` without iterations and epochs.

        Args:
            x: as for :meth:`parse`.

        Returns:
            The duration, in seconds; 0 has no unit.

        Raises:
            ConfigError: it is not a duration, or not a time.
        """
        duration = cls.parse(x, TIME_FORMS)
        if duration and duration.unit != "s":
            raise ConfigError(f"{x!r} is not a time; write {TIME_FORMS}")
        return duration

    @classmethod
    def parse_lengths(cls, values: object) -> "list[Duration]":
        """Parse a list or tuple of durations, each as :meth:`parse_length`.

        Raises:
            ConfigError: it is not a list of lengths.
        """
        if not isinstance(values, list | tuple):
            raise ConfigError(f"{values!r} is not a list; write lengths as (3000, 4000) or ('10ep', '15ep')")
        return [cls.parse_length(value) for value in values]

    def iterations(self, iters_per_epoch: int | None = None) -> int:
        """Convert to iterations.

        Args:
            iters_per_epoch: iterations in one epoch; None if unknown.

        Returns:
            The iterations; parts of an epoch are rounded, to at least one iteration.

        Raises:
            ConfigError: it is a time, or in epochs of unknown length.
        """
        if self.unit == "it":
            return int(self.value)
        if self.unit == "s":
            raise ConfigError(f"'{self}' is a time: it has no fixed number of iterations; write {LENGTH_FORMS}")
        if iters_per_epoch is None:
            raise ConfigError(
                f"'{self}': the length of an epoch of this data is unknown; use iterations, or set "
                "DATALOADER.ITERS_PER_EPOCH"
            )
        return max(1, round(self.value * iters_per_epoch))

    @property
    def seconds(self) -> int | float:
        """The time in seconds.

        Raises:
            ConfigError: it is not a time.
        """
        if self.unit != "s" and self:
            raise ConfigError(f"'{self}' is not a time; write '45s', '30min' or '2h'")
        return self.value

    def __bool__(self) -> bool:
        return self.value != 0

    def __str__(self) -> str:
        for size, suffix in ((3600, "h"), (60, "min")):
            if self.unit == "s" and self.value % size == 0:
                return f"{int(self.value) // size}{suffix}"
        return f"{self.value}{self.unit}"
