"""Numbers as one line of block characters. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters, oldest value first; each is the mean of its share of the values.

    Values that are not finite are left out; otherwise one NaN would flatten the whole line.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    scale = max(map(abs, finite)) or 1.0  # without it, sums and differences of the largest floats would be infinite
    columns = bucket_means([value / scale for value in finite], width)
    low, high = min(columns), max(columns)
    if high == low:
        return _BLOCKS[0] * len(columns)
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in columns)


def bucket_means(values: Sequence[float], num_buckets: int) -> list[float]:
    """Means of `num_buckets` contiguous, nearly equal shares of the values; fewer when there are fewer values."""
    count = min(num_buckets, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def worker_bar(workers: int, desired: int) -> str:
    """The world size as a bar: one filled square per worker that trains, one hollow square per missing worker."""
    shown = max(workers, desired)
    if shown > 16:
        return f"{workers}/{shown}"
    return f"{'■' * workers}{'□' * (shown - workers)} {workers}/{shown}"
