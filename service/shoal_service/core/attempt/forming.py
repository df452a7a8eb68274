"""5 FORM: when the next group forms, from which state, and with which proof of its layout.

Which workers exist: they are started, replaced and dropped here. It never assigns a rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from shoal_service.core.attempt import code_update, hangs, memory_snapshots, placement
from shoal_service.core.attempt.memory_snapshots import best_source
from shoal_service.core.attempt.messages import Run
from shoal_service.core.attempt.placement import Choice, choose, is_settled, machine_of, next_workers
from shoal_service.core.attempt.scripts import find_rules
from shoal_service.core.attempt.state import Attempt, AvoidedNode, Forming, Group, GroupAfter, Stage, Waiting, Worker
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.events import (
    GenerationForming,
    JobWaiting,
    LayoutProven,
    LayoutRefused,
    WorkerLeaving,
    WorkerStarted,
    WorkerStartFailed,
)
from shoal_service.core.persistent import IntMap
from shoal_service.core.quantities import count_text
from shoal_workers.contract import (
    Assignment,
    EndReason,
    ErrorClass,
    ErrorReport,
    Layout,
    LayoutProof,
    Origin,
    ParallelismSpec,
    PreemptionNotice,
    ProofDemand,
    ProofOutcome,
    WorkerInfo,
    backoff_s,
    changes,
    find_proof,
    next_generation,
)


def consider(turn: Turn) -> None:
    """Form a group once it is time. Acts in STARTING and WAITING only."""
    if turn.stage in (Stage.STARTING, Stage.WAITING):
        chosen = next_workers(turn.state, turn.now)
        if readiness(turn.state, len(chosen), turn.now):
            form(turn, chosen)
        elif isinstance(turn.current, Waiting) and turn.current.refused:
            turn.set_stage(replace(turn.current, refused=""))


def readiness(state: Attempt, num_workers: int, now: float) -> Decision:
    """Decide if a group of `num_workers` forms now: all granted workers are usable, or enough are and the others have
    had their time. The reason is the status message of a waiting job, so it must not change with every tick."""
    minimum = max(1, state.target.min_workers)
    if num_workers < minimum:
        rest = "waiting for capacity" if state.target.granted < minimum else "the others are starting"
        return Decision(False, f"{num_workers} of {count_text(minimum, 'worker')} ready; {rest}")
    if now < state.budgets.form_not_before:
        fruitless = count_text(state.budgets.fruitless, "re-formation")
        reason = f"{fruitless} in a row {find_rules(state).no_progress}"
        if not state.target.is_script:
            reason += f", {count_text(state.budgets.last_saves, 'save')} of the last step failed"
        return Decision(False, f"waits before the next try: {reason}")
    for awaited in (memory_snapshots.is_waiting(state, now), memory_snapshots.are_awaited(state, now)):
        if awaited:
            return Decision(False, awaited.reason)
    granted = state.target.granted
    if num_workers >= granted or is_settled(state, now):
        return Decision(True, f"{num_workers} of {count_text(granted, 'worker')} ready")
    return Decision(False, f"{num_workers} of {count_text(granted, 'worker')} ready; waiting for the others to start")


def plan_next(turn: Turn) -> None:
    """Form the next group now, or wait for workers, after a group that may be followed by another."""
    code_update.turn_over(turn)
    state = turn.state
    if memory_snapshots.is_worth_waiting(state):
        memory_snapshots.start_waiting(turn)
        return
    chosen = next_workers(state, turn.now)
    can_form = len(chosen) >= max(1, state.target.min_workers) and turn.now >= state.budgets.form_not_before
    if state.target.saves_and_ends:
        best = best_source(state)
        if best is None or best.step <= state.checkpoints.durable_step or not can_form:
            turn.end_after_save()
            return
        # the snapshot is newer than the checkpoint: continue from it, and pause at the next step boundary
    if can_form and memory_snapshots.are_awaited(state, turn.now):
        turn.enter(Waiting(since=turn.now))  # `consider` forms the group once they are reported
    elif can_form:
        form(turn, chosen)
    else:
        turn.budgets = replace(turn.budgets, failed_starts=0)  # those of a group that ran do not end a wait
        turn.enter(Waiting(since=turn.now))
        _emit_waiting(turn, len(chosen))


def form(turn: Turn, chosen: Sequence[Worker]) -> None:
    """Form the next group: send `run` of a new generation to its workers; the others stay warm. If the group does not
    fit into the memory of its nodes, wait for other workers. `chosen` has the workers in the usual order."""
    memory_snapshots.stop_waiting(turn)
    state = turn.state
    choice = choose(state, chosen, turn.now, turn.plan)
    if choice.refusal:
        _refuse(turn, choice)
        return
    generation = next_generation(state.group.generation, state.life)
    chosen, layout = choice.workers, choice.planned.layout
    infos = [worker.info for worker in chosen if worker.info is not None]
    memory = best_source(state, chosen) if state.target.keeps_snapshots else None
    machines, settings = tuple(machine_of(info) for info in infos), state.target.settings
    checkpoint_url = _find_checkpoint_url(state)
    collective_timeout_s = hangs.collective_timeout_s(state)
    node_ids = [info.node_id for info in infos]
    node_ranks = {node_id: number for number, node_id in enumerate(dict.fromkeys(node_ids))}
    num_on_node = Counter[str]()
    for rank, (worker, buddy) in enumerate(zip(chosen, choice.buddies, strict=True)):
        turn.pool = turn.pool.with_worker(replace(worker, in_run=True))
        assignment = Assignment(
            job_id=state.config.job_id,
            attempt=state.config.attempt,
            life=state.life,
            generation=generation,
            rank=rank,
            node_rank=node_ranks[node_ids[rank]],
            local_rank=num_on_node[node_ids[rank]],
            layout=layout,
            store_host=infos[0].node_ip,
            store_port=infos[0].store_port,
            restore_from=checkpoint_url,
            restore_snapshot=memory,
            buddy=buddy,
            is_recovery=state.incident is not None,
            settings=settings,
            standing=state.history.standing,
            skip_steps=state.history.skip_steps,
            proof=choose_proof_demand(state, layout),
            commit_timeout_s=state.config.timeouts.commit_s,
            collective_timeout_s=collective_timeout_s,
        )
        num_on_node[node_ids[rank]] += 1
        turn.do(Run(worker.index, assignment))
    source, start_step = find_rules(state).find_source(state, memory, checkpoint_url)
    before = state.group.ranks
    if state.incident is not None:
        after = GroupAfter(
            forming_at=turn.now,
            num_workers=len(chosen),
            layout=state.target.describe_layout(layout),
            num_spares=sum(worker.index not in before for worker in chosen) if before else 0,
            state_source=source,
        )
        turn.incident = replace(state.incident, after=after)
        turn.show_incident()
    has_trained = state.group.has_trained or (state.group.is_formed and state.progress.step > state.group.start_step)
    is_same = layout == state.group.layout and {w.index for w in chosen} == set(state.group.workers)
    turn.group = Group(
        generation=generation,
        workers=tuple(worker.index for worker in chosen),
        nodes=tuple(info.node_id for info in infos),
        machines=machines,
        layout=layout,
        levels=choice.levels,
        planned_by=state.target.spec.parallelism,
        settings=settings,
        changes=(
            *state.group.changes,  # of a group that was lost before it formed
            *(() if state.group.settings is None else changes(state.group.settings, settings)),
        ),
        source=memory,
        restored=state.checkpoints.newest,
        is_start_known=not state.target.is_script,
        has_trained=has_trained and is_same,
    )
    _forget_last_group(turn)
    memory_snapshots.note_workers_without_memory(turn, chosen)
    turn.enter(Forming(since=turn.now))
    turn.emit(
        GenerationForming(
            generation=generation,
            workers=len(chosen),
            layout=state.target.describe_layout(layout),
            reason=choice.planned.reason,
            source=source,
            restore=state.checkpoints.newest or checkpoint_url,
            step=start_step,
            remark=choice.remark,
        )
    )


def _find_checkpoint_url(state: Attempt) -> str | None:
    """Return the URL of the job's newest checkpoint, or else of the checkpoint of another job from which it goes on.
    None if there is neither, or for a script."""
    newest, origin = state.checkpoints.newest, state.target.spec.continue_from
    if state.target.is_script:
        return None
    if newest is None:
        return origin.url if origin is not None else None
    return f"{state.config.checkpoint_root.rstrip('/')}/{newest}"


def _refuse(turn: Turn, choice: Choice) -> None:
    """Wait for other workers, and report why once."""
    current = turn.current
    if not isinstance(current, Waiting):
        turn.enter(Waiting(since=turn.now, refused=choice.refusal))
    else:
        turn.set_stage(replace(current, refused=choice.refusal))
    if not isinstance(current, Waiting) or not current.refused:
        _emit_waiting(turn, len(choice.workers), reason=choice.refusal)


def _emit_waiting(turn: Turn, warm: int, **reason: str) -> None:
    until = turn.now + turn.target.spec.elasticity.wait_s
    turn.emit(JobWaiting(warm=warm, min_workers=turn.target.min_workers, until=until, **reason))


def _forget_last_group(turn: Turn) -> None:
    """Forget what only the last group made use of: its snapshots are overwritten from now on, and the checkpoint parts
    that it has saved will not become whole."""
    turn.snapshots = replace(turn.snapshots, requested=IntMap(), reported=IntMap())
    turn.progress = replace(turn.progress, stamps={}, slow_steps={}, snapshots=None, stopped={})
    committing = turn.checkpoints.committing
    parts = {name: parts for name, parts in turn.checkpoints.parts.items() if name in committing}
    turn.checkpoints = replace(turn.checkpoints, parts=parts)


def choose_proof_demand(state: Attempt, layout: Layout) -> ProofDemand:
    """Return which proof of its layout the next group needs. The data axes need no plan, so they need no proof."""
    if not layout.planned_axes or find_proof(layout, state.history.proofs) is not None:
        return ProofDemand.NONE
    if not isinstance(state.target.spec.parallelism, ParallelismSpec):
        return ProofDemand.REQUIRED
    return ProofDemand.IF_POSSIBLE


def keep_proof(turn: Turn, proof: LayoutProof | None) -> None:
    """Keep the proof of the layout of a group that has formed."""
    if proof is None:
        return
    turn.history = turn.history.with_proof(proof)
    turn.emit(
        LayoutProven(
            layout=proof.layout.describe(),
            outcome=proof.outcome,
            difference=proof.difference,
            seconds=proof.seconds,
            cached=proof.is_cached,
            message=proof.words,
        )
    )


def note_refused_layout(turn: Turn, message: str) -> bool:
    """Note that the group has refused its layout. Return True if another group may follow."""
    layout = turn.group.layout
    assert layout is not None, "a group has a layout"
    turn.history = turn.history.with_proof(LayoutProof(layout=layout, outcome=ProofOutcome.REFUSED, words=message))
    turn.emit(LayoutRefused(layout=layout.describe(), message=message))
    is_fixed = isinstance(turn.group.planned_by, ParallelismSpec)
    return turn.history.has_formed or not is_fixed


_REPLENISHING = (Stage.STARTING, Stage.WAITING, Stage.RUNNING)
"""Stages in which missing workers are started. Not while a group re-forms, nor before its first step: a starting worker
would slow the survivors down."""


def handle_warm_worker(turn: Turn, worker: Worker, info: WorkerInfo) -> None:
    turn.pool = turn.pool.with_worker(replace(worker, info=info, warm_at=turn.now))
    turn.budgets = replace(turn.budgets, failed_starts=0)
    turn.emit(
        WorkerStarted(
            worker_id=info.worker_id, pid=info.pid, node_id=info.node_id, node_ip=info.node_ip, rack=info.rack
        )
    )
    memory_snapshots.ask_if_useful(turn, worker.index)  # it may serve what workers before it have left on its node


def note_unreachable(turn: Turn, worker: Worker) -> None:
    """Note that calls to a worker fail. This is not a failure yet: the error may be transient. See
    Timeouts.unreachable_s."""
    if worker.warm and worker.unreachable_since is None:
        turn.pool = turn.pool.with_worker(replace(worker, unreachable_since=turn.now))


def note_answer(turn: Turn, index: int) -> None:
    """Note that a worker has answered, so an error before was transient. If it could not be asked for its snapshots
    before, it is asked now."""
    worker = turn.pool.worker(index)
    if worker is not None and worker.unreachable_since is not None:
        turn.pool = turn.pool.with_worker(replace(worker, unreachable_since=None))
        if not worker.in_run and index not in turn.group.exits:
            memory_snapshots.ask_if_useful(turn, index)


def handle_failed_start(turn: Turn, worker: Worker, error: ErrorReport) -> None:
    """The task could not be loaded in a worker. Before the first group the job fails. Later only this worker is
    dropped; at any time, if the reason is outside the task's code."""
    if code_update.refuse_if_part_of_update(turn, worker, f"a worker could not load it: {error.sentence}"):
        return
    if error.error_class is not ErrorClass.PLAIN:
        message = f"{error.type}: {error.message}"
        turn.emit(WorkerStartFailed(worker_id=worker.worker_id, error=message))
        turn.kill(worker.index, "it could not start")
        handle_death_at_start(turn, worker, message)
    elif not turn.history.has_formed:
        failure = error.as_failure(ranks=(), step=0)
        reason = EndReason.USER_ERROR if error.origin is Origin.TASK else EndReason.INTERNAL
        turn.end(reason, failure.sentence, failure)
    else:
        turn.emit(WorkerStartFailed(worker_id=worker.worker_id, error=error.sentence))
        turn.kill(worker.index, "the task could not be loaded in it")
        failed = turn.budgets.failed_starts + 1
        turn.budgets = replace(turn.budgets, failed_starts=failed, grow_not_before=turn.now + 30.0)


