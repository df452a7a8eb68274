"""The goodput ledger: every worker-second that a job requests is booked under exactly one category.

    requested  = elasticity.max_workers while the job is queued or has an attempt; 0 while it is paused or has ended
    total      = integral of `requested` over time = sum of all categories
    goodput    = productive / total

Only `account` adds seconds: those since its last call, once. All other functions move booked seconds from one category
to another, never more than there are, so the sum cannot drift.

Seconds of a running group are first booked as *productive*. When their step is complete, `settle_step` moves them to
what they really were. If the step is never completed, `discard` moves them to the reason for that.

One ledger follows a job through its life: the store opens it, each attempt continues it (core/attempt/machine.py), and
the store takes it back. No decision depends on it; metrics and people read it.

Worker-seconds of a window of time, from the accounts of jobs, which only grow.

A job's accounts are sampled now and then: each sample has all worker-seconds since the job was created, by account.
Between two samples they are taken to grow evenly. `Window.add` books the difference within each interval of the window.
Seconds that move from one account to another (a step that turns out to be lost) count where they are at the end of an
interval; an account that shrinks counts as 0 there.
store/timeline.py asks for a window, once for each project.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TypeAlias

from pydantic import Field

from shoal_workers.contract import Frozen, IncidentCause


class Category(StrEnum):
    """What a worker-second was spent on, in the order in which it is shown."""

    PRODUCTIVE = "productive"
    """Workers of a running group, in steps that were completed for the first time."""
    RECOMPUTED = "recomputed"
    """Workers of a running group, in steps that had been completed before and were rolled back."""
    CHECKPOINT_STALL = "checkpoint_stall"
    """Training waited for a copy of its state, to memory or to storage, or for the commit of the last checkpoint."""
    RECOVERING = "recovering"
    """Time from the last completed step before an incident until the next group runs; divided by cause."""
    RESIZING = "resizing"
    """Time from the step boundary of a planned change until the next group runs."""
    DEGRADED = "degraded"
    """Workers that were requested and are not in the running group."""
    STARTING = "starting"
    """Time before the first group of an attempt runs."""
    QUEUED = "queued"
    IDLE = "idle"
    """None of the above: waiting for capacity after a planned change, and the last moments of an attempt."""


def recovering(cause: IncidentCause) -> str:
    """The name of the account for incidents of this cause."""
    return f"{Category.RECOVERING}{_SEPARATOR}{cause}"


_SEPARATOR = ":"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Part of the attempt's journal, so it round-trips through JSON. All amounts are worker-seconds."""

    at: float | None = None
    """Wall-clock time up to which seconds are booked; None if none are."""
    booked: dict[str, float] = field(default_factory=dict)
    """By account: a category, or `recovering(cause)`."""
    max_step: int = 0
    """Largest step that was ever completed."""

    generation: int = 0
    settled_step: int = 0
    """Newest step of `generation` that is settled. A report of this step or of an older one is a repetition."""
    unsettled: float = 0.0
    """Amount of the running group since its last completed step."""
    unsettled_under: str = Category.PRODUCTIVE
    """Account under which `unsettled` is booked until the next step is completed."""
    incident: float = 0.0
    """Amount that is booked to the open incident. It moves along if the cause is corrected."""
    snapshot_s: float = 0.0
    """Seconds of each step that snapshots to memory take."""
    stall_step: int = -1
    """Step of the newest checkpoint whose stall is booked."""
    stall_s: float = 0.0
    """Seconds of that stall, on the slowest rank that has reported."""


class Goodput(Frozen):
    """Every worker-second of a job, booked under exactly one category."""

    seconds: dict[Category, float] = Field(default_factory=dict)
    """Seconds by category."""
    recovering: dict[IncidentCause, float] = Field(default_factory=dict)
    """The category `recovering`, by incident cause."""
    total: float = 0.0
    """Wall-clock seconds times the requested workers; the sum of `seconds`."""
    ratio: float | None = None
    """productive / total; None while nothing is booked."""
    at: float | None = None
    """Booked up to this wall-clock time."""
    max_step: int = 0
    """Largest step that was ever completed. A repetition of it, or of a smaller one, is `recomputed`."""
    unsettled: float = 0.0
    """The part of `productive` that belongs to the step under way, which may never be completed."""


def resume(shown: Goodput | None, *, at: float) -> Ledger:
    """The ledger that continues from `shown`. Without one, a new ledger begins at `at`."""
    if shown is None or shown.at is None:
        return Ledger(at=at)
    causes = {recovering(cause): amount for cause, amount in shown.recovering.items()}
    others = {str(name): amount for name, amount in shown.seconds.items() if name is not Category.RECOVERING}
    return Ledger(at=shown.at, booked=others | causes, max_step=shown.max_step, unsettled=shown.unsettled)


