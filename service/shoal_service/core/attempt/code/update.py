"""Until the new code takes over: its workers start beside those that train, and one of them builds the model.

    wanted -> as many workers as the group has, each on the node of one of them -> the model is compared -> ready
        refused: a worker cannot load the code, ends before it is warm, or builds another model; or it takes too long

Called by `machine` after every event, and by `worker_pool` for what happens to workers that start. The group trains on,
and whatever happens to it is handled as ever. It never ends the attempt: a refused update changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shoal_service.core.attempt.commands import CompareModels, StartWorker
from shoal_service.core.attempt.decision import Decision
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.code import Code, CodeUpdate, short
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.code import CodeRefused, CodeUpdating
from shoal_service.core.quantities import count_text
from shoal_workers.contract.ids import worker_name
from shoal_workers.contract.messages import ErrorReport


def wanted(turn: Turn, version: str) -> None:
    """By a directive. While the new code is on trial, the next version waits for the verdict."""
    turn.target = turn.target.with_code(version)
    turn.code = replace(turn.code, wanted=version, refused="")
    update = turn.code.warming
    if update is not None and update.version != version:
        _give_up(turn, update, "another version is wanted")


def consider(turn: Turn) -> None:
    """In RUNNING, after every event. A group that was lost is formed again first."""
    if turn.stage is not Stage.RUNNING or turn.incident is not None or turn.target.ends_saved:
        return
    code, update = turn.code, turn.code.warming
    if code.update is None and code.wanted not in (None, code.current, code.refused):
        assert code.wanted is not None
        update = CodeUpdate(version=code.wanted, since=turn.now)
        turn.code = replace(code, update=update)
        turn.emit(CodeUpdating(version=update.version, before=code.current))
    if update is None:
        return
    if turn.now - update.since > turn.config.timeouts.start_s:
        waited = f"its workers were not ready within timeouts.start_s ({turn.config.timeouts.start_s:g} s)"
        refuse(turn, f"{waited}: {readiness(turn.state).reason}")
        return
    _start_missing(turn, update)
    _compare(turn, update)


def readiness(state: Attempt) -> Decision:
    """Whether the new code takes over at the next step boundary."""
    update = state.code.warming
    if update is None:
        return Decision(False, "no code is to be updated")
    cohort = _cohort(state, update)
    num_ready, num_needed = sum(worker.is_usable for worker in cohort), _num_needed(state)
    if num_ready < num_needed:
        return Decision(
            False, f"{num_ready} of {count_text(num_needed, 'worker')} with code {short(update.version)} became warm"
        )
    if not update.is_same_model:
        return Decision(False, "one of them builds the model")
    if state.progress.step <= state.group.start_step:
        return Decision(False, "the group has completed no step yet")
    return Decision(True, f"code {short(state.code.current)} -> {short(update.version)}")


def failed_to_start(turn: Turn, worker: Worker, error: ErrorReport) -> bool:
    """False: the worker belongs to no update."""
    return _failed(turn, worker, f"a worker could not load it: {error.sentence}")


def start_died(turn: Turn, worker: Worker, message: str) -> bool:
    """The same for one that ended before it was warm."""
    return _failed(turn, worker, f"a worker ended before it was warm: {message}")


def models_compared(turn: Turn, index: int, difference: str) -> None:
    """`difference`: in words; empty: there is none."""
    update, worker = turn.code.warming, turn.pool.worker(index)
    if update is None or worker is None or worker.code != update.version:
        return  # of an update that is over
    if difference:
        refuse(turn, difference)
    else:
        turn.code = replace(turn.code, update=replace(update, comparing=False, is_same_model=True))


def refuse(turn: Turn, reason: str) -> None:
    """The group trains on with its code."""
    update = turn.code.warming
    assert update is not None
    turn.emit(CodeRefused(version=update.version, before=turn.code.current, reason=reason))
    _give_up(turn, update, "its code was refused")


def _failed(turn: Turn, worker: Worker, reason: str) -> bool:
    update = turn.code.warming
    if update is None or worker.code != update.version:
        return False
    refuse(turn, reason)
    return True


def _give_up(turn: Turn, update: CodeUpdate, why: str) -> None:
    for worker in _cohort(turn.state, update):
        turn.kill(worker.index, why)
    refused = update.version if turn.code.wanted == update.version else ""
    turn.code = Code(current=turn.code.current, wanted=turn.code.wanted, refused=refused)


def _cohort(state: Attempt, update: CodeUpdate) -> list[Worker]:
    return [worker for worker in state.pool.workers if worker.code == update.version]


def _num_needed(state: Attempt) -> int:
    return min(len(state.group.workers), state.target.granted)


def _start_missing(turn: Turn, update: CodeUpdate) -> None:
    """Each one on the node of a worker of the group whose place it will take; it needs no room there."""
    state = turn.state
    cohort = _cohort(state, update)
    nodes = Counter(state.group.nodes) - Counter(worker.only_on for worker in cohort)
    for node_id in list(nodes.elements())[: max(0, _num_needed(state) - len(cohort))]:
        index = turn.pool.next_index
        worker_id = worker_name(state.config.job_id, state.config.attempt, index)
        worker = Worker(index=index, worker_id=worker_id, only_on=node_id, code=update.version, is_beside=True)
        turn.pool = turn.pool.with_new(worker)
        turn.do(StartWorker(index, worker_id, (), node_id, False, update.version, True))


def _compare(turn: Turn, update: CodeUpdate) -> None:
    """The first worker with the new code that is warm builds the model. If it is lost meanwhile, the update is refused
    or another one is asked."""
    if update.is_same_model or update.comparing:
        return
    first = next((worker for worker in _cohort(turn.state, update) if worker.is_usable), None)
    if first is not None:
        turn.code = replace(turn.code, update=replace(update, comparing=True))
        turn.do(CompareModels(first.index, turn.group.workers[0]))
