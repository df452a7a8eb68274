"""Groups, their steps and their state: formed, switched on purpose, steps that were not finite, validation, and durable
checkpoints.
"""

from __future__ import annotations

from typing import ClassVar

from shoal_service.core.events.base import JobEvent, Severity
from shoal_service.core.quantities import count_text, duration_text
from shoal_workers.contract import StateSource


class GenerationForming(JobEvent):
    """The supervisor sent `run` of a new generation to every worker of the group."""

    type: ClassVar[str] = "generation.forming"
    severity: ClassVar[Severity] = Severity.INFO

    generation: int
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

    def words(self) -> str:
        start = f"forming generation {self.generation} with {count_text(self.workers, 'worker')}"
        return f"{start}, from {self._origin()}" + (f"; {self.remark}" if self.remark else "")

    def _origin(self) -> str:
        match self.source:
            case StateSource.MEMORY:
                return f"the snapshot of step {self.step} in memory"
            case StateSource.CHECKPOINT:
                return str(self.restore)
            case StateSource.INITIAL:
                return "the initial state"
            case None:
                return "the script's own checkpoint"


class GenerationSettings(JobEvent):
    """The group trains with changed settings from its first step on."""

    type: ClassVar[str] = "generation.settings"
    severity: ClassVar[Severity] = Severity.INFO

    generation: int
    step: int
    """Completed steps: the next one is the first with the new settings."""
    changes: tuple[str, ...]
    """One text for each value: `stop.steps 120 -> 200`."""

    def words(self) -> str:
        return f"from step {self.step + 1} on: {', '.join(self.changes)}"


class GenerationData(JobEvent):
    """The job goes on from a checkpoint that was made with other data: step and sample number are kept."""

    type: ClassVar[str] = "generation.data"
    severity: ClassVar[Severity] = Severity.WARNING

    generation: int
    step: int
    """Completed steps: the next one is the first with the new data."""
    before: str
    """Content hash of the data of the checkpoint."""
    now: str

    def words(self) -> str:
        return f"from step {self.step + 1} on with other data than the checkpoint ({self.before} -> {self.now})"


class GenerationFormed(JobEvent):
    """The group is up and has restored its state."""

    type: ClassVar[str] = "generation.formed"
    severity: ClassVar[Severity] = Severity.SUCCESS

    generation: int
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

    def words(self) -> str:
        workers = count_text(self.workers, "worker") + (f" as {self.layout}" if self.layout else "")
        start = f", from step {self.start_step}" if self.start_step is not None else ""
        return f"generation {self.generation}: {workers}{start}"


class LayoutProven(JobEvent):
    """One micro-batch split as the layout says gives loss, metrics and gradients of the whole model; or it could not be
    found out, and the layout is used because the spec fixes it."""

    type: ClassVar[str] = "layout.proven"
    severity: ClassVar[Severity] = Severity.INFO

    layout: str
    outcome: str
    difference: float
    """The largest relative difference."""
    seconds: float
    cached: bool
    """It was found earlier, on the node of rank 0."""
    message: str = ""

    def words(self) -> str:
        if self.outcome != "proven":
            return f"layout {self.layout} is not proven: {self.message}"
        how = "known from before" if self.cached else f"in {self.seconds:.1f} s"
        return f"layout {self.layout} is proven, {how}: largest difference {self.difference:.1g}"


class LayoutRefused(JobEvent):
    """A proof has shown that the layout trains another model. It is not used, nor any that uses the same axes."""

    type: ClassVar[str] = "layout.refused"
    severity: ClassVar[Severity] = Severity.WARNING

    layout: str
    message: str
    """The difference, with the first module whose output differs."""

    def words(self) -> str:
        return f"layout refused: {self.message}"


class LayoutMeasured(JobEvent):
    """Shard levels whose steps are predicted to take about as long were tried, and the fastest one stays."""

    type: ClassVar[str] = "layout.measured"
    severity: ClassVar[Severity] = Severity.INFO

    shard: str
    """The level that stays."""
    step_s: dict[str, float]
    """Median seconds of a step by level, of those that could be measured."""

    def words(self) -> str:
        times = ", ".join(f"{level} {step_s:.3g} s" for level, step_s in self.step_s.items())
        return f"shard level {self.shard} stays: a step takes {times}"


