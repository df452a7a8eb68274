"""One trial of the recovery benchmark: system, event and cost, as one line of JSON. All tables come from these
lines."""

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
    """What happens to the cluster or to the job. The values are those of `--events` and of the JSON lines."""

    WORKER_KILL = "worker_kill"
    """SIGKILL of one of 4 workers, without a standby."""
    WORKER_KILL_STANDBY = "worker_kill_standby"
    """SIGKILL of one of 4 workers, with a warm standby."""
    WORKER_STOP = "worker_stop"
    """SIGSTOP of one worker, which simulates a hang."""
    RAYLET_KILL = "raylet_kill"
    """SIGKILL of the raylet of a node with one worker; the node's processes exit."""
    HOST_CUT = "host_cut"
    """The network link of a host goes down."""
    CAPACITY = "capacity"
    """A node joins while one worker is missing."""
    SHRINK = "shrink"
    """A PATCH of the job to one worker less."""
    DRAIN = "drain"
    """A drain of a node with one worker."""
    CONTROL_PLANE_KILL = "control_plane_kill"
    """SIGKILL and restart of `shoal serve`."""
    SUPERVISOR_KILL = "supervisor_kill"
    """SIGKILL of the job's supervisor."""
    HEAD_KILL = "head_kill"
    """SIGKILL and restart of Ray's head."""
    SNAPSHOT_COST = "snapshot_cost"
    """No fault: steps with snapshots in memory against steps without them."""


@dataclass(frozen=True, slots=True)
class Trial:
    system: System
    event: Event
    pause_s: float | None = None
    """None if it did not recover or the event has no pause; `note` has the reason."""
    regain_s: float | None = None
    steps_lost: int | None = None
    from_workers: int | None = None
    to_workers: int | None = None
    step_s: float | None = None
    """A median step at the new size."""
    note: str = ""
    failed: str = ""
    """Why the trial could not be set up or finished; empty if it was finished."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures of this event only: name with unit -> value."""

    def line(self) -> str:
        document = asdict(self)
        for key, value in document.items():
            if isinstance(value, float):
                document[key] = round(value, 4)
        return json.dumps({k: v for k, v in document.items() if v not in ({}, "")})


Emit = Callable[[Trial], None]


class EventFailed(Exception):
    """An event could not be set up, or its effect could not be observed; the message has the reason."""


def strike_all(system: System, events: Iterable[Event], emit: Emit, strike: Callable[[list[Event]], None]) -> None:
    """Call `strike(remaining)`, which causes the events in order and removes each from the list when it is done. If it
    raises, the first event of the list is emitted as failed, and `strike` is called again for the rest, on a new
    cluster.
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
    """Read a file with one JSON line per trial; lines of other kinds are skipped."""
    trials = []
    for line in path.read_text().splitlines():
        document = json.loads(line)
        if "event" in document:
            document["system"], document["event"] = System(document["system"]), Event(document["event"])
            trials.append(Trial(**document))
    return trials
