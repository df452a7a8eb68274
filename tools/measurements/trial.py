"""One trial: what was done to which system, and what it cost. One line of JSON; everything printed comes from these."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from measurements.disturbance import Disturbance


class System(StrEnum):
    SHOAL = "shoal"
    RAY_TRAIN = "ray_train"
    TORCHRUN = "torchrun"


class Event(StrEnum):
    """What happens to the cluster or to the job; the values are those of `--events` and of the JSON lines."""

    WORKER_KILL = "worker_kill"
    """SIGKILL of one worker process, 4 of them; nothing takes its place at once."""
    WORKER_KILL_STANDBY = "worker_kill_standby"
    """The same with a warm standby."""
    WORKER_STOP = "worker_stop"
    """SIGSTOP of one worker process: it hangs."""
    RAYLET_KILL = "raylet_kill"
    """SIGKILL of the raylet of a node with one worker on it; the node's processes die of it."""
    HOST_CUT = "host_cut"
    """A host's network link goes down."""
    CAPACITY = "capacity"
    """A node joins while one worker is missing."""
    SHRINK = "shrink"
    """The job is told to use one worker less."""
    DRAIN = "drain"
    """A node with one worker on it is to be left."""
    CONTROL_PLANE_KILL = "control_plane_kill"
    """SIGKILL of `shoal serve`, which is started again."""
    SUPERVISOR_KILL = "supervisor_kill"
    """SIGKILL of the job's supervisor."""
    HEAD_KILL = "head_kill"
    """SIGKILL of Ray's control service, which is started again."""
    SNAPSHOT_COST = "snapshot_cost"
    """Nothing happens: steps with snapshots in memory against steps without."""


@dataclass(frozen=True, slots=True)
class Trial:
    system: System
    event: Event
    pause_s: float | None = None
    """None: it did not recover, or there is nothing to wait for; `note` says which."""
    regain_s: float | None = None
    steps_lost: int | None = None
    from_workers: int | None = None
    to_workers: int | None = None
    step_s: float | None = None
    """A median step at the new size."""
    note: str = ""
    failed: str = ""
    """Why it could not be set up, or be seen through; empty: it was."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What only this event has, by name with its unit."""

    def line(self) -> str:
        document = asdict(self)
        for key, value in document.items():
            if isinstance(value, float):
                document[key] = round(value, 4)
        return json.dumps({k: v for k, v in document.items() if v not in ({}, "")})


Emit = Callable[[Trial], None]


class EventFailed(Exception):
    """An event cannot be set up, or what came of it cannot be seen; the message says why."""


def strike_all(system: System, events: Iterable[Event], emit: Emit, strike: Callable[[list[Event]], None]) -> None:
    """`strike(remaining)` goes through the events in order and takes each off the list when it is over. If it fails,
    that is noted of the event at the front, and `strike` is called anew, with a cluster of its own, for those behind.
    """
    remaining = list(events)
    while remaining:
        try:
            strike(remaining)
        except Exception as error:
            emit(Trial(system, remaining.pop(0), failed=f"{type(error).__name__}: {error}"))
        else:
            return


def trial_of(system: System, event: Event, cost: Disturbance, figures: dict[str, Any] | None = None) -> Trial:
    return Trial(
        system,
        event,
        pause_s=cost.pause_s,
        regain_s=cost.regain_s,
        steps_lost=cost.steps_lost,
        from_workers=cost.from_world_size,
        to_workers=cost.to_world_size,
        step_s=cost.step_s,
        figures=dict(figures or {}),
    )


def read_trials(path: Path) -> list[Trial]:
    """From a file with one JSON line each; other lines are not for us."""
    trials = []
    for line in path.read_text().splitlines():
        document = json.loads(line)
        if "event" in document:
            document["system"], document["event"] = System(document["system"]), Event(document["event"])
            trials.append(Trial(**document))
    return trials
