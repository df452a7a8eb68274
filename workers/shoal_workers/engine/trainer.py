"""The training loop of one generation: step, vote, update, report, validate, save; until finished or asked to yield.

    forward + backward of the local micro-batches      nothing is mutated
    the vote                                           the only all-reduce of the loop itself
    -------- from here on every rank does the same ----------------------------------------------------
    clip, learning rate, optimizer step                completed steps + 1
    report (rank 0), validation, checkpoint part       as the step and the vote say

Raises what `endings` classifies. Everything that it decides from, besides the vote, is a function of spec and step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import Assignment, ExitKind, Phase, StepReport
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.clip import clip, local_gradients, squared_norm
from shoal_workers.engine.endings import Ending
from shoal_workers.engine.errors import NonFinite
from shoal_workers.engine.extent import is_due
from shoal_workers.engine.gradients import GradientPass
from shoal_workers.engine.outbox import Outbox
from shoal_workers.engine.position import Position
from shoal_workers.engine.saving import Saver
from shoal_workers.engine.schedule import lr_factor
from shoal_workers.engine.state import extra_of, tensors_of
from shoal_workers.engine.update import Update
from shoal_workers.engine.user_code import UserCode
from shoal_workers.engine.validation import Validation
from shoal_workers.engine.vote import Ballot, Verdict, hold_vote


@dataclass(frozen=True, slots=True)
class Signals:
    """What the control thread may have said about this generation."""

    check: Callable[[], None]
    """Raises Fenced once the generation is fenced."""
    is_yield_asked: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Built:
    """What a generation is made of, after form, build and restore."""

    model: nn.Module
    """Sharded."""
    update: Update
    gradients: GradientPass
    validation: Validation | None
    device: torch.device
    total_steps: int
    tokens_per_sample: int


class Trainer:
    """Trains one generation. Training thread only."""

    def __init__(
        self,
        spec: JobSpec,
        assignment: Assignment,
        built: Built,
        position: Position,
        saver: Saver,
        outbox: Outbox,
        signals: Signals,
    ) -> None:
        self._spec = spec
        self._assignment = assignment
        self._built = built
        self._position = position
        self._saver = saver
        self._outbox = outbox
        self._signals = signals
        self._user_code = UserCode(lambda: position.phase)
        self._parameters = [p for p in built.model.parameters() if p.requires_grad]
        self._saved_mono = time.monotonic()

    def train(self) -> Ending:
        """From the position's step on. FINISHED or YIELDED, each with the part that must become durable first."""
        self._built.model.train()
        ended = time.perf_counter()
        if self._position.step >= self._built.total_steps:  # restored from the final checkpoint
            self._validate()
            return Ending(ExitKind.FINISHED)
        while True:
            step, lr, verdict = self._step()
            now = time.perf_counter()
            self._report(step, lr, verdict, now - ended)
            ended = now
            is_last = step == self._built.total_steps
            if is_last or is_due(step, self._spec.validation.every_steps):
                self._validate()
            pending = None
            if is_last or verdict.yields or verdict.saves or is_due(step, self._spec.checkpoint.every_steps):
                pending = self._save(step)
            if is_last:
                return Ending(ExitKind.FINISHED, pending=pending)
            if verdict.yields:
                return Ending(ExitKind.YIELDED, pending=pending)

    def _step(self) -> tuple[int, float, Verdict]:
        step, built = self._position.step, self._built
        losses = built.gradients.run(step)
        gradients = local_gradients(self._parameters)
        verdict = hold_vote(
            Ballot(
                loss_sum=losses,
                squared_norm=squared_norm(gradients, built.device),
                wants_yield=self._signals.is_yield_asked(),
                wants_save=self._is_save_time(),
            ),
            self._assignment.world_size,
        )
        self._signals.check()
        if not verdict.is_finite:
            raise NonFinite(
                f"loss {verdict.loss} and gradient norm {verdict.grad_norm} in step {step + 1}. Nothing was updated. "
                f"A lower optimizer.lr ({self._spec.optimizer.lr:g}), a longer schedule.warmup_steps "
                f"({self._spec.schedule.warmup_steps}) or a lower optimizer.clip_norm may help."
            )
        self._position.enter(Phase.OPTIMIZER)
        if self._spec.optimizer.clip_norm is not None:
            clip(gradients, verdict.grad_norm, self._spec.optimizer.clip_norm)
        factor = lr_factor(self._spec.schedule, step, built.total_steps)
        with self._user_code:
            built.update.step(factor)
        self._position.reach(step + 1)
        return step + 1, self._spec.optimizer.lr * factor, verdict

    def _is_save_time(self) -> bool:
        """Rank 0's clock decides for all."""
        every_s = self._spec.checkpoint.every_s
        is_timed = every_s is not None and self._assignment.rank == 0
        return is_timed and time.monotonic() - self._saved_mono >= (every_s or 0)

    def _report(self, step: int, lr: float, verdict: Verdict, step_s: float) -> None:
        if self._assignment.rank == 0:
            self._outbox.tell(
                StepReport(
                    generation=self._assignment.generation,
                    step=step,
                    at=time.time(),
                    loss=verdict.loss,
                    grad_norm=verdict.grad_norm,
                    lr=lr,
                    tokens=self._spec.batch.global_size * self._built.tokens_per_sample,
                    step_s=step_s,
                    world_size=self._assignment.world_size,
                )
            )

    def _validate(self) -> None:
        if self._built.validation is not None:
            report = self._built.validation.run(self._position.step, self._built.device)
            self._signals.check()
            if self._assignment.rank == 0:
                self._outbox.tell(report)

    def _save(self, step: int) -> CheckpointName:
        self._position.enter(Phase.SAVING)
        update = self._built.update
        with self._user_code:
            tensors = tensors_of(self._built.model, update)
            extra = extra_of(update, step=step, seed=self._spec.seed)
            name = self._saver.save(self._assignment, step, tensors, extra, self._signals.check)
        self._saved_mono = time.monotonic()
        return name