def show(ledger: Ledger) -> Goodput:
    """The ledger as status of the job."""
    seconds = dict.fromkeys(Category, 0.0)
    causes: dict[IncidentCause, float] = {}
    for account_name, amount in ledger.booked.items():
        category, _, cause = account_name.partition(_SEPARATOR)
        seconds[Category(category)] += amount
        if cause:
            causes[IncidentCause(cause)] = amount
    total = sum(seconds.values())
    ratio = seconds[Category.PRODUCTIVE] / total if total > 0 else None
    return Goodput(
        seconds=seconds,
        recovering=causes,
        total=total,
        ratio=ratio,
        at=ledger.at,
        max_step=ledger.max_step,
        unsettled=ledger.unsettled if ledger.unsettled_under == Category.PRODUCTIVE else 0.0,
    )


def account(ledger: Ledger, under: str, *, requested: int, in_group: int = 0, now: float) -> Ledger:
    """Book the time up to `now` of the `requested` workers under one account. If the clock goes backwards, nothing is
    booked.

    PRODUCTIVE is for a running group: the time of `in_group` workers is productive, that of the missing ones degraded.
    """
    if ledger.at is None:
        return replace(ledger, at=now)
    elapsed_s = now - ledger.at
    if elapsed_s <= 0:
        return ledger
    is_running = under == Category.PRODUCTIVE
    working = min(in_group, requested) if is_running else requested
    amount = working * elapsed_s
    booked = dict(ledger.booked)
    _add(booked, under, amount)
    _add(booked, Category.DEGRADED, (requested - working) * elapsed_s)
    return replace(
        ledger,
        at=now,
        booked=booked,
        unsettled=ledger.unsettled + (amount if is_running else 0.0),
        incident=ledger.incident + (amount if _is_recovering(under) else 0.0),
    )


def group_formed(ledger: Ledger, *, generation: int, start_step: int) -> Ledger:
    """A new group runs: none of its seconds are settled."""
    return replace(
        ledger,
        generation=generation,
        settled_step=start_step,
        unsettled=0.0,
        unsettled_under=Category.PRODUCTIVE,
    )


def settle_step(ledger: Ledger, *, generation: int, step: int, step_s: float, workers: int) -> Ledger:
    """A step is complete: `step_s` seconds of each worker were productive, recomputed, or snapshots.

    A repeated report (to a restarted supervisor) changes nothing. A report that arrives after the group was lost takes
    its seconds back from the incident.
    """
    if generation != ledger.generation or step <= ledger.settled_step:
        return ledger
    is_next = step == ledger.settled_step + 1  # else a supervisor that died since has settled steps in between
    share = min(ledger.unsettled, step_s * workers)
    copies = min(share, ledger.snapshot_s * workers)
    under = Category.RECOMPUTED if step <= ledger.max_step else Category.PRODUCTIVE
    source = ledger.unsettled_under
    ledger = _move(ledger, source, Category.CHECKPOINT_STALL, copies)
    ledger = _move(ledger, source, under, share - copies)
    return replace(
        ledger,
        settled_step=step,
        max_step=max(ledger.max_step, step),
        unsettled=ledger.unsettled - share if is_next else 0.0,
        incident=max(0.0, ledger.incident - share) if _is_recovering(source) else ledger.incident,
    )


def settle_report(ledger: Ledger, *, generation: int, step: int) -> Ledger:
    """A script has reported a step: all of its group's seconds since the last report were productive, or recomputed. It
    need not report every step, so the steps before this one are settled too."""
    return settle_step(ledger, generation=generation, step=step, step_s=math.inf, workers=1)


def begun(ledger: Ledger, under: str, *, start_step: int) -> Ledger:
    """The first report of a script's group: its seconds until then went to imports, its model and its own checkpoint.
    They are booked under `under`, the account of the time before the group."""
    moved = discard(ledger, under)
    return replace(moved, settled_step=start_step, unsettled=0.0, unsettled_under=ledger.unsettled_under)


def keep(ledger: Ledger) -> Ledger:
    """The seconds of a group that are not settled stay where they are booked, since nothing says that they were
    lost."""
    return replace(ledger, unsettled=0.0)


def discard(ledger: Ledger, under: str) -> Ledger:
    """The group left its step before it was complete: the seconds spent on it move to `under`."""
    moved = _move(ledger, ledger.unsettled_under, under, ledger.unsettled)
    incident = ledger.incident + (ledger.unsettled if _is_recovering(under) else 0.0)
    return replace(moved, unsettled_under=under, incident=incident)


