"""What is done about each cause: the one table. Pure; read by `incident` for the words and by `blame` for the node.

The causes are told apart as far as the action differs, and no further: isolate fast rather than diagnose precisely.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_workers.contract.job import IncidentCause


class Action(StrEnum):
    """What can be done. The values are what an incident shows."""

    RE_FORM = "re-form"
    """Everybody again: nobody is known to be at fault."""
    RESTART = "restart worker"
    """The worker is killed, or is gone; another one is started for it when the group trains again."""
    REPLACE = "replace from standby"
    SHRINK = "shrink"
    EXCLUDE = "exclude node"
    """Not used again until a test of it has passed."""
    SKIP = "skip step"
    ROLL_BACK = "roll back"
    STOP = "stop"


class Suspicion(StrEnum):
    """Whether the node of the worker at fault is put on probation."""

    NEVER = "never"
    ALONE = "alone"
    """If no other worker of ours answers from there: else it is the worker that is sick."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Response:
    """What follows from a cause."""

    action: Action
    suspicion: Suspicion
    words: str
    """For people."""


RESPONSES: dict[IncidentCause, Response] = {
    IncidentCause.WORKER_DIED: Response(
        Action.RESTART, Suspicion.NEVER, "a worker died; its node is suspected after the third within ten minutes"
    ),
    IncidentCause.NODE_DIED: Response(Action.EXCLUDE, Suspicion.ALWAYS, "the node is gone with all its workers"),
    IncidentCause.STUCK: Response(Action.RESTART, Suspicion.ALONE, "it could not be woken, and was killed"),
    IncidentCause.HUNG: Response(Action.RESTART, Suspicion.ALONE, "nobody got anywhere; who was not woken was killed"),
    IncidentCause.UNREACHABLE: Response(Action.RESTART, Suspicion.ALONE, "it does not answer, and was given up"),
    IncidentCause.PREEMPTED: Response(Action.RESTART, Suspicion.NEVER, "it was taken away before the switch was done"),
    IncidentCause.STRAGGLER: Response(Action.REPLACE, Suspicion.ALONE, "it computes too slowly for the others"),
    IncidentCause.CORRUPTED: Response(
        Action.ROLL_BACK, Suspicion.ALWAYS, "it computes wrong; what is in memory cannot be trusted"
    ),
    IncidentCause.NON_FINITE: Response(
        Action.ROLL_BACK, Suspicion.NEVER, "the step is skipped on the way; see health.non_finite"
    ),
    IncidentCause.COLLECTIVE_FAILED: Response(
        Action.RE_FORM, Suspicion.NEVER, "a collective broke, and nobody is known to be at fault"
    ),
    IncidentCause.FORM_FAILED: Response(Action.RE_FORM, Suspicion.NEVER, "the group did not come together"),
    IncidentCause.SNAPSHOT_LOST: Response(Action.RE_FORM, Suspicion.NEVER, "from another source"),
    IncidentCause.DAMAGED_CHECKPOINT: Response(Action.ROLL_BACK, Suspicion.NEVER, "to the checkpoint before it"),
}


def action_of(cause: IncidentCause, from_workers: int, to_workers: int | None, *, num_spares: int) -> str:
    """The words of an incident: the table's action, and how the gap was filled once that is known."""
    response = RESPONSES[cause]
    actions = [response.action]
    if to_workers is not None:
        if num_spares:
            actions.append(Action.REPLACE)
        if to_workers < from_workers:
            actions.append(Action.SHRINK)
    if response.suspicion is Suspicion.ALWAYS:
        actions.append(Action.EXCLUDE)
    return ", ".join(dict.fromkeys(actions))
