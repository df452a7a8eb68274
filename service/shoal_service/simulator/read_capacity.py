"""Reads capacity traces: how many nodes are alive from when on.

    # at_h,nodes      hours since the start, the nodes alive from then on; `at_s` for seconds
    0.000,9
    0.181,16

The line that names the columns may be a comment. Of several lines with the same time the last one holds. Before the
first line there are no nodes; after the last one nothing changes.
"""

from __future__ import annotations

import math
from pathlib import Path

from shoal_service.simulator.capacity import Capacity
from shoal_service.simulator.read_trace import TraceError

_UNITS_S = {"at_h": 3600.0, "at_s": 1.0}


def read_capacity(path: Path, workers_per_node: int) -> Capacity:
    """Raises TraceError, and OSError if the file cannot be opened."""
    return parse_capacity(path.read_text(encoding="utf-8"), path.name, workers_per_node)


def parse_capacity(text: str, name: str, workers_per_node: int) -> Capacity:
    """`name` for messages. Raises TraceError."""
    unit_s: float | None = None
    steps: dict[float, int] = {0.0: 0}
    latest = 0.0
    num_steps = 0
    for number, line in enumerate(text.splitlines(), start=1):
        words = [word.strip() for word in line.lstrip("# ").split(",")]
        header = _UNITS_S.get(words[0])
        if header is not None and unit_s is None:
            unit_s = header
            continue
        if not line.strip() or line.startswith("#"):
            continue
        if unit_s is None:
            raise TraceError(f"{name}, line {number}: a line before this one must name the columns: at_h,nodes.")
        at_s, nodes = _step(words, unit_s, f"{name}, line {number}")
        if at_s < latest:
            raise TraceError(f"{name}, line {number}: the time {words[0]} is before that of the line above.")
        latest = at_s
        steps[at_s] = nodes
        num_steps += 1
    if not num_steps:
        raise TraceError(f"{name} has no lines.")
    changes = list(steps.items())
    kept = [step for before, step in zip([(0.0, -1), *changes], changes, strict=False) if before[1] != step[1]]
    return Capacity(workers_per_node, tuple(kept))


def _step(words: list[str], unit_s: float, where: str) -> tuple[float, int]:
    if len(words) != 2:
        raise TraceError(f"{where}: there are {len(words)} columns in place of 2, a time and a number of nodes.")
    try:
        at_s, nodes = float(words[0]) * unit_s, float(words[1])
    except ValueError:
        raise TraceError(f"{where}: {','.join(words)!r} is not a time and a number of nodes.") from None
    if not (0 <= at_s < math.inf and nodes >= 0 and nodes == int(nodes)):
        raise TraceError(f"{where}: {','.join(words)!r} needs a time and a whole number of nodes, both 0 or more.")
    return at_s, int(nodes)
