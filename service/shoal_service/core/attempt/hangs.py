"""Hangs: no rank makes progress for longer than the group's own pace allows. Decisions are pure; `keep_progress`
and `add_step_time` keep what they are made from.

    threshold = max(health.hang_factor x median step, SLOWEST_FACTOR x slowest step, health.hang_floor_s)
                not measured yet (first step of new workers or of a new layout, validation): at least PATIENT_S
                a script: at least SCRIPT_S, and script.grace_s besides once it was asked to end
    newest progress of any rank is older than that     ->  the group hangs
    a rank does not leave `run` when interrupted       ->  it is at fault, and killed (see `deadlines`)
    all ranks leave                                    ->  the rank that stood still first is named, none is killed
    ... and the group hangs again at the same step     ->  the rank named then is replaced

One rank that stands still stops all the others at their next collective. So the newest progress decides whether the
group hangs, and the oldest which rank is named.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shoal_service.core.attempt.state import Attempt, GroupProgress, Hang, ProgressStamp, Stage, poll_wait_s
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_workers.contract import Phase, Progress

MEDIAN_OF = 32
"""Number of the last steps whose durations count for the median."""
SLOWEST_FACTOR = 4.0
"""A group may stand still for this many times its slowest step."""
PATIENT_S = 30.0
"""Least threshold while the group does something that was not measured yet: compilation, the first touch of memory,
validation. Also the most that a slow step may add to the threshold."""
_MEASURED = 5
"""Number of measured steps from which on the measured times decide."""
_BLOCK, _BLOCKS = 64, 16
"""The slowest of the last 1,024 steps, which is their p99.9, is found from the maxima of 16 blocks."""
SCRIPT_S = 300.0
"""Least threshold of a script. It shows less of its progress than a task: that it uses CPU time, writes, or reports."""
_SHOWN_S, _SHOWN_SHARE = 1.0, 1 / 3
"""A standstill is shown once it has lasted this long, and for this share of the threshold."""
SHOWN_SCRIPT_S = 30.0
"""A standstill of a script is shown after this time at the latest: most are calls that one rank makes alone."""

_STAGING_S = 30.0
_SAVING = (Phase.SAVING, Phase.COMMITTING)


@dataclass(frozen=True, slots=True)
class HangDecision(Decision):
    hang: Hang | None = None
    """The hang; None if the group does not hang."""


def keep_progress(turn: Turn, reports: Iterable[tuple[int, Progress]]) -> None:
    """Keep what the polls of workers have answered: the time of each answer, and a new stamp if the progress counter of
    this generation has changed."""
    answered_at, stamps = dict(turn.progress.answered_at), dict(turn.progress.stamps)
    ranks = turn.group.ranks
    for index, progress in reports:
        answered_at[index] = turn.now
        worker = turn.pool.worker(index)
        if worker is not None and not worker.warm:
            _note_preparation(turn, index, progress)
        if progress.generation != turn.group.generation or index not in ranks:
            continue
        known = stamps.get(index)
        if known is None or progress.counter != known.counter or progress.step != known.step:
            stamps[index] = _stamp(progress, turn.now)
    turn.progress = replace(turn.progress, answered_at=answered_at, stamps=stamps)


def _note_preparation(turn: Turn, index: int, progress: Progress) -> None:
    """Note that a worker which is not warm yet has made progress: this moves the deadline of the start."""
    known = turn.progress.starting.get(index)
    if known is None or progress.counter != known.counter:
        kept = {i: stamp for i, stamp in turn.progress.starting.items() if turn.pool.worker(i) is not None}
        turn.progress = replace(turn.progress, starting={**kept, index: _stamp(progress, turn.now)})


def _stamp(progress: Progress, now: float) -> ProgressStamp:
    return ProgressStamp(
        counter=progress.counter,
        step=progress.step,
        phase=progress.phase,
        at=progress.at,
        seen_at=now - progress.stalled_s,
    )


def add_step_time(progress: GroupProgress, step_s: float, *, is_first: bool) -> GroupProgress:
    """Add the duration of a step. `is_first`: it is the first step of its generation, which may have compiled and
    touched new memory, so it does not count for the slowest steps."""
    times = (*progress.step_times, step_s)[-MEDIAN_OF:]
    if is_first:
        return replace(progress, step_times=times)
    number = progress.num_measured
    blocks = progress.slowest_steps
    if number % _BLOCK == 0 or not blocks:
        blocks = (*blocks, step_s)[-_BLOCKS:]
    else:
        blocks = (*blocks[:-1], max(blocks[-1], step_s))
    return replace(progress, step_times=times, slowest_steps=blocks, num_measured=number + 1)


def find_hang(state: Attempt, now: float) -> HangDecision:
    """Decide if no rank of a running group has made progress for too long, and which stood still first."""
    in_run = state.in_run
    if state.stage not in (Stage.RUNNING, Stage.SWITCHING) or not in_run:
        return HangDecision(False, "no group is running")
    newest = newest_progress(state)
    threshold, why = _threshold(state, in_run)
    if now - newest <= threshold:
        return HangDecision(False, f"a rank made progress {now - newest:.1f} s ago ({why})")
    index = min(in_run, key=lambda i: _stood_still_at(state, i))
    reason = (
        f"no rank made progress for {now - newest:.1f} s ({why}); "
        f"rank {state.group.rank_of(index)} stood still first{_where(state, index)}"
    )
    known = state.health.hang
    is_repeated = known is not None and known.step == state.progress.step
    return HangDecision(True, reason, Hang(step=state.progress.step, index=index, is_repeated=is_repeated))


def find_standstill(state: Attempt, now: float) -> Decision:
    """Decide whether to show that no rank has made progress for a while. The reason names the rank that is waited for,
    and when the group counts as hung."""
    in_run = state.in_run
    if state.stage is not Stage.RUNNING or not in_run or not state.progress.stamps:
        return Decision(False, "no group is running")
    stood_s, (threshold, _) = now - newest_progress(state), _threshold(state, in_run)
    shown_after_s = max(_SHOWN_S, _SHOWN_SHARE * threshold)
    if state.target.is_script:
        shown_after_s = min(shown_after_s, SHOWN_SCRIPT_S)
    if stood_s < shown_after_s:
        return Decision(False, "the group makes progress")
    index = min(in_run, key=lambda i: _stood_still_at(state, i))
    return Decision(
        True,
        f"rank {state.group.rank_of(index)} has made no progress for {stood_s:.1f} s{_where(state, index)}; "
        f"the group counts as hung after {threshold:.1f} s",
    )


def threshold_s(state: Attempt) -> float:
    """Seconds that the group may stand still now before it counts as hung."""
    return _threshold(state, state.in_run)[0]


def find_unanswering(state: Attempt, now: float) -> frozenset[int]:
    """Find the workers of the group that have left one poll after the other unanswered, so an interrupt would not reach
    them either. Empty if all workers have: then the supervisor itself was cut off."""
    ages = {i: now - state.progress.answered_at[i] for i in state.group.workers if i in state.progress.answered_at}
    limit_s = silent_s(state)
    silent = frozenset(i for i, age in ages.items() if age >= limit_s)
    return silent if len(silent) < len(state.group.workers) else frozenset()


def silent_s(state: Attempt) -> float:
    """Seconds of unanswered polls after which a worker is silent: `timeouts.silent_s`, and longer for a large group,
    because its workers are polled less often and their answers queue up."""
    num_workers = len(state.group.workers)
    timeouts = state.config.timeouts
    return timeouts.silent_s + poll_wait_s(num_workers) - poll_wait_s(1) + timeouts.later_s(num_workers)


def collective_timeout_s(state: Attempt) -> float:
    """Timeout of the next group's collectives, in seconds. It ends later than a hang would be found."""
    health = state.target.spec.health
    slowest = max(state.progress.step_times, default=0.0)
    return max(state.config.timeouts.collective_s, 2 * health.hang_factor * slowest, 2 * health.hang_floor_s)


