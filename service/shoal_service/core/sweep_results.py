"""What a sweep has found: the best value so far, and how much each of its parameters matters. Pure.

The influence of a parameter is epsilon squared (Kelley 1935): the share of the variance of the losses' ranks that lies
between its values, less what chance alone gives to so many groups. Ranks, so that a diverged job weighs no more than a
bad one; groups, so that a rate with its best value in the middle counts, which a correlation misses. Numbers with many
values are cut into about sqrt(n) groups of equal size. The direction is Spearman's rank correlation, for numbers alone.

Each parameter is judged alone: an effect of two together is not seen (docs/decisions/0079-conditions-and-sweeps.md).
store/sweep_curves.py calls it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

LEAST_JOBS = 4


@dataclass(frozen=True, slots=True)
class Influence:
    """How much one parameter matters."""

    label: str
    share: float
    """0: as if its values were given at random; 1: it alone decides the order of the jobs."""
    direction: float | None
    """-1: larger values have lower losses; 1: higher ones. None if the values are no numbers."""
    num_values: int
    num_jobs: int


def best_so_far(points: Iterable[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Those (time, value, job id) that are lower than every one before them in time."""
    scores: list[tuple[float, float, str]] = []
    for point in sorted(points):
        if math.isfinite(point[1]) and (not scores or point[1] < scores[-1][1]):
            scores.append(point)
    return scores


def influences(labels: Mapping[str, Mapping[str, str]], losses: Mapping[str, float]) -> list[Influence]:
    """The influence of each label that differs between the jobs, the largest first. Both by job id; a loss that is not
    a number is worse than every number. A label is left out if there are too few jobs to judge it."""
    known = [job_id for job_id in labels if job_id in losses]
    influences_found = []
    for name in sorted({name for job_id in known for name in labels[job_id]}):
        jobs = [job_id for job_id in known if name in labels[job_id]]
        values = [labels[job_id][name] for job_id in jobs]
        ranks = _ranks([math.inf if math.isnan(losses[job_id]) else losses[job_id] for job_id in jobs])
        numbers = _numbers(values)
        groups = _groups(values, numbers)
        share = _share(groups, ranks)
        if len(jobs) >= LEAST_JOBS and len(set(values)) > 1 and share is not None:
            direction = None if numbers is None else _correlation(_ranks(numbers), ranks)
            influences_found.append(Influence(name, share, direction, len(set(values)), len(jobs)))
    return sorted(influences_found, key=lambda influence: -influence.share)


def _numbers(values: Sequence[str]) -> list[float] | None:
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def _groups(values: Sequence[str], numbers: Sequence[float] | None) -> list[int]:
    """The number of the group of each job. Equal values are always in one group."""
    most = max(2, math.isqrt(len(values)))
    different = sorted(set(values))
    if numbers is None or len(different) <= most:
        return [different.index(value) for value in values]
    return [min(most - 1, int((rank - 0.5) * most / len(values))) for rank in _ranks(numbers)]


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1 on; equal values share the mean of their ranks."""
    positions = [0.0] * len(values)
    first = 1
    for _, same in groupby(sorted(range(len(values)), key=values.__getitem__), key=values.__getitem__):
        places = list(same)
        for place in places:
            positions[place] = first + (len(places) - 1) / 2
        first += len(places)
    return positions


def _share(groups: Sequence[int], ranks: Sequence[float]) -> float | None:
    """Epsilon squared, at least 0. None if there are as many groups as jobs, or all ranks are equal."""
    by_group: dict[int, list[float]] = defaultdict(list)
    for group, rank in zip(groups, ranks, strict=True):
        by_group[group].append(rank)
    spare = len(ranks) - len(by_group)
    mean = sum(ranks) / len(ranks)
    total = sum((rank - mean) ** 2 for rank in ranks)
    if spare < 1 or total == 0:
        return None
    between = sum(len(members) * (sum(members) / len(members) - mean) ** 2 for members in by_group.values())
    return max(0.0, (between - (len(by_group) - 1) * (total - between) / spare) / total)


def _correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    mean = (len(left) + 1) / 2  # of both: they are ranks
    spread = math.sqrt(sum((value - mean) ** 2 for value in left) * sum((value - mean) ** 2 for value in right))
    together = sum((value - mean) * (other - mean) for value, other in zip(left, right, strict=True))
    return together / spread if spread else None