def handle_death_at_start(turn: Turn, worker: Worker, message: str) -> None:
    """A worker died before it was warm. Too many in a row end the attempt if no group runs; while one runs, the next
    start is delayed longer each time."""
    if code_update.refuse_if_part_of_update(turn, worker, f"a worker ended before it was warm: {message}"):
        return
    failed = turn.budgets.failed_starts + 1
    turn.budgets = replace(turn.budgets, failed_starts=failed)
    if turn.stage is Stage.RUNNING:
        turn.budgets = replace(turn.budgets, grow_not_before=turn.now + backoff_s(failed, first_s=2.0, longest_s=60.0))
    limit = 3 * max(1, turn.target.granted)
    if failed >= limit and turn.stage in (Stage.STARTING, Stage.WAITING):
        turn.end(
            EndReason.START_FAILED,
            f"{count_text(failed, 'worker')} in a row died while starting; the last one: {message}",
        )


def handle_notice(turn: Turn, index: int, notice: PreemptionNotice) -> None:
    """The worker, not its node, will be taken away soon: it got SIGTERM or a preemption notice."""
    worker = turn.pool.worker(index)
    if worker is None or worker.info is None or worker.leave is not None:
        return
    deadline = turn.now + notice.grace_s
    leave = AvoidedNode(node_id=worker.info.node_id, reason=notice.reason, deadline=deadline)
    turn.pool = turn.pool.with_worker(replace(worker, leave=leave))
    rank, grace_s = turn.group.rank_of(index), notice.grace_s
    turn.emit(WorkerLeaving(worker_id=worker.worker_id, rank=rank, reason=notice.reason, grace_s=grace_s))


