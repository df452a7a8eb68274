"""Durable checkpoints: the search for the one to start from, parts that workers have saved, commits, and which is the
newest.

    each rank       engine/state/saving.py          writes its part, and reports it once it is durable (SavedPart)
    here            keep_part, commit_whole         once the parts of all ranks are there: Commit
    supervisor      supervisor/checkpoints.py       checks their lengths and writes COMMIT.json: the checkpoint exists
    here            handle_commit                   it is the newest, and a group that waits for it goes on

A storage that does not answer is asked again until `checkpoint.wait_s` is over: an outage of seconds must not end a job
that waits for nothing else. So is one that has neither the newest checkpoint that is known nor a newer one: a mount is
missing, or the directory is another one. So is one that the supervisor reads and a rank does not: the mount of another
node is missing. Damaged and missing checkpoints are reported, and never silently replaced by step 0.

After wrong results only what is older than the last clean comparison of the replicas is trusted:

    checkpoint 40   comparison 50: equal   checkpoint 60   a bit flips   checkpoint 80   comparison 100: they differ
    trusted                                not trusted                   not trusted     back to 40
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt import forming
from shoal_service.core.attempt.memory_snapshots import best_source
from shoal_service.core.attempt.messages import CheckpointFound, Commit, ForgetDamaged, NoteCommit, StorageAway
from shoal_service.core.attempt.state import Attempt, FallingBack, Opening, Search, Stage, Starting
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events import CheckpointCommitted, CheckpointDamaged, CheckpointFailed, CheckpointFallback
from shoal_service.core.events.training import StorageAway as CheckpointStorageAway
from shoal_service.core.persistent import IntMap
from shoal_workers.contract import (
    CheckpointName,
    DamagePolicy,
    EndReason,
    ReplicasEqual,
    SavedPart,
    SaveFailed,
    backoff_s,
)

_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 15.0
"""Pauses between two requests to a storage that does not answer: 1, 2, 4, 8 and 15 s."""
_MOST_UNVERIFIED = 256


def handle_found(turn: Turn, event: CheckpointFound) -> None:
    if turn.stage not in (Stage.OPENING, Stage.FALLING_BACK):
        return  # the second answer to a repeated request
    for name, message in event.damaged:
        forget_damaged(turn, name, message)
    index = turn.checkpoints
    if event.name is not None and (event.name in index.damaged or index.is_distrusted(event.name)):
        distrust(turn, event.name)  # it was committed, or found damaged, while the search was on its way
        turn.find_checkpoint()
        return
    turn.checkpoints = replace(turn.checkpoints, expected=event.name)
    remember_newest(turn, event.name)
    newest, damaged = turn.checkpoints.newest, turn.checkpoints.damaged
    has_state = newest is not None or best_source(turn.state) is not None or turn.checkpoints.trusts_seed_only
    if damaged and not has_state and turn.target.spec.checkpoint.all_damaged is DamagePolicy.STOP:
        turn.end(EndReason.DAMAGED_CHECKPOINT, _describe_damage(turn.state))
        return
    if damaged or (turn.stage is Stage.FALLING_BACK and index.unreadable_since is None):
        turn.emit(CheckpointFallback(to=newest))
    if turn.stage is Stage.OPENING:
        turn.enter(Starting(since=turn.now))
    else:
        forming.plan_next(turn)


def describe_missing(expected: str | None, newest_there: CheckpointName | None) -> str:
    """Say why a storage is not the job's: it has neither the expected checkpoint nor a newer one. Empty if it has.

    Args:
        newest_there: the newest one with a commit marker, whether it is usable or not.
    """
    committed_name = CheckpointName.parse(expected or "")
    if committed_name is None or (newest_there is not None and newest_there >= committed_name):
        return ""
    has = f"its newest checkpoint is {newest_there}" if newest_there is not None else "it has no checkpoint"
    return f"{has}, and the job has committed {committed_name}"


def handle_failed_search(turn: Turn, event: StorageAway) -> None:
    """Repeat a search that failed, after a pause."""
    current = turn.current
    if not isinstance(current, (Opening, FallingBack)) or current.search.retry_at is not None:
        return  # another answer to a repeated request
    failures = current.search.num_failures + 1
    pause_s = backoff_s(failures, first_s=_FIRST_PAUSE_S, longest_s=_MAX_PAUSE_S)
    if failures == 1:
        turn.emit(CheckpointStorageAway(message=event.message, until=search_deadline(turn.state)))
    retry_at, is_missing = turn.now + pause_s, event.is_missing
    search = Search(num_failures=failures, error=event.message, retry_at=retry_at, is_missing=is_missing)
    turn.set_stage(replace(current, search=search))


def reads_storage(state: Attempt) -> bool:
    """True if the group was lost before it had restored its checkpoint."""
    is_from_storage = state.group.source is None and bool(state.group.restored or state.checkpoints.origin)
    return is_from_storage and not state.group.is_formed and not state.target.is_script


def await_readable(turn: Turn, message: str) -> None:
    """A rank cannot read the storage of the checkpoint to restore: search again after a pause, then form again."""
    since = turn.checkpoints.unreadable_since
    if since is None:
        since = turn.now
        turn.checkpoints = replace(turn.checkpoints, unreadable_since=since)
        turn.emit(CheckpointStorageAway(message=message, until=since + turn.target.spec.checkpoint.wait_s))
    pause_s = min(max(_FIRST_PAUSE_S, turn.now - since), _MAX_PAUSE_S)
    turn.enter(FallingBack(since=turn.now, search=Search(num_failures=1, error=message, retry_at=turn.now + pause_s)))


def search_again(turn: Turn) -> None:
    """Ask the storage again once the pause is over; end the attempt at the deadline."""
    current = turn.current
    if not isinstance(current, (Opening, FallingBack)):
        return
    if turn.now > search_deadline(turn.state):
        reason = EndReason.CHECKPOINTS_MISSING if current.search.is_missing else EndReason.STORAGE_FAILED
        turn.end(reason, _describe_overdue_search(turn.state, current.search, turn.now))
    elif current.search.retry_at is not None and turn.now >= current.search.retry_at:
        turn.set_stage(replace(current, search=replace(current.search, retry_at=None)))
        turn.find_checkpoint()


def search_deadline(state: Attempt) -> float:
    """Return the time at which the attempt ends if its search for a checkpoint has no answer."""
    return _waits_since(state) + state.target.spec.checkpoint.wait_s


def _waits_since(state: Attempt) -> float:
    since = state.checkpoints.unreadable_since
    return state.current.since if since is None else since


def describe_search(state: Attempt) -> str:
    """Say what the attempt waits for. The text stays the same while the storage fails in the same way."""
    root, current = state.config.checkpoint_root, state.current
    if isinstance(current, (Opening, FallingBack)) and current.search.error:
        return f"the checkpoint storage {root} does not answer and is asked again: {current.search.error}"
    return f"looking for checkpoints in {root}"


def _describe_overdue_search(state: Attempt, search: Search, now: float) -> str:
    root, limit_s = state.config.checkpoint_root, state.target.spec.checkpoint.wait_s
    waited = f"for {now - _waits_since(state):.0f} s (checkpoint.wait_s is {limit_s:g})"
    if search.is_missing:
        return (
            f"{root} was not the job's directory {waited}: {search.error}. The job does not start over by itself. Make "
            "its checkpoints available there, then `shoal retry`; or choose with `shoal take JOB STEP` from which step "
            "it goes on."
        )
    last = f" Last error: {search.error}" if search.error else ""
    return f"{root} did not answer {waited}.{last}"


def forget_damaged(turn: Turn, name: str, message: str) -> None:
    """Do not read this checkpoint again. Repeating the call is harmless."""
    index = turn.checkpoints
    if name in index.damaged:
        return
    turn.checkpoints = replace(
        index,
        damaged=(*index.damaged, name),
        unverified=tuple(other for other in index.unverified if other != name),
        newest=None if index.newest == name else index.newest,
    )
    turn.emit(CheckpointDamaged(name=name, message=message))
    turn.do(ForgetDamaged(name, message))


def _describe_damage(state: Attempt) -> str:
    damaged = state.checkpoints.damaged
    shown = ", ".join(damaged[-3:]) + (f" and {len(damaged) - 3} more" if len(damaged) > 3 else "")
    return (
        f"every checkpoint in {state.config.checkpoint_root} is damaged ({shown}), and checkpoint.all_damaged is stop: "
        "training does not start over without being asked. Submit the job again to train from step 0, or with "
        "checkpoint.all_damaged start_over."
    )


def keep_part(turn: Turn, part: SavedPart) -> None:
    """Keep a part that a rank has saved. It may arrive twice: in its own report and with the worker's exit, or again
    after a restart."""
    index = turn.checkpoints
    name = str(CheckpointName(part.step, turn.config.attempt, part.generation))
    if name == index.newest or name in (*index.committing, *index.failed):
        return
    parts = index.parts.get(name, IntMap()).with_item(part.rank, part)
    turn.checkpoints = replace(index, parts={**index.parts, name: parts})
    commit_whole(turn)


def commit_whole(turn: Turn) -> None:
    """Commit the checkpoints that have every part. While new code is on trial, its checkpoints wait: they are
    not wanted if it is rolled back."""
    is_on_trial = turn.code.trial is not None and turn.stage is Stage.RUNNING and not turn.state.is_finishing
    for name, parts in turn.checkpoints.parts.items():
        is_whole = len(parts) == next(iter(parts.values())).world_size
        if is_whole and not is_on_trial and name not in turn.checkpoints.committing:
            turn.checkpoints = replace(turn.checkpoints, committing=(*turn.checkpoints.committing, name))
            turn.do(Commit(name, tuple(parts[rank] for rank in sorted(parts))))


def is_part_missing(state: Attempt, index: int) -> bool:
    """True if this worker has left as planned, but has not reported its part of that step's checkpoint. A script has no
    such parts."""
    worker_exit = state.group.exits.get(index)
    if worker_exit is None or not worker_exit.is_planned or state.target.is_script:
        return False
    name = str(CheckpointName(worker_exit.step, state.config.attempt, state.group.generation))
    is_reported = worker_exit.rank in state.checkpoints.parts.get(name, {})
    is_of_group = state.group_active or state.stage is Stage.COMMITTING
    return is_of_group and not is_reported and not state.checkpoints.is_durable(worker_exit.step)


def _note_last_commit(turn: Turn, generation: int, step: int, error: str = "") -> None:
    """Report to the workers that wait for it that the checkpoint of the last step is committed, or could not be."""
    state = turn.state
    if generation == state.group.generation and step == state.history.total_steps:
        turn.do(*(NoteCommit(index, generation, step, error) for index in state.in_run))


def handle_commit(turn: Turn, name: str, generation: int, step: int) -> None:
    _forget_parts(turn, name)
    if turn.checkpoints.is_distrusted(name):  # its commit was in flight when the state was found wrong
        distrust(turn, name)
        return
    remember_newest(turn, name)
    _note_unverified(turn, name)
    if turn.history.skip_steps and step >= max(turn.history.skip_steps):
        turn.budgets = replace(turn.budgets, rollbacks=0)
    turn.emit(CheckpointCommitted(name=name, step=step, generation=generation))
    _note_last_commit(turn, generation, step)


def handle_failed_commit(turn: Turn, name: str, generation: int, message: str) -> None:
    _forget_parts(turn, name)
    turn.checkpoints = replace(turn.checkpoints, failed=(*turn.checkpoints.failed, name))
    turn.emit(CheckpointFailed(name=name, generation=generation, message=message))
    _note_last_commit(turn, generation, _step(name), message)


def remember_newest(turn: Turn, name: str | None) -> None:
    """Remember this checkpoint if it is the newest that can be restored. Commits and searches of the storage may be
    answered in any order."""
    index = turn.checkpoints
    this, newest = CheckpointName.parse(name or ""), CheckpointName.parse(index.newest or "")
    if this is not None and name not in index.damaged and (newest is None or this > newest):
        turn.checkpoints = replace(index, newest=name, expected=name)


def _forget_parts(turn: Turn, name: str) -> None:
    committing = tuple(other for other in turn.checkpoints.committing if other != name)
    parts = {other: parts for other, parts in turn.checkpoints.parts.items() if other != name}
    turn.checkpoints = replace(turn.checkpoints, committing=committing, parts=parts)


def handle_failed_save(turn: Turn, item: SaveFailed) -> None:
    name = str(CheckpointName(item.step, turn.config.attempt, item.generation))
    parts = {other: parts for other, parts in turn.checkpoints.parts.items() if other != name}
    turn.checkpoints = replace(turn.checkpoints, parts=parts)
    if name not in turn.checkpoints.failed:
        turn.checkpoints = replace(turn.checkpoints, failed=(*turn.checkpoints.failed, name))
        turn.emit(
            CheckpointFailed(
                name=name,
                generation=item.generation,
                rank=item.rank,
                step=item.step,
                message=item.error,
                stalled=item.is_stalled,
            )
        )


def trust_equal_replicas(turn: Turn, item: ReplicasEqual) -> None:
    """The replicas were compared and are equal, so the state of this step and of all earlier ones is trusted."""
    index = turn.checkpoints
    turn.checkpoints = replace(
        index,
        clean_step=max(item.step, index.clean_step or 0),
        verified_step=max(item.step, index.verified_step or 0),
        unverified=tuple(name for name in index.unverified if _step(name) > item.step),
    )


def note_formed_group(turn: Turn, start_step: int) -> None:
    """A group has formed. If it has read a checkpoint or begun from the seed, all of its ranks hold the same state."""
    turn.checkpoints = replace(turn.checkpoints, unreadable_since=None)
    if turn.group.source is None or turn.checkpoints.clean_step is None:
        turn.checkpoints = replace(turn.checkpoints, clean_step=start_step)


def _note_unverified(turn: Turn, name: str) -> None:
    """Note a committed checkpoint that no comparison of the replicas covers yet."""
    index = turn.checkpoints
    if _step(name) > (index.clean_step or 0) and name not in index.unverified:
        turn.checkpoints = replace(index, unverified=(*index.unverified, name)[-_MOST_UNVERIFIED:])


def distrust(turn: Turn, name: str) -> None:
    """Do not read this committed checkpoint again, because the state was found wrong later."""
    index = turn.checkpoints
    if name in index.damaged:
        return
    assert index.distrusted is not None
    message = f"not trusted: the state was found wrong later, and step {index.distrusted[1]} is the last that was not"
    turn.checkpoints = replace(index, must_search=index.must_search or index.newest == name)
    forget_damaged(turn, name, message)


def distrust_later_than(turn: Turn, clean_step: int) -> None:
    """Do not read checkpoints of later steps any more, nor those that this generation commits from now on."""
    turn.checkpoints = replace(turn.checkpoints, distrusted=(turn.group.generation, clean_step))
    for name in turn.checkpoints.unverified:
        if turn.checkpoints.is_distrusted(name):
            distrust(turn, name)


def _step(name: str) -> int:
    parsed = CheckpointName.parse(name)
    return parsed.step if parsed is not None else 0
