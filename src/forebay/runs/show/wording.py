"""Numbers and foreign text as a person reads them, in one line and without control characters."""

import math
from collections.abc import Mapping, Sequence


def clean(text: str, limit: int | None = None) -> str:
    """One line of printable characters; the middle is left out where it is longer than `limit`."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(printable.split())
    if limit is None or len(line) <= limit:
        return line
    return f"{line[: limit // 2 - 2]} ... {line[-(limit // 2 - 3) :]}"


def number(value: float | None) -> str:
    """Three or four digits, in thousands (k) or millions (M) where that is shorter; ``-`` if unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.1f}M"
    if abs(value) >= 1e3:
        return f"{value / 1e3:.1f}k"
    # Shares and rewards have a thousandth worth seeing; lengths and seconds are larger or need less.
    return f"{value:.1f}" if abs(value) >= 2 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """``m:ss``, or ``3h07m``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}:{rest:02}"


def age(seconds: float) -> str:
    """How long something has been going on: ``4.2 s``, then ``m:ss``."""
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def percent(share: float) -> str:
    """``63%``, three characters wide before the sign."""
    return f"{100 * share:3.0f}%"


def mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """The mean of the rows' finite values of `name`; NaN without any."""
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    return sum(values) / len(values) if values else math.nan
