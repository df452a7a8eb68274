"""What each stage waits for and until when, and what time alone brings about.

    deadline = the later of: the stage's beginning, the newest progress of what is waited for   + the timeout

Slow is not dead: while a worker that starts reports progress of its preparation, or a rank of a group that forms
reports that it builds or restores, the deadline moves on. A counter that stands still moves nothing. Deadlines are
checked after every event, so that a busy queue delays none. `find_wait` says what is waited for, until when, and what
is done then, and changes nothing; the status shows it, and `apply` carries it out.

A worker that hangs is killed here. Once `hangs.find_hang` says that the group hangs, it is lost and interrupted; a
worker that does not leave in time, or does not answer at all (`is_given_up`), is evicted:

    losses.evict  ->  KillWorker  ->  supervisor/workers/ray_fleet.py, `kill`: ray.kill, a request to exit, SIGKILL

The deadlines move when no time has passed for the attempt: the wall clock jumps (it was set, or the machine was
suspended), or the supervisor handled no event. All times in the state are wall-clock times, since people read them and
since a supervisor continues on another machine. After a jump every deadline is as far away as before, and is shown in
the new time:

    name of a field        meaning                            moves with the clock
    at, since, *_at, *_since, *_until, *_not_before     yes; 0 means never, and stays
    requested, answered_at, suspected                   yes: times by worker or node
    leave.deadline         of a worker that gave notice: it counts from that notice; yes
    deadline               of a node, named by the user or by Ray: an absolute time; no

While the supervisor was suspended the clock went on, but it heard nothing from its workers. So only what it waits for
moves, and no time that has passed moves beyond now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from shoal_service.core.attempt import checkpoints, hangs, losses, memory_snapshots, outcome, reports
from shoal_service.core.attempt.memory_snapshots import stop_waiting
from shoal_service.core.attempt.state import (
    Attempt,
    AvoidedNode,
    Committing,
    FallingBack,
    Forming,
    Opening,
    ProgressStamp,
    Quiescing,
    Running,
    Stage,
    Starting,
    Switching,
    Waiting,
    Worker,
)
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.persistent import IntMap, Table
from shoal_service.core.quantities import count_text
from shoal_workers.contract import EndReason, IncidentCause, Phase, later_to_form_s

T = TypeVar("T")
Move = Callable[[str, float], float]
"""Returns the new value of a field of this name."""

_NAMES = ("at", "since")
_ENDINGS = ("_at", "_since", "_until", "_not_before")
_TIMES_BY_KEY = ("requested", "answered_at", "suspected")
_CHANGED_BY_OTHERS = ("config", "target")
"""Parts of the state that do not move: `config` is fixed, and each directive replaces `target` as a whole."""
_WAITED_FOR = (
    "since",
    "advanced_at",
    "answered_at",
    "answers_since",
    "draining_since",
    "interrupted_at",
    "left_at",
    "requested",
    "seen_at",
    "unreachable_since",
    "warm_at",
)
_WAITED_UNTIL = ("interrupt_at", "orphans_until", "slow_until")


def apply(turn: Turn) -> None:
    """Do what is due: end what is overdue, give up workers that do not answer, and keep slow ones that no other
    replaces."""
    wait = find_wait(turn.state)
    if wait is not None and wait.expire is not None and wait.until is not None and turn.now >= wait.until:
        wait.expire(turn, f"{turn.now - turn.current.since:.0f} s")
    elif hang := hangs.find_hang(turn.state, turn.now):
        turn.health = replace(turn.health, hang=hang.hang)
        losses.lose_group(turn, IncidentCause.HUNG, "progress stamps", hang.reason)
    if isinstance(turn.current, Quiescing):
        _evict_unresponsive(turn, turn.current)
        outcome.consider(turn)  # the time to report snapshots may have passed
    for worker in [w for w in turn.pool.workers if w.left_out is not None or w.unreachable_since is not None]:
        if turn.stage is not Stage.ENDED and (given_up := is_given_up(turn.state, worker, turn.now)):
            losses.evict(turn, worker.index, IncidentCause.UNREACHABLE, "no answer", given_up.reason)
    if turn.stage is not Stage.ENDED:
        reports.keep_stragglers_without_replacement(turn)


def _evict_unresponsive(turn: Turn, quiescing: Quiescing) -> None:
    """Evict the workers of a lost group that are not waited for any longer, by rank."""
    state = turn.state
    if quiescing.interrupted_at is None:
        return
    since, late_s = _await_answers(state, quiescing, quiescing.interrupted_at)
    waited, limit_s = turn.now - since, state.leave_s + late_s
    unresponsive_s = state.config.timeouts.unresponsive_s + late_s
    hung = state.incident is not None and state.incident.cause is IncidentCause.HUNG
    unanswering = hangs.find_unanswering(state, turn.now) if hung else frozenset()
    generation = state.group.generation
    for index in state.in_run:
        worker = state.pool.worker(index)
        has_acknowledged = worker is not None and worker.acknowledged == generation
        cause, witness = IncidentCause.HUNG if hung else IncidentCause.STUCK, "deadline"
        if worker is not None and worker.unreachable_since is not None:
            cause, witness = IncidentCause.UNREACHABLE, "no answer"
            reason = f"it does not answer, and generation {generation} has failed"
        elif index in unanswering and not has_acknowledged:
            witness = "no answer"
            reason = f"it has left its polls unanswered for {hangs.silent_s(state):g} s or more"
        elif not has_acknowledged and waited >= unresponsive_s:
            reason = f"it did not acknowledge the end of generation {generation} within {unresponsive_s:.3g} s"
        elif waited >= limit_s:
            reason = f"it did not leave generation {generation} within {limit_s:.3g} s"
        else:
            continue
        losses.evict(turn, index, cause, witness, reason)


_LAST = 0.01
"""Share of a group's workers that are the last ones to leave it."""