def _threshold(state: Attempt, in_run: tuple[int, ...]) -> tuple[float, str]:
    health = state.target.spec.health
    if state.target.is_script:
        return _script_threshold(state)
    if any(state.progress.stamps[i].phase in _SAVING for i in in_run if i in state.progress.stamps):
        # A save ends after timeouts.save_s without progress; the rest is the copy into the staging memory.
        limit_s = state.config.timeouts.save_s + max(health.hang_floor_s, _STAGING_S)
        return limit_s, f"while it saves at most {limit_s:g} s (timeouts.save_s {state.config.timeouts.save_s:g} s)"
    if not state.progress.stamps:
        threshold = max(health.hang_floor_s, state.config.timeouts.form_s)
        return threshold, f"no progress was reported since the group formed; at most {threshold:g} s"
    median = statistics.median(state.progress.step_times) if state.progress.step_times else 0.0
    slowest = max(state.progress.slowest_steps, default=0.0)
    floor, why = health.hang_floor_s, f"at least health.hang_floor_s {health.hang_floor_s:g} s"
    unmeasured = _unmeasured(state, in_run)
    if unmeasured and floor < PATIENT_S:
        floor, why = PATIENT_S, f"at least {PATIENT_S:g} s: {unmeasured.reason}"
    threshold = max(health.hang_factor * median, min(SLOWEST_FACTOR * slowest, PATIENT_S), floor)
    return threshold, (
        f"health.hang_factor {health.hang_factor:g} x {median:.3g} s, {SLOWEST_FACTOR:g} x the slowest step of "
        f"{slowest:.3g} s, {why}"
    )