def rename_incident(ledger: Ledger, before: IncidentCause, after: IncidentCause) -> Ledger:
    """The cause is corrected: all seconds of the incident so far move to the new cause."""
    old, new = recovering(before), recovering(after)
    under = new if ledger.unsettled_under == old else ledger.unsettled_under
    return replace(_move(ledger, old, new, ledger.incident), unsettled_under=under)


def close_incident(ledger: Ledger) -> Ledger:
    return replace(ledger, incident=0.0)


def checkpoint_stalled(ledger: Ledger, *, step: int, stall_s: float, workers: int) -> Ledger:
    """A rank reports how long it waited for the checkpoint of `step`; the slowest rank counts."""
    if step < ledger.stall_step:
        return ledger
    known_s = ledger.stall_s if step == ledger.stall_step else 0.0
    longest_s = max(known_s, stall_s)
    amount = min((longest_s - known_s) * workers, ledger.booked.get(Category.PRODUCTIVE, 0.0))
    is_unsettled = step >= ledger.settled_step  # the copy was made after that step, so its seconds are not settled
    if is_unsettled:
        amount = min(amount, ledger.unsettled) if ledger.unsettled_under == Category.PRODUCTIVE else 0.0
    return replace(
        _move(ledger, Category.PRODUCTIVE, Category.CHECKPOINT_STALL, amount),
        stall_step=step,
        stall_s=longest_s,
        unsettled=ledger.unsettled - (amount if is_unsettled else 0.0),
    )


def snapshots_cost(ledger: Ledger, *, copy_s: float, every_steps: float) -> Ledger:
    """Each step contains this share of a snapshot from now on."""
    return replace(ledger, snapshot_s=copy_s / max(1, every_steps))


def _move(ledger: Ledger, source: str, target: str, amount: float) -> Ledger:
    amount = min(amount, ledger.booked.get(source, 0.0))
    if amount <= 0 or source == target:
        return ledger
    booked = dict(ledger.booked)
    _add(booked, source, -amount)
    _add(booked, target, amount)
    return replace(ledger, booked=booked)


def _add(booked: dict[str, float], under: str, amount: float) -> None:
    if amount:
        booked[str(under)] = booked.get(under, 0.0) + amount


def _is_recovering(under: str) -> bool:
    return under.startswith(f"{Category.RECOVERING}{_SEPARATOR}")


Accounts: TypeAlias = Mapping[str, float]
"""Worker-seconds by account since the job was created."""


class Window:
    """Worker-seconds by account in each of the intervals between `edges`."""

    def __init__(self, edges: Sequence[float]) -> None:
        """`edges`: times in rising order, at least two."""
        self._edges = edges
        self.by_account: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(edges) - 1))

    def add(self, samples: Sequence[tuple[float, Accounts]]) -> None:
        """Book what a job spent. `samples`: in the order of their times; the first is that of its creation."""
        if not samples:
            return
        before = _at(samples, self._edges[0])
        for index, edge in enumerate(self._edges[1:]):
            after = _at(samples, edge)
            for account, amount in after.items():
                more = amount - before.get(account, 0.0)
                if more > 0:
                    self.by_account[account][index] += more
            before = after

    def totals(self) -> dict[str, float]:
        """The sums over the whole window."""
        return {account: sum(amounts) for account, amounts in self.by_account.items()}


def edges_of(since: float, until: float, number: int) -> list[float]:
    """The edges of `number` equal intervals."""
    return [since + (until - since) * index / number for index in range(number)] + [until]


class Period(StrEnum):
    """A period of the calendar, in UTC. A week begins on Monday."""

    WEEK = "week"
    MONTH = "month"


def calendar_edges(now: float, by: Period, number: int) -> list[float]:
    """Return the `number` + 1 edges of the newest periods; the last edge is `now`."""
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if by is Period.WEEK:
        monday = today - timedelta(days=today.weekday())
        begins = [monday - timedelta(weeks=before) for before in range(number)]
    else:
        months = [today.year * 12 + today.month - 1 - before for before in range(number)]
        begins = [today.replace(year=month // 12, month=month % 12 + 1, day=1) for month in months]
    return [*(begin.timestamp() for begin in reversed(begins)), now]


def _at(samples: Sequence[tuple[float, Accounts]], at: float) -> Accounts:
    """The accounts at a time. Before the first sample they are empty, after the last one as there."""
    index = bisect_right(samples, at, key=lambda sample: sample[0])
    if index == 0:
        return {}
    began, first = samples[index - 1]
    if index == len(samples) or began == at:
        return first
    ends, second = samples[index]
    share = (at - began) / (ends - began)
    names = {*first, *second}
    return {name: (1 - share) * first.get(name, 0.0) + share * second.get(name, 0.0) for name in names}