def replenish(turn: Turn) -> None:
    """Start the workers that the target lacks. Drop those that have to leave and those beyond the target, the newest
    first, but none of the group."""
    state = turn.state
    is_before_first_step = state.stage is Stage.RUNNING and state.incident is not None
    if state.stage not in _REPLENISHING or (is_before_first_step and not state.has_run_long(turn.now)):
        return
    is_trial = state.code.trial is not None  # until it is over, the workers with the code before need their places
    if not is_trial and (not state.budgets.failed_starts or turn.now >= state.budgets.grow_not_before):
        _start_missing(turn)
    if (
        state.stage is Stage.RUNNING
        and state.group.source is not None
        and state.progress.step == state.group.start_step
    ):
        return  # until the new group has its own snapshot, the workers that leave may be needed to serve the old one
    _drop_leavers(turn)
    _drop_surplus(turn)
    _drop_other_code(turn)


def _drop_leavers(turn: Turn) -> None:
    """Drop the workers outside the group that have to leave. While the attempt waits they may still serve their
    snapshots, so they stay until their deadline."""
    state = turn.state
    for worker in _spare(state):
        leave = placement.find_leave(state, worker)
        if leave is None and worker.slow_until is None:
            continue
        if state.stage is not Stage.WAITING or placement.is_due(state, worker, turn.now):
            reason = leave.reason if leave is not None else "it computed too slowly for the others"
            turn.release(worker, reason)