def _script_threshold(state: Attempt) -> tuple[float, str]:
    """At least SCRIPT_S, and more if the script reports slow steps, or was asked to end."""
    health, times = state.target.spec.health, state.progress.step_times
    floor, why = SCRIPT_S, f"a script at least {SCRIPT_S:g} s"
    if health.hang_floor_s > floor:
        floor, why = health.hang_floor_s, f"at least health.hang_floor_s {health.hang_floor_s:g} s"
    median = statistics.median(times) if times else 0.0
    if health.hang_factor * median > floor:
        floor, why = health.hang_factor * median, f"health.hang_factor {health.hang_factor:g} x {median:.3g} s"
    grace_s = state.target.grace_s if state.stage is Stage.SWITCHING else 0.0
    return floor + grace_s, why + (f", and script.grace_s {grace_s:g} s" if grace_s else "")


def _unmeasured(state: Attempt, in_run: tuple[int, ...]) -> Decision:
    """Decide if the group does something whose time is not known from the steps before."""
    if any(state.progress.stamps[i].phase is Phase.VALIDATING for i in in_run if i in state.progress.stamps):
        return Decision(True, "it validates")
    if state.progress.step <= state.group.start_step and not state.group.has_trained:
        return Decision(True, "it is the first step of this group")
    measured = state.progress.num_measured
    return Decision(measured < _MEASURED, f"{measured} of {_MEASURED} steps are measured")


def newest_progress(state: Attempt) -> float:
    """Wall-clock time at which any rank of the group last made progress."""
    return max([state.progress.advanced_at, *(stamp.seen_at for stamp in state.progress.stamps.values())])


def _stood_still_at(state: Attempt, index: int) -> tuple[int, float]:
    """Sort key by which the worker that stood still first is the least: the earlier step, then the earlier time by the
    worker's own clock, since polls are too coarse."""
    last = state.progress.stamps.get(index)
    if last is None:
        return -1, 0.0
    return 0 if state.target.is_script else last.step, last.at  # only rank 0 of a script tells its step


def _where(state: Attempt, index: int) -> str:
    last = state.progress.stamps.get(index)
    return f", in {last.phase} after step {last.step}" if last is not None else ""