def _await_answers(state: Attempt, quiescing: Quiescing, interrupted_at: float) -> tuple[float, float]:
    """Return since when the workers in `run` are waited for, and what is added because answers may queue up.

    Once nearly all workers of a group have left, no queue holds the answers of the last ones: they are waited for as
    those of a small group are, from the newest exit on.
    """
    late_s = state.config.timeouts.later_s(len(state.pool.workers))
    if quiescing.left_at is None or len(state.in_run) > max(1, _LAST * len(state.group.workers)):
        return interrupted_at, late_s
    return min(max(quiescing.left_at, interrupted_at), interrupted_at + late_s), 0.0


def is_given_up(state: Attempt, worker: Worker, now: float) -> Decision:
    """Decide if a worker that does not answer is given up. It is not known to be dead, but it is not waited for without
    end."""
    left_out, limit_s = worker.left_out, state.config.timeouts.left_out_s
    if left_out is not None and left_out.answers_since is not None:
        waited_s = now - left_out.answers_since
        reason = f"its node answers again, and it did not leave generation {left_out.generation} in {waited_s:.0f} s"
        return Decision(waited_s >= limit_s, reason)
    if left_out is not None:
        return Decision(now - left_out.since >= limit_s, f"its node was silent for {limit_s:g} s")
    if worker.unreachable_since is None:
        return Decision(False, "it answers")
    limit_s = state.config.timeouts.unreachable_s + state.config.timeouts.later_s(len(state.pool.workers))
    return Decision(now - worker.unreachable_since >= limit_s, f"it did not answer for {limit_s:.3g} s")


Expire = Callable[[Turn, str], None]
"""Does what is due once a deadline has passed. It is told for how long the stage has lasted: "30 s"."""


@dataclass(frozen=True, slots=True)
class Wait:
    until: float | None
    """Wall-clock time of the deadline; None if the wait ends when the workers report."""
    message: str
    """What is waited for, with the setting that limits it. The text does not change while only time passes."""
    expire: Expire | None = None
    """None if the end of the wait is found elsewhere."""


