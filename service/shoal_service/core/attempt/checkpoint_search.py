"""The search for the checkpoint to start from, in OPENING and FALLING_BACK: found, none, all damaged, no answer.

Called by `machine`. A storage that does not answer is asked again until `checkpoint.wait_s` is over: an outage of
seconds must not end a job that waits for nothing else. Damaged checkpoints are reported, and never silently replaced by
step 0.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.commands import FindCheckpoint, ForgetDamaged
from shoal_service.core.attempt.events import CheckpointFound
from shoal_service.core.attempt.group import forming
from shoal_service.core.attempt.group.source import best_source
from shoal_service.core.attempt.reports import remember_newest
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import FallingBack, Opening, Search, Stage, Starting
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.checkpoints import CheckpointDamaged, CheckpointFallback, StorageAway
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.spec import DamagePolicy

_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 15.0
"""Pauses between two requests to a storage that does not answer: 1, 2, 4, 8 and 15 s."""


def found(turn: Turn, event: CheckpointFound) -> None:
    if turn.stage not in (Stage.OPENING, Stage.FALLING_BACK):
        return  # the second answer to a repeated request
    for name, message in event.damaged:
        _forget(turn, name, message)
    remember_newest(turn, event.name)
    newest, damaged = turn.checkpoints.newest, turn.checkpoints.damaged
    has_state = newest is not None or best_source(turn.state) is not None or turn.checkpoints.trusts_seed_only
    if damaged and not has_state and turn.target.spec.checkpoint.all_damaged is DamagePolicy.STOP:
        turn.end(EndReason.DAMAGED_CHECKPOINT, _why_it_ends(turn.state))
        return
    if turn.stage is Stage.FALLING_BACK or damaged:
        turn.emit(CheckpointFallback(to=newest))
    if turn.stage is Stage.OPENING:
        turn.enter(Starting(since=turn.now))
    else:
        forming.plan_next(turn)


def storage_is_away(turn: Turn, message: str) -> None:
    """The search failed: it is repeated after a pause."""
    current = turn.current
    if not isinstance(current, (Opening, FallingBack)) or current.search.retry_at is not None:
        return  # another answer to a repeated request
    failures = current.search.num_failures + 1
    pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(10, failures - 1))
    if failures == 1:
        turn.emit(StorageAway(message=message, until=deadline(turn.state)))
    turn.stay(replace(current, search=Search(num_failures=failures, error=message, retry_at=turn.now + pause_s)))


def repeat(turn: Turn) -> None:
    """After every event: ask again once the pause is over; end the attempt at the deadline."""
    current = turn.current
    if not isinstance(current, (Opening, FallingBack)):
        return
    if turn.now > deadline(turn.state):
        turn.end(EndReason.STORAGE_FAILED, _overdue(turn.state, current.search, turn.now))
    elif current.search.retry_at is not None and turn.now >= current.search.retry_at:
        turn.stay(replace(current, search=replace(current.search, retry_at=None)))
        turn.do(FindCheckpoint(excluding=turn.checkpoints.damaged))


def deadline(state: Attempt) -> float:
    """Of a search: when the attempt ends without an answer."""
    return state.current.since + state.target.spec.checkpoint.wait_s


def waits_for(state: Attempt) -> str:
    """For people; the same text as long as the storage fails in the same way."""
    root, current = state.config.checkpoint_root, state.current
    if isinstance(current, (Opening, FallingBack)) and current.search.error:
        return f"the checkpoint storage {root} does not answer and is asked again: {current.search.error}"
    return f"looks for the newest checkpoint in {root}"


def _overdue(state: Attempt, search: Search, now: float) -> str:
    root, limit_s = state.config.checkpoint_root, state.target.spec.checkpoint.wait_s
    last = f" Last error: {search.error}" if search.error else ""
    waited_s = now - state.current.since
    return f"{root} did not answer for {waited_s:.0f} s (checkpoint.wait_s is {limit_s:g}).{last}"


def _forget(turn: Turn, name: str, message: str) -> None:
    if name not in turn.checkpoints.damaged:
        turn.checkpoints = replace(turn.checkpoints, damaged=(*turn.checkpoints.damaged, name))
        turn.emit(CheckpointDamaged(name=name, message=message))
        turn.do(ForgetDamaged(name, message))


def _why_it_ends(state: Attempt) -> str:
    damaged = state.checkpoints.damaged
    shown = ", ".join(damaged[-3:]) + (f" and {len(damaged) - 3} more" if len(damaged) > 3 else "")
    return (
        f"every checkpoint in {state.config.checkpoint_root} is damaged ({shown}), and checkpoint.all_damaged is stop: "
        "training does not start over without being asked. Submit the job again to train from step 0, or with "
        "checkpoint.all_damaged start_over."
    )
