"""Groups, their steps and their state: formed, switched on purpose, steps that were not finite, validation, and durable
checkpoints.
"""

from __future__ import annotations

from shoal_service.core.events.base import JobEvent, OfCheckpoint, OfGeneration, Severity
from shoal_service.core.quantities import count_text
from shoal_workers.contract import StateSource


class GenerationForming(OfGeneration, JobEvent, type="generation.forming", severity=Severity.INFO):
    """The supervisor sent `run` of a new generation to every worker of the group."""

    workers: int
    layout: str
    """Empty: a script splits its own work."""
    reason: str
    """Why this layout."""
    source: StateSource | None
    """Where the group takes its state from; null: a script goes on from its own checkpoint."""
    restore: str | None
    """Name of the newest checkpoint."""
    step: int
    """The step of that state; for a script, the newest step that was reported."""
    remark: str = ""
    """Tensor-parallel groups that cross nodes, and why; empty: each is inside a node."""

    def describe(self) -> str:
        origins = {
            StateSource.MEMORY: f"the snapshot of step {self.step} in memory",
            StateSource.CHECKPOINT: self.restore,
            StateSource.INITIAL: "the initial state",
            None: "the script's own checkpoint",
        }
        start = f"forming generation {self.generation} with {count_text(self.workers, 'worker')}"
        return f"{start}, from {origins[self.source]}" + (f"; {self.remark}" if self.remark else "")


class GenerationSettings(
    OfGeneration,
    JobEvent,
    type="generation.settings",
    severity=Severity.INFO,
    text="from step {step:next} on: {changes:list}",
):
    """The group trains with changed settings from its first step on."""

    step: int
    """Completed steps: the next one is the first with the new settings."""
    changes: tuple[str, ...]
    """One text for each value: `stop.steps 120 -> 200`."""


class GenerationData(
    OfGeneration,
    JobEvent,
    type="generation.data",
    severity=Severity.WARNING,
    text="from step {step:next} on with other data than the checkpoint ({before} -> {now})",
):
    """The job goes on from a checkpoint that was made with other data: step and sample number are kept."""

    step: int
    """Completed steps: the next one is the first with the new data."""
    before: str
    """Content hash of the data of the checkpoint."""
    now: str


class GenerationFormed(
    OfGeneration,
    JobEvent,
    type="generation.formed",
    severity=Severity.SUCCESS,
    text="generation {generation}: {workers:count worker}[ as {layout}][, from step {start_step}]",
):
    """The group is up and has restored its state."""

    workers: int
    start_step: int | None
    """null: a script has begun, and has not reported a step yet."""
    steps_lost: int | None
    """null: not known yet, as the first step of a script."""
    form_s: float
    build_s: float | None
    """null: not known, as of a script; so are the next two."""
    restore_s: float | None
    num_parameters: int | None
    layout: str | None
    """null: a script splits its own work."""


class LayoutProven(JobEvent, type="layout.proven", severity=Severity.INFO):
    """One micro-batch split as the layout says gives loss, metrics and gradients of the whole model; or it could not be
    found out, and the layout is used because the spec fixes it."""

    layout: str
    outcome: str
    difference: float
    """The largest relative difference."""
    seconds: float
    cached: bool
    """It was found earlier, on the node of rank 0."""
    message: str = ""

    def describe(self) -> str:
        if self.outcome != "proven":
            return f"layout {self.layout} is not proven: {self.message}"
        how = "known from before" if self.cached else f"in {self.seconds:.1f} s"
        return f"layout {self.layout} is proven, {how}: largest difference {self.difference:.1g}"


class LayoutRefused(JobEvent, type="layout.refused", severity=Severity.WARNING, text="layout refused: {message}"):
    """The layout trains another model, or its workers have too little memory. It is not used, nor any that uses the
    same axes."""

    layout: str
    message: str
    """The difference, with the first module whose output differs."""


class LayoutMeasured(JobEvent, type="layout.measured", severity=Severity.INFO):
    """Shard levels whose steps are predicted to take about as long were tried, and the fastest one stays."""

    shard: str
    """The level that stays."""
    step_s: dict[str, float]
    """Median seconds of a step by level, of those that could be measured."""

    def describe(self) -> str:
        times = ", ".join(f"{level} {step_s:.3g} s" for level, step_s in self.step_s.items())
        return f"shard level {self.shard} stays: a step takes {times}"


class GenerationSwitching(
    OfGeneration,
    JobEvent,
    type="generation.switching",
    severity=Severity.INFO,
    text="switching at the next step boundary: {reason}",
):
    """The group was asked to stop at its next step boundary."""

    reason: str
    durable: bool
    """True if there is a durable checkpoint of that step."""


class SwitchLossy(
    JobEvent,
    type="generation.switch_lossy",
    severity=Severity.WARNING,
    text="the next group goes on from step {step} and computes the steps after it again: {message}",
):
    """The state of the step boundary is neither complete in memory nor durable: steps are computed again."""

    message: str
    restore: str | None
    """Name of the newest checkpoint."""
    step: int
    """The step from which the next group goes on."""


class NonFiniteStepSkipped(
    JobEvent,
    type="step.skipped",
    severity=Severity.WARNING,
    is_routine=True,
    text="step {step} skipped: its loss or gradient norm was not finite[; only the loss of rank {ranks:list} was not]",
):
    """Loss or gradient norm of a step was not finite: nothing was updated, and the samples are used up."""

    step: int
    loss: float | None
    grad_norm: float | None
    ranks: tuple[int, ...] = ()
    """Those whose own part of the loss was not finite, if those of others were; empty: no rank stands out."""