def find_wait(state: Attempt) -> Wait | None:
    """Return what the current stage waits for, and until when; None if it trains, or has ended."""
    timeouts, since = state.config.timeouts, state.current.since
    match state.current:
        case Opening() | FallingBack():
            return Wait(  # ended by `checkpoints.search_again`
                checkpoints.search_deadline(state),
                f"the list of checkpoints in {state.config.checkpoint_root} "
                f"(checkpoint.wait_s {state.target.spec.checkpoint.wait_s:g} s)",
            )
        case Waiting(orphans_until=float()):
            return Wait(
                memory_snapshots.waiting_until(state),
                f"workers to read the snapshots on their nodes ({timeouts.orphans_s:g} s without progress)",
                lambda turn, _: stop_waiting(turn),
            )
        case Starting():
            return _for_workers(state, timeouts.start_s, "timeouts.start_s")
        case Waiting(refused=str() as refused) if refused:
            wait_s = state.target.spec.elasticity.wait_s
            message = f"workers on other nodes, since {refused} (elasticity.wait_s {wait_s:g} s)"
            return Wait(_newest(since, _starting(state)) + wait_s, message, _end_without_capacity)
        case Waiting():
            return _for_workers(state, state.target.spec.elasticity.wait_s, "elasticity.wait_s")
        case Forming():
            return _for_group(state)
        case Switching() if state.target.is_script and state.is_finishing:
            return Wait(None, "the script to end on the other ranks")
        case Switching() if state.target.is_script:
            return Wait(
                since + timeouts.switch_s + state.target.grace_s,
                f"the processes of the script to end (script.grace_s {state.target.grace_s:g} s)",
                _lose_group(IncidentCause.COLLECTIVE_FAILED, "the script did not end within {} on every rank"),
            )
        case Switching():
            return Wait(
                since + timeouts.switch_s,
                f"the group to reach the end of its step ({timeouts.switch_s:g} s)",
                _lose_group(IncidentCause.COLLECTIVE_FAILED, "no step boundary was reached in {}"),
            )
        case Quiescing(interrupt_at=float() as at):
            return Wait(at, "other ranks to raise the same error", lambda turn, _: losses.interrupt_rest(turn))
        case Quiescing(interrupted_at=interrupted_at) as quiescing:
            began, late_s = _await_answers(state, quiescing, interrupted_at or since)
            limit_s = state.leave_s + late_s
            # each one that is late is evicted by `_evict_unresponsive`
            return Wait(began + limit_s, f"the workers to leave the lost group ({limit_s:.3g} s)")
        case Committing():
            return Wait(
                since + timeouts.commit_s,
                f"the storage to commit the checkpoint (timeouts.commit_s {timeouts.commit_s:g} s)",
                lambda turn, waited: outcome.commit_overdue(turn, f"the commit took longer than {waited}"),
            )
        case _:
            return None


def _for_workers(state: Attempt, timeout_s: float, setting: str) -> Wait:
    usable, minimum, granted = state.num_usable, state.target.min_workers, state.target.granted
    if usable < minimum:
        needs = f"{count_text(minimum, 'worker')}, {usable} ready"
        message = f"{needs} ({setting} {timeout_s:g} s without progress)"
        return Wait(_newest(state.current.since, _starting(state)) + timeout_s, message, _end_without_capacity)
    if state.budgets.form_not_before > state.current.since:
        message = f"the pause after {count_text(state.budgets.fruitless, 're-formation')} without a new step"
        return Wait(state.budgets.form_not_before, message)  # ended by `forming.consider`
    return Wait(None, f"the other workers to start, {usable} of {granted} ready")


def _end_without_capacity(turn: Turn, waited: str) -> None:
    turn.end(EndReason.CAPACITY_TIMEOUT, _describe_shortage(turn.state, waited))


def _describe_shortage(state: Attempt, waited: str) -> str:
    current, minimum = state.current, count_text(state.target.min_workers, "worker")
    if isinstance(current, Starting):
        start_s = state.config.timeouts.start_s
        started = f"only {state.num_usable} of at least {minimum} started within {waited}"
        return f"{started}, and no other made progress for timeouts.start_s {start_s:g} s"
    if isinstance(current, Waiting) and current.refused:
        return f"{current.refused}. No other workers came for {waited} (elasticity.wait_s)"
    return f"{state.num_usable} of at least {minimum} (elasticity.min_workers) for {waited} (elasticity.wait_s)"


def _for_group(state: Attempt) -> Wait:
    timeouts, ranks = state.config.timeouts, state.group.ranks
    queued_s = timeouts.later_s(len(ranks))
    stamps = [stamp for index, stamp in state.progress.stamps.items() if index in ranks]
    newest = _newest(state.current.since, stamps)
    if any(stamp.phase is Phase.RESTORING for stamp in stamps):
        message = f"the group to restore its state (timeouts.restore_s {timeouts.restore_s:g} s without progress)"
        return Wait(newest + timeouts.restore_s + queued_s, message, _fail_to_form(message))
    connecting_s = later_to_form_s(len(ranks))
    more = f" + {connecting_s:g} s for {count_text(len(ranks), 'rank')}" if connecting_s else ""
    message = f"the group to form and to build its model (timeouts.form_s {timeouts.form_s:g} s{more} without progress)"
    return Wait(newest + timeouts.form_s + connecting_s + queued_s, message, _fail_to_form(message))


