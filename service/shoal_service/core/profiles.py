"""What becomes of a request to profile a rank: a pure machine beside the attempt's, which it never influences.

    requested --- group runs ---> sent to the worker of the rank --- its report ---> ended
        |                                   |
        |  no group within WAIT_S           |  the generation ends, and no report follows within GRACE_S
        |  the group has no such rank       |  the worker is lost
        `---------------> ended <-----------'  its steps are done, and no report follows within WRITE_S

Every request ends, with a result or with a reason. It is not repeated in another generation. Called by the supervisor's
ProfileTaker on its loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from shoal_workers.contract import Profiled, ProfileRequest

WAIT_S = 120.0
"""How long a request waits for a group that trains."""
GRACE_S = 10.0
"""How long the result of a generation that has ended is waited for: its files may be on their way to the storage."""
WRITE_S = 180.0
"""The same, once the steps are done: what makes the files of a trace has two minutes."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the decision needs of the attempt."""

    generation: int
    """Generation of the group, or of the last one."""
    is_running: bool
    """It trains."""
    is_active: bool
    """It trains, or is on its way to a step boundary."""
    workers: tuple[int, ...]
    """Worker indexes by rank."""
    alive: frozenset[int]
    """All workers of the attempt."""
    step: int
    """Completed steps."""
    cause: str = ""
    """Cause of the open incident; empty: there is none."""


@dataclass(frozen=True, slots=True)
class Sent:
    index: int
    """Index of the worker."""
    generation: int
    step: int
    """Completed when it was sent."""


@dataclass(frozen=True, slots=True)
class ProfileState:
    request: ProfileRequest | None = None
    """The open one."""
    since: float = 0.0
    """When it arrived, wall-clock."""
    sent: Sent | None = None
    until: float | None = None
    """How long its result is waited for; None if its steps go on."""
    ended: int = 0
    """Number of the newest that has ended."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The control plane's newest word; None if no profile is requested."""

    request: ProfileRequest | None


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker has reported the end of a profile."""

    item: Profiled


@dataclass(frozen=True, slots=True)
class Looked:
    """Anything else has happened, or nothing for a moment."""


@dataclass(frozen=True, slots=True)
class Send:
    """Order the worker to profile from its next step boundary."""

    index: int
    generation: int
    request: ProfileRequest


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the control plane how the request has ended."""

    item: Profiled


ProfileEvent = Wanted | Reported | Looked
ProfileCommand = Send | Report


def step(
    state: ProfileState, event: ProfileEvent, group: GroupFacts, now: float
) -> tuple[ProfileState, tuple[ProfileCommand, ...]]:
    """The state after the event, and what is to be done."""
    match event:
        case Wanted(request):
            if request is None or (state.request is not None and request.number != state.request.number):
                state = ProfileState(ended=state.ended)
            if request is not None and state.request is None and request.number > state.ended:
                state = replace(state, request=request, since=now)
        case Reported(item):
            if state.sent is not None and state.request is not None and item.number == state.request.number:
                return ProfileState(ended=item.number), (Report(item),)
        case Looked():
            pass
        case _:
            assert_never(event)
    if state.request is None:
        return state, ()
    if state.sent is None:
        return _unsent(state, state.request, group, now)
    return _sent(state, state.request, state.sent, group, now)


def _unsent(
    state: ProfileState, request: ProfileRequest, group: GroupFacts, now: float
) -> tuple[ProfileState, tuple[ProfileCommand, ...]]:
    if not group.is_running:
        if now < state.since + WAIT_S:
            return state, ()
        return _end(request, group.generation, f"no group of the job trained within {WAIT_S:g} s")
    if request.rank >= len(group.workers):
        last = len(group.workers) - 1
        return _end(request, group.generation, f"the group has no rank {request.rank}: its ranks are 0 to {last}")
    sent = Sent(group.workers[request.rank], group.generation, group.step)
    return replace(state, sent=sent), (Send(sent.index, sent.generation, request),)


def _sent(
    state: ProfileState, request: ProfileRequest, sent: Sent, group: GroupFacts, now: float
) -> tuple[ProfileState, tuple[ProfileCommand, ...]]:
    is_over = group.generation != sent.generation or not group.is_active
    if is_over and sent.index not in group.alive:
        reason = f"the worker of rank {request.rank} was lost in mid-profile{_after(group)}"
        return _end(request, sent.generation, reason)
    if state.until is None:
        if is_over:
            return replace(state, until=now + GRACE_S), ()
        if group.step > sent.step + request.steps:
            return replace(state, until=now + WRITE_S), ()
    elif now >= state.until:
        if is_over:
            reason = f"the group of generation {sent.generation} ended in mid-profile{_after(group)}"
        else:
            reason = f"the worker of rank {request.rank} sent no result within {WRITE_S:g} s of its last profiled step"
        return _end(request, sent.generation, reason)
    return state, ()


def _after(group: GroupFacts) -> str:
    cause = f" ({group.cause})" if group.cause else ""
    return f", after step {group.step}{cause}; training goes on, ask again for another profile"


def _end(request: ProfileRequest, generation: int, reason: str) -> tuple[ProfileState, tuple[ProfileCommand, ...]]:
    item = Profiled(generation=generation, number=request.number, rank=request.rank, error=reason)
    return ProfileState(ended=request.number), (Report(item),)