def _start_missing(turn: Turn) -> None:
    state = turn.state
    slow = {p.node_id for p in state.pool.workers if p.slow_until is not None or p.left_out}
    avoided = tuple(sorted({node.node_id for node in state.target.avoided} | slow))
    to_reach, suspected = memory_snapshots.nodes_to_reach(state), state.target.suspected
    for node_id in to_reach:
        if node_id in suspected:
            turn.start_worker(state.code.current, only_on=node_id)
    to_train_on = deque(node_id for node_id in to_reach if node_id not in suspected)
    num_missing = state.target.num_workers - len(_staying(state))
    tp = 1
    if num_missing > 0:
        refused = state.history.refused_layouts
        tp = turn.plan(state.target.spec, state.target.granted, state.config.profile, (), refused).layout.tp
    for still_missing in range(num_missing, 0, -1):
        turn.start_worker(
            state.code.current,
            only_on=to_train_on.popleft() if to_train_on else "",
            avoids=avoided,
            touches_memory=not state.health.is_memory_scarce,
            num_missing=still_missing,
            tp=tp,
        )


def _drop_surplus(turn: Turn) -> None:
    state = turn.state
    staying = _staying(state)
    surplus = max(0, len(staying) - state.target.num_workers)
    if not surplus:
        return
    indexes, ranks = {p.index for p in staying}, state.group.ranks
    spare = [p for p in _spare(state) if p.index in indexes]
    for worker in sorted(spare, key=lambda p: (p.warm and not p.left_out, p.index in ranks, -p.index))[:surplus]:
        turn.release(worker, "more workers than granted")


def _drop_other_code(turn: Turn) -> None:
    """Drop the workers with a version of the code that is neither the current one nor needed by an update."""
    state, update = turn.state, turn.code.update
    kept = {state.code.current} | ({update.version, update.before} if update is not None else set())
    for worker in _spare(state) if state.stage is Stage.RUNNING else ():
        if worker.code not in kept:
            turn.release(worker, "it has another version of the code")


def _staying(state: Attempt) -> list[Worker]:
    """List the workers that count for the target; the others are to be replaced. A worker that is left out is expected
    to answer again, unless no group can form without it."""
    is_short = state.stage is Stage.WAITING and state.num_usable < state.target.min_workers
    leaving = placement.leaving_nodes(state)
    return [p for p in state.workers if not placement.has_to_leave(p, leaving) and not (is_short and p.left_out)]


def _spare(state: Attempt) -> list[Worker]:
    """List the workers outside the group. A worker that has left `run` belongs to the group: it may still have reports
    to send."""
    group: Collection[int] = state.group.ranks if state.group_active else ()
    return [worker for worker in state.pool.workers if not worker.in_run and worker.index not in group]