def _fail_to_form(awaited: str) -> Expire:
    return _lose_group(IncidentCause.FORM_FAILED, f"the group did not form within {{}}: waited for {awaited}")


def _lose_group(cause: IncidentCause, reason: str) -> Expire:
    """Give up the group. `reason`: with {} in place of the duration."""
    return lambda turn, waited: losses.lose_group(turn, cause, "deadline", reason.format(waited))


def _starting(state: Attempt) -> list[ProgressStamp]:
    """List the stamps of the workers that are not warm yet."""
    starting = {worker.index for worker in state.pool.workers if not worker.warm}
    return [stamp for index, stamp in state.progress.starting.items() if index in starting]


def _newest(since: float, stamps: list[ProgressStamp]) -> float:
    return max([since, *(stamp.seen_at for stamp in stamps)])


# How the deadlines move


def shift_times(state: T, by_s: float) -> T:
    """The state after a jump of the wall clock by `by_s` seconds, which may be negative."""

    def move(name: str, at: float) -> float:
        return at + by_s if at and (is_time(name) or name in _TIMES_BY_KEY or name == "deadline") else at

    shifted: T = _shift(state, move)
    return shifted


def is_time(name: str) -> bool:
    """True if a field of this name holds a wall-clock time."""
    return name in _NAMES or name.endswith(_ENDINGS)


def extend_after_suspend(turn: Turn, *, is_reopened: bool) -> None:
    """Move the deadlines by the time in which the supervisor handled no event: it was suspended, had no CPU, or was
    restarted, and workers are not to blame for what it did not receive meanwhile.

    A turn that comes more than timeouts.absence_s after the last one is late. What a single late turn has missed is
    forgiven whole. If one turn after the other is late, absence_s of each counts, so a supervisor that is always slow
    still notices a worker that never answers. Deadlines of the world outside stay, such as the end of a node.

    Args:
        is_reopened: the supervisor was restarted. The journal of an attempt that only waits, for capacity say, does not
            say until when its predecessor lived, so nothing is forgiven then.
    """
    progress = turn.progress
    missed_s = turn.now - progress.last_event_at if progress.last_event_at else 0.0
    is_late = missed_s > turn.config.timeouts.absence_s
    only_waits = not turn.state.group_active and not turn.snapshots.requested
    if is_late and not (is_reopened and only_waits):
        _extend(turn, missed_s - turn.config.timeouts.absence_s if progress.is_late else missed_s)
    turn.progress = replace(turn.progress, last_event_at=turn.now, is_late=is_late)


def _extend(turn: Turn, by_s: float) -> None:
    settled_before = turn.now - by_s - max(turn.config.timeouts.gather_s, turn.config.timeouts.settle_s)

    def move(name: str, at: float) -> float:
        if name in _WAITED_FOR and (name != "warm_at" or at > settled_before):
            return min(turn.now, at + by_s)
        return at + by_s if name in _WAITED_UNTIL else at

    current = _shift(turn.current, move)
    turn.set_stage(replace(current, since=turn.current.since) if isinstance(current, Running) else current)
    turn.snapshots = replace(turn.snapshots, requested=_shift(turn.snapshots.requested, move, "requested"))
    turn.progress, turn.code, turn.pool = (_shift(part, move) for part in (turn.progress, turn.code, turn.pool))


def _shift(value: Any, move: Move, name: str = "") -> Any:
    """The value of the field `name` with all times in it moved. What does not change is the same object."""
    if is_dataclass(value):
        changes = {}
        for field in fields(value):
            part = getattr(value, field.name)
            if field.name not in _CHANGED_BY_OTHERS and (after := _shift(part, move, field.name)) is not part:
                changes[field.name] = after
        return replace(value, **changes) if changes else value  # type: ignore[type-var]
    if isinstance(value, float):
        after = move(name, value)
        return after if after != value else value
    if isinstance(value, AvoidedNode) and value.deadline is not None:  # of the target, it is never asked for
        return value.model_copy(update={"deadline": move("deadline", value.deadline)})
    if isinstance(value, tuple):
        parts = tuple(_shift(part, move, name) if is_dataclass(part) else part for part in value)
        return parts if any(after is not before for after, before in zip(parts, value, strict=True)) else value
    if isinstance(value, Table):
        table = Table(_shift(part, move) for part in value)
        return table if table != value else value
    if isinstance(value, (dict, IntMap)):
        items = {key: part if isinstance(part, tuple) else _shift(part, move, name) for key, part in value.items()}
        return type(value)(items)
    return value
