"""Failures of a large job: their rates by cause, read from a file, and when they occur, drawn from a seed. Pure.

    gpu:    {per_gpu_day: 3.4e-4, takes: gpu, repair_h: 24}
    switch: {per_node_day: 3.2e-4, takes: rack, nodes: 16, repair_h: 1, buddy_lost: 0.5}
    hang:   {per_gpu_day: 1.0e-5, takes: hang, repair_h: 1}

The failures of each cause are a Poisson process. Their number does not depend on what the job does meanwhile.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import accumulate

DAY_S = 86400.0


class RatesError(ValueError):
    """A file of failure rates cannot be used. The message names the file, the cause and the setting."""

    code = "invalid_rates"


class Takes(StrEnum):
    """What a failure takes from the job."""

    PROCESS = "process"
    """One worker: it is started again on its node."""
    GPU = "gpu"
    """One GPU: its worker raises an error, and its node goes to repair. Its memory can be read until then."""
    NODE = "node"
    """One node with its memory, without notice: it does not answer any longer."""
    RACK = "rack"
    """`nodes` nodes with their memory, at once."""
    HANG = "hang"
    """No rank makes progress any longer, and one does not react."""
    SLOW = "slow"
    """One node computes `slowdown` times as long, until it is replaced or repaired."""
    STORAGE = "storage"
    """The storage of checkpoints for `repair_h`: none is written or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause of failures. Exactly one of the rates is above 0."""

    name: str
    takes: Takes
    per_gpu_day: float = 0.0
    per_node_day: float = 0.0
    per_day: float = 0.0
    repair_h: float = 0.0
    """Hours until a node can be used again; 0 if nothing has to be repaired."""
    buddy_lost: float = 0.0
    """Share of the failures that also take the node with the copy of the lost node's snapshots."""
    nodes: int = 1
    """Nodes that a failure of a rack takes."""
    slowdown: float = 1.0

    @property
    def nodes_in_repair(self) -> int:
        """Nodes that one failure sends to repair, without a buddy's."""
        return self.nodes if self.takes in (Takes.GPU, Takes.NODE, Takes.RACK) else 0

    def find_rate(self, gpus: int, nodes: int) -> float:
        """Return the failures per second of a cluster of that size."""
        return (self.per_gpu_day * gpus + self.per_node_day * nodes + self.per_day) / DAY_S


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure. `draw` in [0, 1) chooses what it hits."""

    at: float
    cause: Cause
    draw: float
    takes_buddy: bool


_RATES = ("per_gpu_day", "per_node_day", "per_day")
_NUMBERS = (*_RATES, "repair_h", "buddy_lost", "slowdown", "nodes")


def parse_rates(document: object, source: str) -> tuple[Cause, ...]:
    """Return the causes of a decoded YAML or JSON document. `source` for messages. Raises RatesError."""
    if not isinstance(document, dict) or not document:
        raise RatesError(f"{source} must have one key for each cause, such as: gpu: {{per_gpu_day: 3e-4, takes: gpu}}.")
    return tuple(_parse_cause(str(name), settings, f"{source}, cause {name}") for name, settings in document.items())


def _parse_cause(name: str, settings: object, where: str) -> Cause:
    if not isinstance(settings, dict):
        raise RatesError(f"{where}: {settings!r} is not a mapping of settings.")
    known = [field.name for field in fields(Cause) if field.name != "name"]
    for key, value in settings.items():
        if key not in known:
            raise RatesError(f"{where}: the setting {key!r} is unknown. Known are {', '.join(known)}.")
        if key in _NUMBERS and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise RatesError(f"{where}: {key} is {value!r} and must be a number, 0 or more.")
    takes, buddy_lost = settings.get("takes"), settings.get("buddy_lost", 0)
    problems = {
        f"takes is {takes!r} and must be one of {', '.join(Takes)}": takes not in [member.value for member in Takes],
        f"set exactly one of {', '.join(_RATES)}": sum(settings.get(rate, 0) > 0 for rate in _RATES) != 1,
        f"buddy_lost is {buddy_lost!r} and must be at most 1": buddy_lost > 1,
        "takes is slow, which needs a slowdown above 1": takes == Takes.SLOW and settings.get("slowdown", 1) <= 1,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise RatesError(f"{where}: {problem}.")
    return Cause(**{**settings, "name": name, "takes": Takes(settings["takes"])})


def draw_failures(causes: Sequence[Cause], *, gpus: int, nodes: int, days: float, seed: int) -> list[Failure]:
    """Draw the failures of a cluster, by time. The same seed gives the same failures."""
    failures: list[Failure] = []
    for cause in causes:
        chance = random.Random(f"{seed} {cause.name}")
        rate, at = cause.find_rate(gpus, nodes), 0.0
        while (at := at + chance.expovariate(rate)) < days * DAY_S:
            failures.append(Failure(at, cause, chance.random(), chance.random() < cause.buddy_lost))
    return sorted(failures, key=lambda failure: failure.at)


def find_most_missing(failures: Sequence[Failure]) -> int:
    """Return the most nodes that are in repair at one time, if no failure hits a node that is there already."""
    changes: list[tuple[float, int]] = []
    for failure in failures:
        num = failure.cause.nodes_in_repair + failure.takes_buddy
        changes += [(failure.at, num), (failure.at + 3600 * failure.cause.repair_h, -num)]
    return max(accumulate(num for _, num in sorted(changes)), default=0)