class GenerationSwitching(JobEvent):
    """The group was asked to stop at its next step boundary."""

    type: ClassVar[str] = "generation.switching"
    severity: ClassVar[Severity] = Severity.INFO

    generation: int
    reason: str
    durable: bool
    """True if there is a durable checkpoint of that step."""

    def words(self) -> str:
        return f"switching at the next step boundary: {self.reason}"


class SwitchLossy(JobEvent):
    """The state of the step boundary is neither complete in memory nor durable: steps are computed again."""

    type: ClassVar[str] = "generation.switch_lossy"
    severity: ClassVar[Severity] = Severity.WARNING

    message: str
    restore: str | None
    """Name of the newest checkpoint."""
    step: int
    """The step from which the next group goes on."""

    def words(self) -> str:
        return f"the next group goes on from step {self.step} and computes the steps after it again: {self.message}"


class NonFiniteStepSkipped(JobEvent):
    """Loss or gradient norm of a step was not finite: nothing was updated, and the samples are used up."""

    type: ClassVar[str] = "step.skipped"
    severity: ClassVar[Severity] = Severity.WARNING
    is_routine: ClassVar[bool] = True

    step: int
    loss: float | None
    grad_norm: float | None
    ranks: tuple[int, ...] = ()
    """Those whose own part of the loss was not finite, if those of others were; empty: no rank stands out."""

    def words(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        whose = f"; only the loss of rank {ranks} was not" if ranks else ""
        return f"step {self.step} skipped: its loss or gradient norm was not finite{whose}"


class NonFiniteStepRolledBack(JobEvent):
    """Loss or gradient norm of a step was not finite: the group goes back to a durable checkpoint, and leaves the step
    out on the way."""

    type: ClassVar[str] = "step.rolled_back"
    severity: ClassVar[Severity] = Severity.WARNING

    step: int
    to: int
    """Step of the durable checkpoint; 0: the initial state."""
    message: str

    def words(self) -> str:
        return f"back to step {self.to}, and step {self.step} is left out: {self.message}"


class AlertRaised(JobEvent):
    """A condition of the spec's `alerts` began to hold; again only after it has ceased to, and 10 minutes later at the
    earliest."""

    type: ClassVar[str] = "alert.raised"
    severity: ClassVar[Severity] = Severity.WARNING

    condition: str
    step: int
    values: dict[str, float]
    """The values at that step, by the names in the condition."""

    def words(self) -> str:
        values = ", ".join(f"{name} {value:.6g}" for name, value in self.values.items())
        return f"alert: {self.condition} since step {self.step}" + (f" ({values})" if values else "")


class StoppedEarly(JobEvent):
    """Training ends after this step, because validation has not improved for long enough."""

    type: ClassVar[str] = "validation.stopped_early"
    severity: ClassVar[Severity] = Severity.INFO

    step: int
    reason: str

    def words(self) -> str:
        return f"stops early after step {self.step}: {self.reason}"


class ValidationNotJudged(JobEvent):
    """The validation does not have the metric that `validation.metric` names, or it was not finite."""

    type: ClassVar[str] = "validation.not_judged"
    severity: ClassVar[Severity] = Severity.WARNING

    step: int
    metric: str
    known: tuple[str, ...]
    """The metrics that it has, besides the loss."""

    def words(self) -> str:
        has = f"it has loss, {', '.join(self.known)}" if self.known else "it has only the loss"
        return (
            f"validation after step {self.step} has no finite {self.metric} (validation.metric), so it counts neither "
            f"for the best checkpoints nor for patience; {has}"
        )


class Validated(JobEvent):
    """The validation loss was computed."""

    type: ClassVar[str] = "validation"
    severity: ClassVar[Severity] = Severity.INFO
    is_routine: ClassVar[bool] = True

    step: int
    loss: float | None
    bits_per_byte: float | None
    metrics: dict[str, float] | None = None
    """The task's own metrics, by name; null: it has none."""

    def words(self) -> str:
        loss = "not finite" if self.loss is None else f"{self.loss:.4f}"
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.3f} bits per byte"
        metrics = "".join(f", {name} {value:.4g}" for name, value in (self.metrics or {}).items())
        return f"validation after step {self.step}: loss {loss}{bits}{metrics}"


