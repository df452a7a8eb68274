"""Reads capacity traces: how many nodes are alive from when on.

    # at_h,nodes      hours since the start, the nodes alive from then on; `at_s` for seconds
    0.000,9
    0.181,16

With several clusters, each line is of one of them, and `away` in place of a number loses all of it until its next line:

    at_h,cluster,nodes
    0,east,4
    0,west,2
    1.5,west,away

The line that names the columns may be a comment. Of several lines with the same time the last one holds. Before the
first line (of a cluster) there are no nodes; after the last one nothing changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from shoal_service.simulator.capacity import AWAY, Capacity
from shoal_service.simulator.read_trace import TraceError
from shoal_workers.contract.placing import CLUSTER_PATTERN

_UNITS_S = {"at_h": 3600.0, "at_s": 1.0}


def read_capacity(path: Path, workers_per_node: int) -> Capacity:
    """Raises TraceError, and OSError if the file cannot be opened."""
    return parse_capacity(path.read_text(encoding="utf-8"), path.name, workers_per_node)


def parse_capacity(text: str, name: str, workers_per_node: int) -> Capacity:
    """`name` for messages. Raises TraceError."""
    unit_s: float | None = None
    has_clusters = False
    steps: dict[str, dict[float, int]] = {}
    latest = 0.0
    for number, line in enumerate(text.splitlines(), start=1):
        words = [word.strip() for word in line.lstrip("# ").split(",")]
        header = _UNITS_S.get(words[0])
        if header is not None and unit_s is None:
            unit_s, has_clusters = header, words[1:2] == ["cluster"]
            continue
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{name}, line {number}"
        if unit_s is None:
            raise TraceError(
                f"{where}: a line before this one must name the columns: at_h,nodes or at_h,cluster,nodes."
            )
        cluster = _cluster(words, where) if has_clusters else ""
        at_s, nodes = _step(words, unit_s, where, has_clusters=has_clusters)
        if at_s < latest:
            raise TraceError(f"{where}: the time {words[0]} is before that of the line above.")
        latest = at_s
        steps.setdefault(cluster, {0.0: 0})[at_s] = nodes
    if not steps:
        raise TraceError(f"{name} has no lines.")
    changes = {cluster: _changes(found) for cluster, found in steps.items()}
    return Capacity.of_clusters(changes, workers_per_node) if has_clusters else Capacity(workers_per_node, changes[""])


def _changes(steps: Mapping[float, int]) -> tuple[tuple[float, int], ...]:
    changes = list(steps.items())
    return tuple(step for before, step in zip([(0.0, None), *changes], changes, strict=False) if before[1] != step[1])


def _cluster(words: list[str], where: str) -> str:
    """Takes the name out of the words."""
    if len(words) != 3 or not re.match(CLUSTER_PATTERN, words[1]):
        raise TraceError(
            f"{where}: {','.join(words)!r} is not a time, the name of a cluster (lower-case letters, digits and -), "
            "and a number of nodes or away."
        )
    return words.pop(1)


def _step(words: list[str], unit_s: float, where: str, *, has_clusters: bool) -> tuple[float, int]:
    if len(words) != 2:
        raise TraceError(f"{where}: there are {len(words)} columns in place of 2, a time and a number of nodes.")
    is_away = has_clusters and words[1] == "away"
    try:
        at_s, nodes = float(words[0]) * unit_s, 0.0 if is_away else float(words[1])
    except ValueError:
        raise TraceError(f"{where}: {','.join(words)!r} is not a time and a number of nodes.") from None
    if not (0 <= at_s < math.inf and nodes >= 0 and nodes == int(nodes)):
        raise TraceError(f"{where}: {','.join(words)!r} needs a time and a whole number of nodes, both 0 or more.")
    return at_s, AWAY if is_away else int(nodes)
