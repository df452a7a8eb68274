"""Define what each incident cause means: who is at fault, what is done, what is left in memory, what it is charged to.

Pure data, and the only place with these rules; docs/elastic.md prints the table. It detects nothing. A new cause is a
member of `IncidentCause`, a row here, and the code that detects it. Causes are separate rows only if their actions
differ: isolate fast rather than diagnose precisely.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_workers.contract import ExitKind, IncidentCause


class Action(StrEnum):
    """What is done about a fault. An incident shows the values."""

    RE_FORM = "re-form"
    """The same workers form the next group: none of them is known to be at fault."""
    RESTART = "restart worker"
    """The worker is killed, or is dead already; another one starts in its place once the group trains again."""
    REPLACE = "replace from standby"
    SHRINK = "shrink"
    LEAVE_OUT = "leave out until it answers"
    """The group goes on without the workers of the node; they are fenced, not ended, and take part again later."""
    EXCLUDE = "exclude node"
    """The node is not used until a test of it passes."""
    ROLL_BACK = "roll back"
    """The next group starts from a durable checkpoint."""


class Blame(StrEnum):
    """What is at fault, as far as the cause tells."""

    WORKER = "the worker"
    NODE = "the node"
    UNKNOWN = "unknown"
    """The group broke. A later witness that names a worker replaces this cause by its own."""
    NONE = "no worker"
    """Every worker does what it should; the data, the numbers or the storage are the reason."""


class Probation(StrEnum):
    """When the loss of a worker makes the job suspect its node, and avoid it. The node is on probation for other jobs
    once a second job suspects it, or it fails a test (`core/nodes.py`)."""

    NEVER = "never"
    """The node is not suspected, and the loss is not counted against it."""
    REPEATED = "repeated"
    """The node is suspected when it has lost several workers within a short time and the other nodes hardly any; see
    `losses`. The causes below count for this as well."""
    ALONE = "alone"
    """The node is suspected if no other worker of the job answers from it, and one does from another node."""
    ALWAYS = "always"


class Memory(StrEnum):
    """What happens to the snapshots in memory."""

    KEPT = "kept"
    """Every worker that has a part still serves it."""
    ON_NODE = "on node"
    """The snapshots outlive the worker in shared memory of its node; a worker that starts there can serve them."""
    LOST = "lost"
    """The node is gone or does not answer. What other workers of the machine, replicas and buddies keep remains."""
    UNREADABLE = "unreadable"
    """One snapshot could not be read; it is not chosen again."""
    DISTRUSTED = "distrusted"
    """Snapshots of this generation and of earlier ones may hold wrong numbers; none of them is read."""


class Budget(StrEnum):
    """The key of the spec that limits how often this may happen."""

    RECOVERIES = "retry.max_recoveries"
    NON_FINITE = "retry.max_recoveries, health.max_non_finite"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the table: what an incident cause means for the decisions about it."""

    witness: str
    """What notices the fault first."""
    blames: Blame
    action: Action
    probation: Probation = Probation.NEVER
    budget: Budget = Budget.RECOVERIES
    memory: Memory = Memory.KEPT
    description: str
    """What the fault is, for users: one sentence without its full stop."""
    exit_kind: ExitKind | None = None
    """How a worker leaves `run` when it reports this cause; None if no worker reports it."""
    is_death: bool = False
    """True if the worker has died. If its time of death is known, detection is counted from there."""
    is_preemption_after_notice: bool = False
    """True if a worker that had notice to leave is `preempted` instead."""


