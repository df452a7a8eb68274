"""Where the time of an urgent job's start goes, from the events of the jobs: seconds after its submission."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.views import EventView, JobView


def start_phases(
    job: JobView, events: Sequence[EventView], series: Sequence[SeriesPoint], others: Iterable[Sequence[EventView]]
) -> dict[str, float]:
    """
    Args:
        events: the job's own.
        series: its steps.
        others: the events of each other job since then, of which some were shrunk or preempted for this one.
    """
    others = [[event for event in of_one if event.at >= job.created_at] for of_one in others]
    drained = [at for of_one in others if (at := _drained_at(of_one, job.id)) is not None]
    shrunk = [at for of_one in others if (at := _reformed_at(of_one)) is not None]
    formed = _first(events, "generation.formed")
    warm = [event.at for event in events if event.type == "worker.started" and formed is not None and event.at < formed]
    moments = {
        "decided_s": _state_at(events, "STARTING"),
        "shrunk_s": min(shrunk, default=None),
        "drained_s": max(drained, default=None),
        "forming_s": _first(events, "generation.forming"),
        "first_worker_s": min(warm, default=None),
        "workers_s": max(warm, default=None),
        "formed_s": formed,
        "first_step_s": series[0].at if series else None,
    }
    return {name: round(at - job.created_at, 2) for name, at in moments.items() if at is not None}


def _drained_at(events: Sequence[EventView], beneficiary: str) -> float | None:
    """When the attempt that was preempted for this job had ended; None: none was."""
    for number, event in enumerate(events):
        if event.type == "job.preempted" and event.data["beneficiary"] == beneficiary:
            return _state_at(events[number:], "QUEUED")
    return None


def _reformed_at(events: Sequence[EventView]) -> float | None:
    """When the first group with fewer workers had formed; None: the job was not shrunk."""
    for number, event in enumerate(events):
        if event.type == "job.granted" and event.data["to"] < event.data["from"]:
            return _first(events[number:], "generation.formed")
    return None


def _state_at(events: Sequence[EventView], state: str) -> float | None:
    return next((event.at for event in events if event.type == "job.state" and event.data["to"] == state), None)


def _first(events: Sequence[EventView], type_: str) -> float | None:
    return next((event.at for event in events if event.type == type_), None)
