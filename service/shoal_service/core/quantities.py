"""Durations and sizes as short text, for the words of events and the pages of the command line. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def duration_text(seconds: object) -> str:
    """`20 ms`, `1.3 s`, `42 s`, `3 min 20 s`, `2 h 05 min`; "?" for None and everything else that is no duration."""
    if not isinstance(seconds, int | float) or not seconds >= 0:
        return "?"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def size_text(num_bytes: float) -> str:
    """Binary units: `12.5 MiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0, 2`."""
    ranks = sorted(ranks)
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"


def count_text(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`, `2 processes`."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def range_text(least: int, most: int) -> str:
    """`4` if both are 4, else `1 to 4`."""
    return str(most) if least == most else f"{least} to {most}"
