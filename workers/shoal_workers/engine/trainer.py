"""The training loop of one generation: step, vote, update, snapshot, report, validate, save; until finished or yielded.

    forward + backward of the local micro-batches      no parameter is changed
    the vote                                           the only all-reduce of the loop itself
    -------- from here on every rank does the same ----------------------------------------------------
    clip, learning rate, optimizer step                completed steps + 1
    snapshot in memory, report (rank 0), validation, checkpoint part       as the step and the vote require

Raises exceptions that `process/exits.py` classifies. Besides the vote, every decision is a function of spec and step.
Called by the engine on the training thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.fault_tolerance import NonFinitePolicy
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind, Phase
from shoal_workers.contract.mixture_weights import InForce
from shoal_workers.contract.validation import is_exhausted, judge
from shoal_workers.contract.worker_reports import StepReport, StepSkipped
from shoal_workers.engine.generation_ends import NonFinite
from shoal_workers.engine.group.collectives import clock_of_this_thread, waited_s
from shoal_workers.engine.group.gradient_buckets import clip_factor
from shoal_workers.engine.health.non_finite import NonFiniteCheck, finite, not_finite_ranks, suspect_of, whose
from shoal_workers.engine.health.replay import Replay
from shoal_workers.engine.health.replica_check import ReplicaCheck
from shoal_workers.engine.islands.islands import Islands
from shoal_workers.engine.model.runtime import ModelRuntime
from shoal_workers.engine.process.exits import GenerationEnd
from shoal_workers.engine.process.use_meter import CpuWait
from shoal_workers.engine.profiling.profiling import Profiling
from shoal_workers.engine.randomness import seed_everything
from shoal_workers.engine.schedule import compute_lr_factor, count_total_steps, is_due
from shoal_workers.engine.state.restore import Restored, is_restoring, restore, step_of_checkpoint
from shoal_workers.engine.state.saving import Saver, is_save_time
from shoal_workers.engine.state.snapshots import Snapshots
from shoal_workers.engine.state.training_state import NonTensorState, Recent
from shoal_workers.engine.step.batches import training_batches
from shoal_workers.engine.step.first_look import remarks_on_labels, remarks_on_validation
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.gradients import GradientPass
from shoal_workers.engine.step.loss_scale import Scaling
from shoal_workers.engine.step.validation import validation_of
from shoal_workers.engine.step.vote import Ballot, Requests, Verdict, hold_vote
from shoal_workers.snapshot_store.store import SnapshotStore


class Trainer:
    """Trains one generation: `restore`, then `train`. Training thread only."""

    def __init__(
        self,
        generation: Generation,
        runtime: ModelRuntime,
        saver: Saver,
        store: SnapshotStore | None,
        profiling: Profiling,
        gradients: GradientPass | None = None,
    ) -> None:
        """`gradients`: those of a proof; None means those of the training."""
        spec, task = generation.spec, generation.task
        is_proof = gradients is not None
        self._generation = generation
        self._runtime = runtime
        self._saver = saver
        self._store = store
        self._profiling = profiling
        if gradients is None:
            batches = training_batches(generation)
            gradients = GradientPass(generation, runtime.assembly, batches, runtime.calls, runtime.trained)
        self._batches = gradients.batches
        self._gradients = gradients
        self._validation = validation_of(generation, runtime.update, runtime.assembly, self._gradients.passes)
        self._replay = Replay(generation, self._gradients)
        self._replicas = ReplicaCheck(generation, runtime.state.view)
        self._non_finite = NonFiniteCheck(generation, self._gradients, self._replicas)
        self._recent = Recent()
        self._scaling = Scaling(spec)
        self._extra = NonTensorState(runtime.update, spec.seed, task.content_hash, self._recent, self._scaling)
        self._snapshots = Snapshots(
            generation,
            store,
            runtime.state,
            self._extra,
            budget=spec.snapshot.budget,
        )
        self._cpu_wait = CpuWait()
        self._saving_s = self._validating_s = 0.0
        """Seconds since the last vote, or the last report."""
        self._saved_mono = time.monotonic()
        self._num_skipped = 0
        self._standing = generation.assignment.standing
        self._ended = 0.0
        """The time at which the step before ended."""
        with generation.user_code:
            self._tokens_per_sample = task.tokens_per_sample
        assert spec.stop is not None, "a task has an end"
        self.total_steps = count_total_steps(
            spec.stop,
            global_size=spec.samples_per_step,
            num_samples=self._batches.num_samples,
            tokens_per_sample=self._tokens_per_sample,
        )
        if task.alternation is not None and spec.stop.epochs is not None:
            self.total_steps = task.alternation.num_steps(self.total_steps)
        self._islands: Islands | None = None
        if spec.islands is not None and not is_proof:
            self._islands = Islands(generation, runtime, spec.islands, saver.root, self.total_steps)

    def restore(self) -> Restored:
        """Read the state that the assignment names, if any. No collective. Raises as `state.restore.restore`."""
        generation = self._generation
        if not is_restoring(generation.assignment):
            self._weigh((), 0)
            return Restored(0, 0, 0)
        generation.position.enter(Phase.RESTORING)
        with generation.user_code:
            if not self._runtime.state.holds(generation.assignment.restore_snapshot):
                self._runtime.update.materialise_state()
            self._snapshots.move_before_restore()
            self._runtime.state.view.tensors()
        origin, content_hash = generation.spec.continue_from, generation.task.content_hash
        restored = restore(generation, self._runtime.state, self._store, origin=origin, content_hash=content_hash)
        generation.position.reach(restored.step)
        self._weigh(restored.weight_changes, restored.step)
        self.total_steps = max(self.total_steps, restored.step)  # `stop` may have been shortened
        if self._stops_early and self._standing is not None and restored.step >= self._standing.judged_step:
            self.total_steps = restored.step
        for report in restored.past:
            self._recent.add(report)
        self._scaling.restore(restored.loss_scale)
        return replace(restored, frees_source=self._snapshots.mark_restored(restored.step))

    def _weigh(self, recorded: Sequence[InForce], step: int) -> None:
        """Put the changes of a mixture's weights into force, before the first sample is read."""
        generation = self._generation
        change, late = generation.task.change_weights(generation.spec, recorded, step)
        self._extra.weight_changes = change
        if late is not None:
            generation.say(
                f"weights of data.changes take effect at step {late.at_step}, later than planned: the steps before it "
                "were trained before the workers learned of the change"
            )

    def train(self) -> GenerationEnd:
        """Trains from the position's step on. Returns FINISHED or YIELDED, each with the part that must become durable
        first."""
        self._saved_mono = time.monotonic()
        if self._islands is not None:
            self._islands.begin()
        self._snapshots.start()
        for part in self._runtime.assembly.parts:
            self._set_training(part)
        number, rank, is_clean = self._generation.number, self._generation.rank, False
        try:
            end = self._train_until_end()
            is_clean = True
            return end
        finally:
            self._profiling.leave(number, rank, is_clean=is_clean)
            self.close()

    def _set_training(self, part: nn.Module) -> None:
        """Call `train()`, with a remark on what was built in evaluation mode."""
        evaluating = [name for name, module in part.named_modules() if part.training and not module.training]
        part.train()
        names = [name for name in evaluating if part.get_submodule(name).training]
        if names and self._generation.position.step == 0:
            self._generation.remarks.add(
                f"{names[0]!r} was in evaluation mode when build_model() returned, and is in training mode now, as "
                "after model.train(). If it is to stay in evaluation mode, override train() in the class of the model"
            )

    def close(self) -> None:
        self._replicas.stop()
        self._cpu_wait.close()
        if self._islands is not None:
            self._islands.close()

    def _train_until_end(self) -> GenerationEnd:
        position = self._generation.position
        if position.step == 0:
            self._look_at_labels()
        # The first snapshot of a model that begins at step 0 is that of its first step. A restored one has one already.
        end = self._catch_up()
        self._ended = time.perf_counter()
        while end is None:
            self._profiling.boundary(self._generation.number, self._generation.rank, lambda: self._batches.spent_s)
            if position.step + 1 in self._generation.assignment.skip_steps:
                self._skip(None)
                requests = Requests()
            else:
                verdict = self.step()
                now = time.perf_counter()
                step_s, self._ended = now - self._ended, now
                if verdict.is_finite:
                    self._report(verdict, step_s)
                self._generation.remarks.say(self._generation.rank, self._generation.outbox.log_text)
                requests = verdict.requests
                self._snapshots.end_step(verdict, step_s, position.step)
            end = self._after(position.step, requests)
        return end

    def _look_at_labels(self) -> None:
        task = self._generation.task
        for split, data in (("training", task.train_data), ("validation", task.validation_data)):
            for text in remarks_on_labels(data, split):
                self._generation.remarks.add(text)

    def _catch_up(self) -> GenerationEnd | None:
        """Do what a lost group may have left undone after the step that this generation starts from."""
        step, assignment = self._generation.position.step, self._generation.assignment
        is_from_memory = assignment.restore_snapshot is not None
        if step >= self.total_steps or (step > 0 and assignment.is_recovery and is_from_memory):
            return self._after(step, Requests())
        return None

    def plain_values(self) -> bytes:
        """What a checkpoint has of the state beside tensors, as JSON."""
        return self._extra.encoded(self._generation.position.step)

    def _after(self, step: int, requests: Requests) -> GenerationEnd | None:
        """Validate and save if due. Returns the end if this was the last step."""
        spec = self._generation.spec
        if step >= self.total_steps:
            return self._finish(step)
        if requests.yields:
            self._replicas.run(step)
        is_best = is_due(step, spec.validation.every_steps) and self._validate()
        if self._stops_early:
            self.total_steps = step
            return self._finish(step, is_validated=True)
        pending = None
        if requests.durably or requests.saves or is_best or is_due(step, spec.checkpoint.every_steps):
            pending = self._save(step)
        if requests.yields:
            return GenerationEnd(ExitKind.YIELDED, pending=pending if requests.durably else None)
        return None

    @property
    def _stops_early(self) -> bool:
        return is_exhausted(self._standing, self._generation.spec.validation)

    def _finish(self, step: int, *, is_validated: bool = False) -> GenerationEnd:
        """The last checkpoint is committed before the final validation: code of the task that kills its worker there
        must not cost the model."""
        assignment, pending = self._generation.assignment, None
        self._replicas.run(step)
        if not self._saver.owns(assignment.restore_from) or step_of_checkpoint(assignment.restore_from) < step:
            pending = self._save(step)
            self._generation.position.enter(Phase.COMMITTING)
            self._saver.wait_for_commit(pending, assignment.commit_timeout_s, self._generation.check)
        if not is_validated:
            self._validate()
        return GenerationEnd(ExitKind.FINISHED, pending=pending)

    def step(self) -> Verdict:
        """Makes one optimizer step, or one that was skipped because its result is not finite."""
        generation, spec = self._generation, self._generation.spec
        step = generation.position.step
        self._replay.run(step)
        self._replicas.begin(step)  # sums up beside the passes, which change no parameter
        generation.collectives.begin_step()
        clock = clock_of_this_thread()
        device_s = clock.take() if clock is not None else None
        if clock is not None:
            clock.begin()
        start, waited, data = time.perf_counter(), waited_s(), self._batches.spent_s
        scale = self._scaling.scale
        losses = self._gradients.run(step, scale, is_voted=True)
        generation.position.spent_on_data(self._batches.spent_s)
        gradients = self._gradients.gradients()
        if clock is not None:
            clock.end()
        compute_s = device_s if device_s is not None else time.perf_counter() - start - (waited_s() - waited)
        requests = replace(
            self._snapshots.requests(
                step + 1, saves=is_save_time(generation.assignment, spec.checkpoint.every_s, self._saved_mono)
            ),
            varies=self._gradients.passes.has_deviated,
            lacks_round=self._islands is None or self._islands.lacks_round(step, self.total_steps - step - 1),
        )
        self._replicas.finish(step)
        copy_s, send_s = self._snapshots.take_costs()
        saving_s, self._saving_s = self._saving_s, 0.0
        ballot = Ballot(
            loss_sum=losses,
            squared_norm=self._gradients.squared_norm(gradients) / scale**2,
            requests=requests,
            compute_s=compute_s,
            copy_s=copy_s,
            send_s=send_s,
            arrived_step=self._snapshots.arrived_step,
            data_s=self._batches.spent_s - data,
            cpu_wait_s=self._cpu_wait.take(),
            saving_s=saving_s,
            metrics=self._gradients.metric_sums,
            uses=self._gradients.uses(),
        )
        verdict = hold_vote(ballot, generation.rank, generation.layout.world_size)
        generation.collectives.end_step()
        generation.check()
        if verdict.requests.varies:  # the weight has no meaning, either
            self._gradients.passes.keep_whole()
            return self._again()
        weight = self._gradients.weight(verdict.metrics)
        is_rescaled = self._scaling.learn(weight)
        if self._gradients.learn(verdict.uses) or is_rescaled:
            return self._again()
        verdict = verdict.divide_by(weight)
        # A loss that is not finite is not the scale's fault: the loss is multiplied by it only afterwards, in fp32.
        has_overflowed = math.isfinite(verdict.loss) and self._scaling.update(is_finite=verdict.is_finite)
        if not verdict.is_finite:
            if has_overflowed:
                self._skip(verdict)
            else:
                if weight:
                    self._non_finite.run(step, scale, losses, ballot.squared_norm)
                self._refuse_or_skip(step, verdict, counts=weight > 0)
            return verdict
        self._num_skipped = 0
        generation.position.enter(Phase.OPTIMIZER)
        self._gradients.drop_unused(verdict.uses, step)
        with generation.user_code:
            self._gradients.balance()
        # Two multiplications: one by the product of both could give other bits.
        gradients.scale(1 / (scale * weight))
        gradients.scale(clip_factor(verdict.grad_norm, spec.optimizer.clip_norm))
        seed_everything(randomness_seed(spec.seed, step, spec.batch.num_micro_batches))  # on all ranks alike
        if self._islands is not None:
            lands = not verdict.requests.lacks_round
            self._islands.begin_update(step, self.total_steps - step - 1, verdict.loss, lands=lands)
        with generation.user_code:
            self._runtime.state.step(compute_lr_factor(spec.schedule, step, self.total_steps))
        if self._islands is not None:
            self._islands.end_update()
        generation.position.reach(step + 1)
        return verdict

    def _again(self) -> Verdict:
        """Repeats the step, on all ranks; nothing has been changed."""
        self._gradients.forget()
        return self.step()

    def _refuse_or_skip(self, step: int, verdict: Verdict, *, counts: bool) -> None:
        """`counts`: the weights of the step do not add up to 0."""
        self._num_skipped += 1
        spec = self._generation.spec
        health, optimizer = spec.health, spec.optimizer
        if health.non_finite is not NonFinitePolicy.SKIP or self._num_skipped > health.max_non_finite:
            if not counts:
                raise NonFinite(
                    f"{self._generation.task.line_of('loss')}: the weights of step {step + 1} add up to 0, so it has "
                    "no mean loss. Nothing was updated. Correct the weights, or set batch.global_size "
                    f"({spec.batch.global_size}) higher; health.non_finite ({health.non_finite}) can skip such a step, "
                    f"at most health.max_non_finite ({health.max_non_finite}) in a row.",
                    None,
                )
            raise NonFinite(
                f"loss {verdict.loss} and gradient norm {verdict.grad_norm} in step {step + 1}. Nothing was updated. "
                f"A lower optimizer.lr ({optimizer.lr:g}), a longer schedule.warmup_steps "
                f"({spec.schedule.warmup_steps}) or a lower optimizer.clip_norm may help; health.non_finite "
                f"({health.non_finite}) can skip such a step, at most health.max_non_finite "
                f"({health.max_non_finite}) in a row.{whose(verdict)}",
                suspect_of(verdict, step + 1),
            )
        self._skip(verdict)

    def _skip(self, verdict: Verdict | None) -> None:
        """The step's samples are used up, and nothing is updated; on all ranks."""
        generation = self._generation
        self._gradients.forget()
        generation.position.reach(generation.position.step + 1)
        if self._islands is not None:
            self._islands.skip_update(self.total_steps - generation.position.step)
        generation.report(
            StepSkipped(
                generation=generation.number,
                step=generation.position.step,
                at=time.time(),
                loss=finite(verdict.loss) if verdict else None,
                grad_norm=finite(verdict.grad_norm) if verdict else None,
                ranks=not_finite_ranks(verdict) if verdict else (),
            )
        )

    def _report(self, verdict: Verdict, step_s: float) -> None:
        """All ranks keep the report, rank 0 sends it."""
        generation = self._generation
        spec, step = generation.spec, generation.position.step
        report = StepReport(
            generation=generation.number,
            step=step,
            at=time.time(),
            loss=verdict.loss,
            grad_norm=verdict.grad_norm,
            lr=spec.optimizer.lr * compute_lr_factor(spec.schedule, step - 1, self.total_steps),
            tokens=spec.batch.global_size * self._tokens_per_sample,
            step_s=step_s,
            world_size=generation.layout.world_size,
            compute_s=verdict.compute_s,
            data_s=verdict.data_s,
            cpu_wait_s=verdict.cpu_wait_s,
            saving_s=verdict.saving_s,
            validating_s=self._validating_s,
            metrics=self._gradients.metrics(verdict.metrics),
        )
        self._validating_s = 0.0
        self._recent.add(report)
        generation.report(report)

    def _validate(self) -> bool:
        """Return whether the checkpoint of this step is one of those to keep for its validation. Equal on all ranks."""
        if self._validation is None:
            return False
        generation, step = self._generation, self._generation.position.step
        start = time.perf_counter()
        report = self._validation.run(step)
        generation.position.spent_on_data(self._batches.spent_s, in_phase=Phase.VALIDATING)
        self._validating_s += time.perf_counter() - start
        generation.check()
        rule, keep = generation.spec.validation, generation.spec.checkpoint.keep_best
        generation.report(report)
        for text in remarks_on_validation(report, rule.metric) if self._standing is None else ():
            generation.say(text)
        self._standing = judge(self._standing, rule, keep, step=step, loss=report.loss, metrics=report.metrics)
        return step in self._standing.kept_steps

    def _save(self, step: int) -> CheckpointName:
        generation = self._generation
        generation.position.enter(Phase.SAVING)
        start = time.perf_counter()
        with generation.user_code:
            tensors = self._runtime.state.view.tensors()
            extra = {**self._extra.values(step), "export": generation.task.export}
            name = self._saver.save(generation.assignment, step, tensors, extra, generation.check)
        self._saved_mono = time.monotonic()
        self._saving_s += time.perf_counter() - start
        return name
