"""Jobs that run a script: what is done because the machine does not see inside it.

A script has its own checkpoints, so nothing of it is saved, restored or proven here, and no step of it is known until
it reports one:

    a group has formed    its first step is not known: what the groups before had completed is kept
    first report          says where the script has gone on: lost steps are counted, and the incident closes
    no report ever        the incident closes once the group has formed
    LONG_S of running     the loss of a worker after it is no loss at the start
    TIMES groups in a row that the program itself has ended at the same place, without a new step or a file with new
                          content: the attempt ends, however long they ran. The loss of a worker or of a node, and
                          what ends while a worker has to leave, does not count
    every rank has ended  with status 0: the job is done; on request: the script is started again, or the attempt ends

Called by `machine`, `reports` and `planning`. Which errors of its ranks follow from the loss of another one is decided
in `verdict`.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt import code_update, departures, incidents, verdict
from shoal_service.core.attempt.state.attempt import Attempt, Crash
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.endings import REPEATED
from shoal_service.core.quantities import count_text, ranks_text
from shoal_workers.contract.job import IncidentCause, UserFailure
from shoal_workers.contract.messages import ExitKind, Phase, WorkerExit

TIMES = 3
"""Groups in a row that may end in the same way without progress."""


def consider(turn: Turn) -> None:
    """Note that a group has run for long. Called after every event; acts in RUNNING only."""
    if not turn.target.is_script or not turn.state.has_run_long(turn.now):
        return
    if not turn.history.has_run_long:
        turn.history = replace(turn.history, has_run_long=True)
    if turn.budgets.fruitless or turn.budgets.setbacks:
        turn.budgets = turn.budgets.advanced()
    code_update.accept(turn)


def formed(turn: Turn) -> None:
    """A group of the script has formed. If no report is to be expected, or it has come already, the incident closes."""
    if turn.incident is None or (turn.state.has_reported and not turn.group.is_start_known):
        return
    if not turn.state.has_reported:
        turn.incident = replace(turn.incident, formed_at=None)  # no first step is known, so it has no duration
    incidents.close(turn)


def begun(turn: Turn, start_step: int) -> None:
    """The first report of a group has shown the step at which its script has gone on."""
    incidents.count_lost_steps(turn, start_step)
    turn.group = replace(turn.group, start_step=start_step, is_start_known=True)
    turn.budgets = turn.budgets.formed(start_step, turn.progress.furthest_step)
    turn.progress = replace(turn.progress, step=start_step)


def repeated_end(turn: Turn) -> UserFailure | None:
    """Count how the group of a script has ended. Returns the failure that ends the attempt at the third equal end in a
    row without progress, else None."""
    state, last = turn.state, turn.health.program_end
    step = state.progress.furthest_step
    if last is not None and (step > last.step or any(e.has_output for e in state.group.exits.values())):
        last = None
    ended = _end_of_program(state)
    if ended is not None:
        times = last.times + 1 if last is not None and last.words == ended.type else 1
        last = Crash(words=ended.type, step=step, generation=state.group.generation, times=times)
    turn.health = replace(turn.health, program_end=last)
    return final(ended, ended.message) if ended is not None and last is not None and last.times >= TIMES else None


def final(failure: UserFailure, sentence: str) -> UserFailure:
    """The failure as one after which no other attempt follows."""
    message = f"{sentence}, {count_text(TIMES, 'time')} in a row without a new step or a file with new content."
    return failure.model_copy(update={"mistake": REPEATED, "message": message})


def with_early_ends(state: Attempt, exits: tuple[WorkerExit, ...], sentence: str) -> str:
    """The sentence about these exits, and which ranks of a script had ended with status 0 before."""
    first = min(e.at for e in exits)
    ranks = [e.rank for e in state.group.exits.values() if e.kind is ExitKind.FINISHED and e.at < first]
    if not ranks or not state.target.is_script:
        return sentence
    return f"{sentence.rstrip('.')}. Before, {ranks_text(ranks)} had ended with status 0."


def _end_of_program(state: Attempt) -> UserFailure | None:
    """The end of the program itself that has ended the group, with its place as the type. None if a worker was lost or
    has to leave, which explains every other end. A signal whose sender is not known counts as the program's: its worker
    lives on."""
    script, incident = state.target.spec.script, state.incident
    if script is None or incident is None or verdict.has_lost_worker(state) or departures.workers_to_leave(state):
        return None
    ends = sorted(state.group.exits.values(), key=lambda e: (e.kind is not ExitKind.SCRIPT_DIED, e.at))
    kinds = (ExitKind.SCRIPT_DIED, ExitKind.COLLECTIVE_FAILED)
    rank, error = next(((e.rank, e.error) for e in ends if e.kind in kinds), (0, None))
    done = [e.rank for e in ends if e.kind is ExitKind.FINISHED and ends[0].kind is not ExitKind.SCRIPT_DIED]
    if done:
        place = "status 0"
        waited = f" (rank {rank} was at {error.line})" if error is not None and error.line else ""
        sentence = f"{ranks_text(done)} of {script.words} ended with status 0 while others still trained{waited}"
    elif error is not None:
        done, place = [rank], f"{error.type} {error.line}"
        sentence = f"{error.sentence.rstrip('.')}, on rank {rank}"
    elif incident.cause is IncidentCause.HUNG:
        done, place, sentence = list(incident.ranks), "hung", incident.message
    else:
        return None
    return UserFailure(
        type=place,
        message=sentence,
        traceback=error.traceback if error is not None else "",
        phase=Phase.SCRIPT,
        ranks=tuple(sorted(done)),
        step=state.progress.step,
        line=error.line if error is not None else "",
    )


def words_of_the_end(state: Attempt) -> str:
    """How a script has ended that is done."""
    script = state.target.spec.script
    assert script is not None
    after = f" after {count_text(state.progress.step, 'step')}" if state.has_reported else ""
    return f"{script.words} has ended with status 0 on every rank{after}"