FAULTS: dict[IncidentCause, Fault] = {
    IncidentCause.WORKER_DIED: Fault(
        witness="a Ray call to the worker fails, or its port refuses connections",
        blames=Blame.WORKER,
        action=Action.RESTART,
        probation=Probation.REPEATED,
        memory=Memory.ON_NODE,
        description="the worker's process died",
        is_death=True,
        is_preemption_after_notice=True,
    ),
    IncidentCause.WORKER_FAULT: Fault(
        witness="the exception of a rank that the others do not raise, by its class: see contract/exception_causes.py",
        blames=Blame.WORKER,
        action=Action.RESTART,
        probation=Probation.ALWAYS,
        memory=Memory.ON_NODE,
        description="the device, the memory or the operating system failed on one worker",
    ),
    IncidentCause.ENGINE_ERROR: Fault(
        witness="an exception of the engine's own code on a rank that the others do not raise",
        blames=Blame.WORKER,
        action=Action.RESTART,
        memory=Memory.ON_NODE,
        description="Shoal's own code failed on one worker",
    ),
    IncidentCause.NODE_DIED: Fault(
        witness="the ports of the worker and of its raylet refuse connections, or Ray's health check fails",
        blames=Blame.NODE,
        action=Action.EXCLUDE,
        probation=Probation.ALWAYS,
        memory=Memory.LOST,
        description="the node is gone with all its workers",
        is_death=True,
        is_preemption_after_notice=True,
    ),
    IncidentCause.STUCK: Fault(
        witness="a deadline passes while the group quiesces",
        blames=Blame.WORKER,
        action=Action.RESTART,
        probation=Probation.ALONE,
        memory=Memory.ON_NODE,
        description="the worker did not leave a broken group in time, and was killed",
    ),
    IncidentCause.HUNG: Fault(
        witness="no progress of any rank for longer than health.hang_factor and health.hang_floor_s allow",
        blames=Blame.WORKER,
        action=Action.RESTART,
        probation=Probation.ALONE,
        memory=Memory.ON_NODE,
        description="no rank made progress; workers that did not react to an interrupt were killed",
    ),
    IncidentCause.UNREACHABLE: Fault(
        witness="calls to the worker are not answered while its group is broken",
        blames=Blame.WORKER,
        action=Action.RESTART,
        probation=Probation.ALONE,
        memory=Memory.LOST,
        description="the worker does not answer, and was given up",
        is_preemption_after_notice=True,
    ),
    IncidentCause.NODE_UNREACHABLE: Fault(
        witness="the node's kernel answers no connect for 1.5 s, which a busy node does",
        blames=Blame.NODE,
        action=Action.LEAVE_OUT,
        budget=Budget.NONE,
        memory=Memory.LOST,
        description="the node does not answer; its workers are left out until it does",
    ),
    IncidentCause.PREEMPTED: Fault(
        witness="the worker is lost after a drain of its node, or after it received SIGTERM",
        blames=Blame.NONE,
        action=Action.RESTART,
        memory=Memory.LOST,
        description="the worker was taken away before the group had switched to others",
    ),
    IncidentCause.STRAGGLER: Fault(
        witness="the compute time of a rank, without waiting, against the median of the others",
        blames=Blame.WORKER,
        action=Action.REPLACE,
        probation=Probation.ALONE,
        budget=Budget.NONE,
        description="the worker computes much slower than the others",
    ),
    IncidentCause.CORRUPTED: Fault(
        witness="another rank repeats one of its micro-batches with another result, and a third rank decides; or ranks "
        "that hold the same state have different checksums of it",
        blames=Blame.WORKER,
        action=Action.ROLL_BACK,
        probation=Probation.ALWAYS,
        memory=Memory.DISTRUSTED,
        description="the worker computes wrong results, or holds wrong values",
    ),
    IncidentCause.NON_FINITE: Fault(
        witness="the vote of the step, before any rank updates its state",
        blames=Blame.NONE,
        action=Action.ROLL_BACK,
        budget=Budget.NON_FINITE,
        memory=Memory.DISTRUSTED,
        description="loss or gradient norm is not finite; the step is left out, see health.non_finite",
    ),
    IncidentCause.COLLECTIVE_FAILED: Fault(
        witness="a collective fails on a rank that is alive",
        blames=Blame.UNKNOWN,
        action=Action.RE_FORM,
        description="a collective failed, and no worker is known to be at fault",
        exit_kind=ExitKind.COLLECTIVE_FAILED,
    ),
    IncidentCause.SCRIPT_DIED: Fault(
        witness="a process of the script ends by a signal that Shoal has not sent, and its worker lives on",
        blames=Blame.UNKNOWN,
        action=Action.RE_FORM,
        description="a process of the script was killed by a signal",
        exit_kind=ExitKind.SCRIPT_DIED,
    ),
    IncidentCause.FORM_FAILED: Fault(
        witness="a rank reports that the rendezvous failed, or a deadline passes",
        blames=Blame.UNKNOWN,
        action=Action.RE_FORM,
        description="the group did not form",
        exit_kind=ExitKind.FORM_FAILED,
    ),
    IncidentCause.SNAPSHOT_LOST: Fault(
        witness="a rank cannot read its part of a snapshot",
        blames=Blame.UNKNOWN,
        action=Action.RE_FORM,
        memory=Memory.UNREADABLE,
        description="a snapshot could not be read; the state comes from another source",
        exit_kind=ExitKind.SNAPSHOT_LOST,
    ),
    IncidentCause.DAMAGED_CHECKPOINT: Fault(
        witness="the checksum of a part, when a rank reads it",
        blames=Blame.NONE,
        action=Action.ROLL_BACK,
        budget=Budget.NONE,
        description="a checkpoint is damaged; the one before it is restored",
        exit_kind=ExitKind.DAMAGED_CHECKPOINT,
    ),
    IncidentCause.CLUSTER_LOST: Fault(
        witness="the control plane finds no supervisor of a job that was training, or has ended the cluster itself",
        blames=Blame.NONE,
        action=Action.ROLL_BACK,
        budget=Budget.NONE,
        memory=Memory.LOST,
        description="the Ray cluster is gone with the supervisor and all workers; a new attempt continues from storage",
    ),
    IncidentCause.RETRIED: Fault(
        witness="the end of the attempt before, which retry.max_failures allows",
        blames=Blame.NONE,
        action=Action.ROLL_BACK,
        budget=Budget.NONE,
        memory=Memory.LOST,
        description="the attempt before has failed; a new attempt continues from storage",
    ),
}

CAUSE_BY_EXIT: dict[ExitKind, IncidentCause] = {
    fault.exit_kind: cause for cause, fault in FAULTS.items() if fault.exit_kind is not None
}


def describe_action(cause: IncidentCause, from_workers: int, to_workers: int | None, *, num_spares: int) -> str:
    """Return the action of the cause's row, and how the gap was filled once `to_workers` is known."""
    fault = FAULTS[cause]
    actions = [fault.action]
    if to_workers is not None:
        if num_spares:
            actions.append(Action.REPLACE)
        if to_workers < from_workers:
            actions.append(Action.SHRINK)
    if fault.probation is Probation.ALWAYS:
        actions.append(Action.EXCLUDE)
    return ", ".join(dict.fromkeys(actions))