class CheckpointCommitted(JobEvent):
    """The commit marker of the checkpoint is in place."""

    type: ClassVar[str] = "checkpoint.committed"
    severity: ClassVar[Severity] = Severity.INFO
    is_routine: ClassVar[bool] = True

    name: str
    step: int
    generation: int

    def words(self) -> str:
        return f"checkpoint of step {self.step} committed"


class CheckpointFailed(JobEvent):
    """A part of a checkpoint, or its marker, could not be written; training goes on."""

    type: ClassVar[str] = "checkpoint.failed"
    severity: ClassVar[Severity] = Severity.ERROR

    message: str
    name: str | None = None
    generation: int | None = None
    rank: int | None = None
    step: int | None = None
    stalled: bool = False
    """The storage did not fail: it accepted nothing for `timeouts.save_s`."""

    def words(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}: "
        return f"a checkpoint could not be written: {rank}{self.message}"


class CheckpointRetried(JobEvent):
    """The state after the last step could not be saved; the group forms once more to save it."""

    type: ClassVar[str] = "checkpoint.retried"
    severity: ClassVar[Severity] = Severity.ERROR
    is_routine: ClassVar[bool] = True

    message: str
    number: int
    """Number of the try that follows."""
    of: int
    """Tries in all."""
    after_s: float
    """Seconds until that try."""

    def words(self) -> str:
        return (
            f"the final state could not be saved; try {self.number} of {self.of} follows in "
            f"{duration_text(self.after_s)}: {self.message}"
        )


class CheckpointDamaged(JobEvent):
    """A checkpoint failed its verification and is not used any more."""

    type: ClassVar[str] = "checkpoint.damaged"
    severity: ClassVar[Severity] = Severity.ERROR

    name: str
    message: str

    def words(self) -> str:
        return f"checkpoint {self.name} is damaged: {self.message}"


class StorageAway(JobEvent):
    """The checkpoint storage does not answer, or lacks the job's checkpoints, while an attempt looks for the newest
    one; it is asked again."""

    type: ClassVar[str] = "checkpoint.storage_away"
    severity: ClassVar[Severity] = Severity.WARNING

    message: str
    until: float
    """Wall-clock time at which the job fails; checkpoint.wait_s after the first request."""

    def words(self) -> str:
        return f"the checkpoint storage is away; it is asked again: {self.message}"


class CheckpointFallback(JobEvent):
    """After a damaged checkpoint, the newest one before it was chosen."""

    type: ClassVar[str] = "checkpoint.fallback"
    severity: ClassVar[Severity] = Severity.WARNING

    to: str | None
    """null: there is none, so training starts from the seed."""

    def words(self) -> str:
        return f"falling back to checkpoint {self.to}" if self.to else "no older checkpoint: training starts again"


class CheckpointRetentionFailed(JobEvent):
    """Old checkpoints could not be deleted."""

    type: ClassVar[str] = "checkpoint.retention_failed"
    severity: ClassVar[Severity] = Severity.WARNING

    message: str

    def words(self) -> str:
        return f"old checkpoints could not be deleted: {self.message}"


class CheckpointDeleted(JobEvent):
    """A user has deleted the checkpoint, or it was deleted long after the job's end. What the retention of a running
    job deletes (`checkpoint.keep`) is no event."""

    type: ClassVar[str] = "checkpoint.deleted"
    severity: ClassVar[Severity] = Severity.INFO
    is_routine: ClassVar[bool] = True

    name: str
    step: int
    reason: str = ""
    """Empty: a user asked for it."""

    def words(self) -> str:
        return f"checkpoint of step {self.step} deleted" + (f": {self.reason}" if self.reason else " on request")


class CheckpointPinned(JobEvent):
    """A user has pinned the checkpoint: retention does not delete it."""

    type: ClassVar[str] = "checkpoint.pinned"
    severity: ClassVar[Severity] = Severity.INFO

    name: str
    step: int

    def words(self) -> str:
        return f"checkpoint of step {self.step} pinned: retention does not delete it"


class CheckpointUnpinned(JobEvent):
    """A user has taken the pin of the checkpoint away: retention may delete it."""

    type: ClassVar[str] = "checkpoint.unpinned"
    severity: ClassVar[Severity] = Severity.INFO

    name: str
    step: int

    def words(self) -> str:
        return f"checkpoint of step {self.step} is no longer pinned: retention may delete it"
