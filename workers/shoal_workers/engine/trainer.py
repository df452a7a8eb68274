"""The training loop of one generation: step, vote, update, snapshot, report, validate, save; until finished or asked to
yield.

    forward + backward of the local micro-batches      nothing is mutated
    the vote                                           the only all-reduce of the loop itself
    -------- from here on every rank does the same ----------------------------------------------------
    clip, learning rate, optimizer step                completed steps + 1
    snapshot in memory, report (rank 0), validation, checkpoint part       as the step and the vote say

Raises what `endings` classifies. Everything that it decides from, besides the vote, is a function of spec and step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import Assignment, ExitKind, Phase, StepReport, StepSkipped
from shoal_workers.contract.spec import JobSpec, NonFinitePolicy
from shoal_workers.engine.errors import NonFinite
from shoal_workers.engine.extent import is_due
from shoal_workers.engine.group.collective_wait import waited_s
from shoal_workers.engine.model.assembly import Assembly
from shoal_workers.engine.model.user_code import UserCode
from shoal_workers.engine.process.exits import Ending
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.state.double_buffered_state import DoubleBufferedState
from shoal_workers.engine.state.recent_reports import Recent
from shoal_workers.engine.state.saving import Saver
from shoal_workers.engine.state.snapshots import Snapshots
from shoal_workers.engine.state.state_view import StateView
from shoal_workers.engine.state.training_state import Extra
from shoal_workers.engine.step.gradients import GradientPass
from shoal_workers.engine.step.learning_rate import lr_factor
from shoal_workers.engine.step.loss_scaling import Scaling
from shoal_workers.engine.step.replay import Replay
from shoal_workers.engine.step.update import Update
from shoal_workers.engine.step.validation import Validation
from shoal_workers.engine.step.vote import Ballot, Requests, Verdict, hold_vote
from shoal_workers.snapshot_store.store import SnapshotStore


@dataclass(frozen=True, slots=True)
class Signals:
    """What the control thread may have said about this generation."""

    check: Callable[[], None]
    """Raises Fenced once the generation is fenced."""
    is_yield_asked: Callable[[], bool]
    is_durable_asked: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Built:
    """What a generation is made of, after form, build and restore."""

    assembly: Assembly
    update: Update
    view: StateView
    living: DoubleBufferedState
    gradients: GradientPass
    validation: Validation | None
    device: torch.device
    total_steps: int
    tokens_per_sample: int
    export: dict[str, Any]
    """What `shoal export` needs to know of the model."""


@dataclass(frozen=True, slots=True)
class Keepers:
    """Where the process keeps state beyond the generation."""

    saver: Saver
    ram: SnapshotStore | None
    recent: Recent
    scaling: Scaling


class Trainer:
    """Trains one generation. Training thread only."""

    def __init__(
        self,
        spec: JobSpec,
        assignment: Assignment,
        built: Built,
        position: Position,
        keepers: Keepers,
        outbox: Outbox,
        signals: Signals,
    ) -> None:
        self._spec = spec
        self._assignment = assignment
        self._built = built
        self._position = position
        self._saver = keepers.saver
        self._extra = Extra(built.update, spec.seed, keepers.recent, keepers.scaling)
        self._snapshots = Snapshots(
            spec.snapshot, assignment, keepers.ram, outbox, built.view, built.living, self._extra
        )
        self._recent = keepers.recent
        self._scaling = keepers.scaling
        self._outbox = outbox
        self._signals = signals
        self._user_code = UserCode(lambda: position.phase)
        self._replay = Replay(spec, assignment, built.gradients, outbox, signals.check)
        self._parameters = built.assembly.parameters()
        self._saved_mono = time.monotonic()
        self._num_skipped = 0

    def train(self) -> Ending:
        """From the position's step on. FINISHED or YIELDED, each with the part that must become durable first."""
        for part in self._built.assembly.parts:
            part.train()
        # The first snapshot of a new model is that of the first step: until then the one that was restored from is
        # whole, and taking memory for another layout costs as much as a step.
        ending = self._catch_up()
        ended = time.perf_counter()
        while ending is None:
            if self._position.step + 1 in self._assignment.skip_steps:
                self._skip(None)
                requests = Requests()
            else:
                verdict = self._step()
                now = time.perf_counter()
                if verdict.is_finite:
                    self._report(verdict, now - ended)
                requests = verdict.requests
                if verdict.is_finite or requests.yields:
                    self._snapshots.say(self._position.step)
                if requests.snapshots or requests.yields:
                    self._snapshot(replicate=requests.replicates and not requests.is_sending)
                self._snapshots.update(verdict, now - ended, self._position.step)
                ended = now
            ending = self._after(self._position.step, requests)
        return ending

    def _catch_up(self) -> Ending | None:
        """What a lost group may have left undone after the step that this one starts from."""
        step, total = self._position.step, self._built.total_steps
        if step >= total and self._assignment.restore_snapshot is None:  # restored from the final checkpoint
            self._validate()
            return Ending(ExitKind.FINISHED)
        if step >= total or (
            step > 0 and self._assignment.is_recovery and self._assignment.restore_snapshot is not None
        ):
            return self._after(step, Requests())
        return None

    def _after(self, step: int, requests: Requests) -> Ending | None:
        """Validation, checkpoint, and whether this was the last step."""
        is_last = step == self._built.total_steps
        if is_last or is_due(step, self._spec.validation.every_steps):
            self._validate()
        pending = None
        if is_last or requests.durably or requests.saves or is_due(step, self._spec.checkpoint.every_steps):
            pending = self._save(step)
        if is_last:
            return Ending(ExitKind.FINISHED, pending=pending)
        if requests.yields:
            return Ending(ExitKind.YIELDED, pending=pending if requests.durably else None)
        return None

    def _step(self) -> Verdict:
        """One optimizer step, or one that was skipped because its result is not finite."""
        step, built = self._position.step, self._built
        self._replay.run(step)
        start, waited = time.perf_counter(), waited_s()
        scale = self._scaling.scale
        losses = built.gradients.run(step, scale)
        gradients = built.gradients.gradients()
        compute_s = time.perf_counter() - start - (waited_s() - waited)
        copy_s, send_s = self._snapshots.take_costs()
        ballot = Ballot(
            loss_sum=losses,
            squared_norm=built.gradients.squared_norm(gradients) / scale**2,
            requests=self._wishes(step + 1),
            compute_s=compute_s,
            copy_s=copy_s,
            send_s=send_s,
        )
        verdict = hold_vote(ballot, self._assignment.rank, self._assignment.world_size)
        self._signals.check()
        # No scale is to blame for a loss that is not finite: it is multiplied only afterwards, and in fp32.
        scaled = self._scaling.update(is_finite=verdict.is_finite) if math.isfinite(verdict.loss) else None
        if not verdict.is_finite:
            if scaled is not None and not scaled.is_hopeless:
                self._skip(verdict)
            else:
                self._refuse_or_skip(step, verdict)
            return verdict
        self._num_skipped = 0
        self._position.enter(Phase.OPTIMIZER)
        gradients.scale(1 / scale)
        if self._spec.optimizer.clip_norm is not None:
            gradients.clip(verdict.grad_norm, self._spec.optimizer.clip_norm)
        with self._user_code:
            built.living.step(lr_factor(self._spec.schedule, step, built.total_steps))
            built.gradients.after_update()
        self._position.reach(step + 1)
        return verdict

    def _wishes(self, step: int) -> Requests:
        """What this rank wants after step number `step`."""
        is_asked = self._signals.is_yield_asked()
        snapshots = self._snapshots.is_due(step)
        return Requests(
            yields=is_asked,
            durably=is_asked and self._signals.is_durable_asked(),
            saves=self._is_save_time(),
            snapshots=snapshots,
            replicates=snapshots and self._snapshots.is_sending_due(step),
            is_sending=self._snapshots.is_sending,
            lacks_copy=self._snapshots.lacks_copy,
        )

    def _refuse_or_skip(self, step: int, verdict: Verdict) -> None:
        self._num_skipped += 1
        health, optimizer = self._spec.health, self._spec.optimizer
        if health.non_finite is not NonFinitePolicy.SKIP or self._num_skipped > health.max_non_finite:
            raise NonFinite(
                f"loss {verdict.loss} and gradient norm {verdict.grad_norm} in step {step + 1}. Nothing was updated. "
                f"A lower optimizer.lr ({optimizer.lr:g}), a longer schedule.warmup_steps "
                f"({self._spec.schedule.warmup_steps}) or a lower optimizer.clip_norm may help; health.non_finite "
                f"({health.non_finite}) can skip such a step, at most health.max_non_finite "
                f"({health.max_non_finite}) in a row."
            )
        self._skip(verdict)

    def _skip(self, verdict: Verdict | None) -> None:
        """The step's samples are used up, and nothing is updated; all ranks."""
        for parameter in self._parameters:
            parameter.grad = None
        self._position.reach(self._position.step + 1)
        if self._assignment.rank == 0:
            self._outbox.tell(
                StepSkipped(
                    generation=self._assignment.generation,
                    step=self._position.step,
                    at=time.time(),
                    loss=_finite(verdict.loss) if verdict else None,
                    grad_norm=_finite(verdict.grad_norm) if verdict else None,
                )
            )

    def _snapshot(self, *, replicate: bool) -> None:
        if not self._snapshots.is_on:
            return
        self._position.enter(Phase.SNAPSHOT)
        self._snapshots.take(self._position.step, replicate=replicate)

    def _is_save_time(self) -> bool:
        """Rank 0's clock decides for all."""
        every_s = self._spec.checkpoint.every_s
        is_timed = every_s is not None and self._assignment.rank == 0
        return is_timed and time.monotonic() - self._saved_mono >= (every_s or 0)

    def _report(self, verdict: Verdict, step_s: float) -> None:
        """All ranks remember it, rank 0 tells it."""
        step = self._position.step
        report = StepReport(
            generation=self._assignment.generation,
            step=step,
            at=time.time(),
            loss=verdict.loss,
            grad_norm=verdict.grad_norm,
            lr=self._spec.optimizer.lr * lr_factor(self._spec.schedule, step - 1, self._built.total_steps),
            tokens=self._spec.batch.global_size * self._built.tokens_per_sample,
            step_s=step_s,
            world_size=self._assignment.world_size,
            compute_s=verdict.compute_s,
        )
        self._recent.add(report)
        if self._assignment.rank == 0:
            self._outbox.tell(report)

    def _validate(self) -> None:
        if self._built.validation is not None:
            report = self._built.validation.run(self._position.step, self._built.device)
            self._signals.check()
            if self._assignment.rank == 0:
                self._outbox.tell(report)

    def _save(self, step: int) -> CheckpointName:
        self._position.enter(Phase.SAVING)
        with self._user_code:
            tensors = self._built.view.tensors()
            extra = {**self._extra.values(step), "export": self._built.export}
            name = self._saver.save(self._assignment, step, tensors, extra, self._signals.check)
        self._saved_mono = time.monotonic()
        return name


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