class NonFiniteStepRolledBack(
    JobEvent,
    type="step.rolled_back",
    severity=Severity.WARNING,
    text="back to step {to}, and step {step} is left out: {message}",
):
    """Loss or gradient norm of a step was not finite: the group goes back to a durable checkpoint, and leaves the step
    out on the way."""

    step: int
    to: int
    """Step of the durable checkpoint; 0: the initial state."""
    message: str


class AlertRaised(
    JobEvent,
    type="alert.raised",
    severity=Severity.WARNING,
    text="alert: {condition} since step {step}[ ({values:numbers .6g})]",
):
    """A condition of the spec's `alerts` began to hold; again only after it has ceased to, and 10 minutes later at the
    earliest."""

    condition: str
    step: int
    values: dict[str, float]
    """The values at that step, by the names in the condition."""


class StoppedEarly(
    JobEvent, type="validation.stopped_early", severity=Severity.INFO, text="stops early after step {step}: {reason}"
):
    """Training ends after this step, because validation has not improved for long enough."""

    step: int
    reason: str


class ValidationNotJudged(JobEvent, type="validation.not_judged", severity=Severity.WARNING):
    """The validation does not have the metric that `validation.metric` names, or it was not finite."""

    step: int
    metric: str
    known: tuple[str, ...]
    """The metrics that it has, besides the loss."""

    def describe(self) -> str:
        has = f"it has loss, {', '.join(self.known)}" if self.known else "it has only the loss"
        return (
            f"validation after step {self.step} has no finite {self.metric} (validation.metric), so it counts neither "
            f"for the best checkpoints nor for patience; {has}"
        )


class Validated(
    JobEvent,
    type="validation",
    severity=Severity.INFO,
    is_routine=True,
    text="validation after step {step}: loss [{loss:.4f}|not finite][, {bits_per_byte:.3f} bits per "
    "byte][, {metrics:numbers .4g}]",
):
    """The validation loss was computed."""

    step: int
    loss: float | None
    bits_per_byte: float | None
    metrics: dict[str, float] | None = None
    """The task's own metrics, by name; null: it has none."""


class IslandMissedRound(
    JobEvent,
    type="island.missed_round",
    severity=Severity.WARNING,
    is_routine=True,
    text="island {island} missed round {round}: it was closed with {members:list}",
):
    """A round of islands was closed without the one that this job trains: its samples count in a later round."""

    round: int
    island: int
    members: tuple[int, ...]
    """The islands with which the round was closed."""


class CheckpointCommitted(
    OfCheckpoint,
    JobEvent,
    type="checkpoint.committed",
    severity=Severity.INFO,
    is_routine=True,
    text="checkpoint of step {step} committed",
):
    """The commit marker of the checkpoint is in place."""

    generation: int


class CheckpointFailed(
    JobEvent,
    type="checkpoint.failed",
    severity=Severity.ERROR,
    text="a checkpoint could not be written: [rank {rank}: ]{message}",
):
    """A part of a checkpoint, or its marker, could not be written; training goes on."""

    message: str
    name: str | None = None
    generation: int | None = None
    rank: int | None = None
    step: int | None = None
    stalled: bool = False
    """The storage did not fail: it accepted nothing for `timeouts.save_s`."""


class CheckpointRetried(
    JobEvent,
    type="checkpoint.retried",
    severity=Severity.ERROR,
    is_routine=True,
    text="the final state could not be saved; try {number} of {of} follows in {after_s:duration}: {message}",
):
    """The state after the last step could not be saved; the group forms once more to save it."""

    message: str
    number: int
    """Number of the try that follows."""
    of: int
    """Tries in all."""
    after_s: float
    """Seconds until that try."""


class CheckpointDamaged(
    JobEvent, type="checkpoint.damaged", severity=Severity.ERROR, text="checkpoint {name} is damaged: {message}"
):
    """A checkpoint failed its verification and is not used any more."""

    name: str
    message: str


class StorageAway(
    JobEvent,
    type="checkpoint.storage_away",
    severity=Severity.WARNING,
    text="the checkpoint storage is away; it is asked again: {message}",
):
    """The checkpoint storage does not answer, or lacks the job's checkpoints, while an attempt looks for the newest
    one; it is asked again."""

    message: str
    until: float
    """Wall-clock time at which the job fails; checkpoint.wait_s after the first request."""


class CheckpointFallback(
    JobEvent,
    type="checkpoint.fallback",
    severity=Severity.WARNING,
    text="[falling back to checkpoint {to}|no older checkpoint: training starts again]",
):
    """After a damaged checkpoint, the newest one before it was chosen."""

    to: str | None
    """null: there is none, so training starts from the seed."""


class CheckpointRetentionFailed(
    JobEvent,
    type="checkpoint.retention_failed",
    severity=Severity.WARNING,
    text="old checkpoints could not be deleted: {message}",
):
    """Old checkpoints could not be deleted."""

    message: str


class CheckpointDeleted(
    OfCheckpoint,
    JobEvent,
    type="checkpoint.deleted",
    severity=Severity.INFO,
    is_routine=True,
    text="checkpoint of step {step} deleted[: {reason}| on request]",
):
    """A user has deleted the checkpoint, or it was deleted long after the job's end. What the retention of a running
    job deletes (`checkpoint.keep`) is no event."""

    reason: str = ""
    """Empty: a user asked for it."""


class CheckpointPinned(
    OfCheckpoint,
    JobEvent,
    type="checkpoint.pinned",
    severity=Severity.INFO,
    text="checkpoint of step {step} pinned: retention does not delete it",
):
    """A user has pinned the checkpoint: retention does not delete it."""


class CheckpointUnpinned(
    OfCheckpoint,
    JobEvent,
    type="checkpoint.unpinned",
    severity=Severity.INFO,
    text="checkpoint of step {step} is no longer pinned: retention may delete it",
):
    """A user has taken the pin of the checkpoint away: retention may delete it."""
