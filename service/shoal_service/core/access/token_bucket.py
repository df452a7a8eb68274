"""A token bucket: how many requests one key may make, at a rate and in a burst. Pure: the time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    per_s: float
    burst: float


class TokenBuckets:
    """One bucket per key; the keys that were used last are kept. A key that was forgotten has a full bucket."""

    def __init__(self, rate: Rate, *, most_keys: int = 10_000) -> None:
        self._rate = rate
        self._most = most_keys
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, key: str, now_mono: float) -> float:
        """Takes one: 0. Or, if there is none, seconds until there is one again; then nothing is taken."""
        left, at = self._buckets.pop(key, (self._rate.burst, now_mono))
        left = min(self._rate.burst, left + max(0.0, now_mono - at) * self._rate.per_s)
        wait = 0.0 if left >= 1.0 else (1.0 - left) / self._rate.per_s
        self._buckets[key] = (left - 1.0 if not wait else left), now_mono
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return wait
