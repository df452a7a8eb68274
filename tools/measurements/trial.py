"""One trial of the recovery benchmark: system, event and cost, as one line of JSON. All tables come from these
lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from measurements.disturbance import Aftermath, Control, Disturbance


class System(StrEnum):
    SHOAL = "shoal"
    RAY_TRAIN = "ray_train"
    TORCHRUN = "torchrun"
    TORCHFT = "torchft"


class Size(StrEnum):
    """The model that is trained; the values of `--params`."""

    SMALL = "10m"
    LARGE = "85m"


class Victim(StrEnum):
    """Where the worker runs whose node is struck; the values of `--victims`."""

    AWAY = "away"
    """On a node with neither the head nor the job's supervisor."""
    SUPERVISOR = "supervisor"
    """On the node of the job's supervisor."""
    HEAD = "head"
    """On the head's node."""


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
    CONTROL = "control"
    """No fault: the longest time without a completed step in an undisturbed window. It is the control for the pauses of
    the other events."""


NODE_LOSSES = (Event.RAYLET_KILL, Event.HOST_CUT)
"""Events that take a node away, and for which the victim's place matters."""


@dataclass(frozen=True, slots=True)
class Trial:
    system: System
    event: Event
    pause_s: float | None = None
    """None if it did not recover or the event has no pause; `note` has the reason."""
    next_step_s: float | None = None
    """From the signal to the next completed step, as a clock would show it."""
    regain_s: float | None = None
    full_strength_s: float | None = None
    """From the signal until a step of as many workers as before is complete; None: not within the window."""
    window_s: float | None = None
    """Length of the window after the signal that was watched; None: none was."""
    samples: int | None = None
    """Samples trained in the window; those of repeated steps do not count."""
    steps_lost: int | None = None
    from_workers: int | None = None
    to_workers: int | None = None
    step_s: float | None = None
    """A median step at the new size."""
    params: Size = Size.SMALL
    victim: Victim | None = None
    """For `NODE_LOSSES`."""
    run: str = ""
    """Which call of the benchmark did it: only trials of one call compare. Empty: not recorded."""
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
        next_step_s=cost.next_step_s,
        regain_s=cost.regain_s,
        steps_lost=cost.steps_lost,
        from_workers=cost.from_world_size,
        to_workers=cost.to_world_size,
        step_s=cost.step_s,
        figures=dict(figures or {}),
    )


def with_aftermath(trial: Trial, after: Aftermath, global_batch: int) -> Trial:
    """The trial with what the window after its signal showed. torchft's step has fewer samples while a replica is
    missing; the others keep the global batch."""
    shares = (size / trial.from_workers if trial.from_workers else 1.0 for size in after.new_sizes)
    num_steps = sum(shares) if trial.system is System.TORCHFT else len(after.new_sizes)
    return replace(
        trial,
        window_s=after.window_s,
        full_strength_s=after.full_strength_s,
        samples=round(num_steps * global_batch),
    )


def control_trial(system: System, found: Control, window_s: float, samples_per_step: int) -> Trial:
    """An undisturbed window as a trial: its longest gap stands where the others have the time to the next step."""
    return Trial(
        system,
        Event.CONTROL,
        pause_s=max(0.0, found.longest_gap_s - found.step_s),
        next_step_s=found.longest_gap_s,
        window_s=window_s,
        samples=found.new_steps * samples_per_step,
        steps_lost=0,
        step_s=found.step_s,
    )


def read_trials(path: Path) -> list[Trial]:
    """Read a file with one JSON line per trial; lines of other kinds are skipped."""
    trials = []
    for line in path.read_text().splitlines():
        document = json.loads(line)
        if "event" in document:
            document["system"], document["event"] = System(document["system"]), Event(document["event"])
            document["params"] = Size(document.get("params", Size.SMALL))
            document["victim"] = None if document.get("victim") is None else Victim(document["victim"])
            trials.append(Trial(**document))
    return trials
