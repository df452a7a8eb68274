"""Jobs that run a script: what is done because the machine does not see inside it.

A script has its own checkpoints, so nothing of it is saved, restored or proven here, and no step of it is known until
it reports one:

    a group has formed    its first step is not known: what the groups before had completed is kept
    first report          says where the script has gone on: lost steps are counted, and the incident closes
    no report ever        the incident closes once the group has formed
    LONG_S of running     count as progress, whatever was reported
    every rank has ended  with status 0: the job is done; on request: the script is started again, or the attempt ends

Called by `machine`, `reports` and `planning`. Which errors of its ranks follow from the loss of another one is decided
in `verdict`.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt import code_update, incidents
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.quantities import count_text


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


def words_of_the_end(state: Attempt) -> str:
    """How a script has ended that is done."""
    script = state.target.spec.script
    assert script is not None
    after = f" after {count_text(state.progress.step, 'step')}" if state.has_reported else ""
    return f"{script.words} has ended with status 0 on every rank{after}"
