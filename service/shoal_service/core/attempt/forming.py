"""5 FORM: when the next group forms, from which state, and with which proof of its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal_service.core.attempt import code_update, hangs, memory_snapshots
from shoal_service.core.attempt.commands import Run
from shoal_service.core.attempt.memory_snapshots import best_source
from shoal_service.core.attempt.placement import Choice, choose, covered_ranks, is_settled, machine_of, next_workers
from shoal_service.core.attempt.scripts import find_rules
from shoal_service.core.attempt.state.attempt import Attempt, Group, GroupAfter
from shoal_service.core.attempt.state.stages import Forming, Stage, Waiting
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.events.job import JobWaiting
from shoal_service.core.events.training import GenerationForming, LayoutProven, LayoutRefused
from shoal_service.core.persistent import IntMap
from shoal_service.core.quantities import count_text
from shoal_workers.contract.ids import next_generation
from shoal_workers.contract.layout import Layout, ParallelismSpec
from shoal_workers.contract.messages import Assignment, ProofDemand
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome, proof_for
from shoal_workers.contract.training_settings import changes


def consider(turn: Turn) -> None:
    """Form a group once it is time. Acts in STARTING and WAITING only."""
    if turn.stage in (Stage.STARTING, Stage.WAITING):
        chosen = next_workers(turn.state, turn.now)
        if readiness(turn.state, len(chosen), turn.now):
            form(turn, chosen)
        elif isinstance(turn.current, Waiting) and turn.current.refused:
            turn.stay(replace(turn.current, refused=""))


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
    if state.target.ends_saved:
        best = best_source(state)
        if best is None or best.step <= state.checkpoints.durable_step or not can_form:
            turn.end_saved()
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
    covered, checkpoint_url = covered_ranks(layout, machines), _find_checkpoint_url(state)
    collective_timeout_s = hangs.collective_timeout_s(state)
    node_ids = [info.node_id for info in infos]
    node_ranks = {node_id: number for number, node_id in enumerate(dict.fromkeys(node_ids))}
    for rank, (worker, buddy) in enumerate(zip(chosen, choice.buddies, strict=True)):
        turn.pool = turn.pool.with_worker(replace(worker, in_run=True))
        assignment = Assignment(
            job_id=state.config.job_id,
            attempt=state.config.attempt,
            life=state.life,
            generation=generation,
            rank=rank,
            node_rank=node_ranks[node_ids[rank]],
            local_rank=node_ids[:rank].count(node_ids[rank]),
            layout=layout,
            store_host=infos[0].node_ip,
            store_port=infos[0].store_port,
            restore_from=checkpoint_url,
            restore_snapshot=memory,
            buddy=buddy,
            is_covered=buddy is None and rank in covered,
            is_recovery=state.incident is not None,
            settings=settings,
            standing=state.history.standing,
            skip_steps=state.history.skip_steps,
            proof=demanded_proof(state, layout),
            commit_timeout_s=state.config.timeouts.commit_s,
            collective_timeout_s=collective_timeout_s,
        )
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
        turn.stay(replace(current, refused=choice.refusal))
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


def demanded_proof(state: Attempt, layout: Layout) -> ProofDemand:
    """Return which proof of its layout the next group needs. The data axes need no plan, so they need no proof."""
    if not layout.planned_axes or proof_for(layout, state.history.proofs) is not None:
        return ProofDemand.NONE
    if not isinstance(state.target.spec.parallelism, ParallelismSpec):
        return ProofDemand.REQUIRED
    return ProofDemand.IF_POSSIBLE


def proof_arrived(turn: Turn, proof: LayoutProof | None) -> None:
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


def proof_refused(turn: Turn, message: str) -> bool:
    """Note that the group has refused its layout. Return True if another group may follow."""
    layout = turn.group.layout
    assert layout is not None, "a group has a layout"
    turn.history = turn.history.with_proof(LayoutProof(layout=layout, outcome=ProofOutcome.REFUSED, words=message))
    turn.emit(LayoutRefused(layout=layout.describe(), message=message))
    is_fixed = isinstance(turn.group.planned_by, ParallelismSpec)
    return turn.history.has_formed or not is_fixed
