"""`Run`: what a loop of the user's own gets of Shoal, and all that it has to say to it.

    wrap       shards a model over the ranks, if the spec says so
    track      what makes up the state; it is restored here, when the loop is entered again
    batches    this rank's micro-batches of each global batch, which is the same at every world size (also
               `global_batches`, for several updates in a step)
    backward   adds up weighted gradients        update   sums them over all ranks and steps one optimizer
    commit     the step is complete: vote, report, snapshot, checkpoint
    epochs     the epochs that are left, in each of which `batches` ends with the data
    steps      update after this rank's last micro-batch of the step, and commit when the loop asks for the next one

The loop stays the user's: it may make several updates in a step, validate at any point, call collectives of its own.
When the group changes, one of these calls, or a collective, leaves the function with an exception that `except
Exception` does not catch; the function is then called again, with another Run. All of it on the training thread.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.batch_partition import MicroBatch, randomness_seed
from shoal_workers.contract.messages import Phase
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import is_metric_name, suggested_name
from shoal_workers.engine.generation_ends import GroupBroken, NonFinite
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.group.gradient_buckets import clip_factor, sum_squares
from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.loop.boundary import Observer, StepBoundary, StepResults, TrackedState
from shoal_workers.engine.loop.buffers import LoopBuffers
from shoal_workers.engine.loop.data import Epoch, Reader, Source, Wanted, is_stream, source_of
from shoal_workers.engine.loop.gradients import Gradients, are_any_used
from shoal_workers.engine.loop.late_changes import LateChanges
from shoal_workers.engine.loop.sharded import ShardedGradients, begin_sums, is_sharded, wrapped
from shoal_workers.engine.loop.streams import Streams, StreamStates
from shoal_workers.engine.loop.tracked import Stateful, Tracked
from shoal_workers.engine.loop.untracked import UntrackedState
from shoal_workers.engine.media.current import split
from shoal_workers.engine.media.recorder import Recorder
from shoal_workers.engine.parallel.device_copies import BatchCopies, to_device
from shoal_workers.engine.process.data_processes import DataProcesses
from shoal_workers.engine.process.exits import GenerationEnd
from shoal_workers.engine.randomness import seed_everything
from shoal_workers.engine.state.restore import Restored, is_restoring, read_source, start_step, when_all_have_restored
from shoal_workers.engine.state.saving import Saver
from shoal_workers.engine.state.training_state import Recent
from shoal_workers.engine.step.first_look import look
from shoal_workers.engine.step.generation import Membership
from shoal_workers.engine.step.vote import Verdict
from shoal_workers.engine.task.data_identity import RankData
from shoal_workers.snapshot_store.store import SnapshotStore

AFTER_A_PASS = 0x41465450
"""Separates the random numbers that a loop draws after the last micro-batch from those of micro-batches. They are the
same on all ranks."""
_SAME_RATE = 1e-9
"""Relative variance of the learning rate over the ranks that is rounding."""


class GlobalBatch:
    """This rank's micro-batches of one step. Each iteration gives them again, with random numbers of its own."""

    def __init__(self, run: Run, step: int, source: Source, num_samples: int, *, again: bool) -> None:
        """`step`: completed steps before it. `again`: it may be iterated over more than once."""
        self.step = step
        self._run = run
        self._source = source
        self._num_samples = num_samples
        self._again = again
        self._num_passes = 0

    def __iter__(self) -> Iterator[Any]:
        source = self._source
        first, self._num_passes = self._num_passes * source.num_micro_batches, self._num_passes + 1
        epoch = source.epoch
        own = source.own if epoch is None else epoch.weighted(source.own, self.step)
        # Of each half of the step, which are the shares of two ranks.
        half, most = -(-source.num_micro_batches // 2), self._run.most_micro_batches or len(own)
        chosen = [number for number in range(len(own)) if number % half < most]
        for number, micro in enumerate(own[: chosen[-1] + 1]):
            if number not in chosen:
                source.get(self.step, number, again=self._again)  # in its place
                continue

            def read(number: int = number) -> Any:
                return source.get(self.step, number, again=self._again)

            left = len(chosen) - chosen.index(number) - 1
            self._run.default_weight = 1.0 if epoch is None else epoch.share(self.step, micro.index)
            yield self._run.enter_micro_batch(micro, left, self._num_samples, self.step, first, read)
        self._run.seed_after_pass(self.step, self._num_passes)


class Run:
    """One life of the loop in one group. The module docstring shows the order of the calls."""

    def __init__(
        self,
        membership: Membership,
        group: Group,
        spec: JobSpec,
        *,
        store: SnapshotStore | None,
        saver: Saver,
        host: str,
        recorder: Recorder,
    ) -> None:
        self._membership = membership
        self._group = group
        self._spec = spec
        self._store = store
        self._saver = saver
        self._host = host
        self._recorder = recorder
        self._boundary: StepBoundary | None = None
        self.loss: float | None = None
        """Loss of the newest update, over the global batch: the same on all ranks. None before the first one."""
        self._results = StepResults()
        """Those of the step that is not committed yet."""
        self._data_s = 0.0
        self._awaits_commit = False
        self._updated: set[int] = set()
        """Ids of the optimizers that were updated since the last commit."""
        self._buffer_versions: list[int] = []
        """Counts of changes of the tracked modules' buffers after the newest `steps`."""
        """`steps` has ended a step, and the loop may still change its state: schedules, averages."""
        self._micro = MicroBatch(0, 1.0)
        self.default_weight = 1.0
        """That of a backward pass of the micro-batch."""
        self._is_in_micro_batch = False
        """False if the loop reads data of its own: then each backward pass is a micro-batch."""
        self._num_left = 0
        """Micro-batches of this step that this rank has not begun yet."""
        self._weight_sum = 0.0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=membership.device)
        """Weights of micro-batches and weighted losses of this rank since the last update."""
        self._micro_weight = 0.0
        """How much of `_weight_sum` is of the current micro-batch: the largest weight of its backward passes."""
        self._last_weight = 0.0
        """Weight of the newest update, over the global batch."""
        self._num_numbers = 0
        """The loss in the first vote of the last step."""
        self._gradients = Gradients(group.gradients)
        self._zero = torch.zeros((), dtype=torch.float64, device=membership.device)
        self._buffers = LoopBuffers({}, 0, 1, membership.device)
        """Those of the tracked modules."""
        self._late_changes = LateChanges({})
        self._are_factors_usual: dict[str, bool] = {}
        """See `LateChanges`."""
        self._processes = DataProcesses()
        self._copies = BatchCopies(membership.device)
        self._stream_states = StreamStates()
        self._sources: list[Source] = []
        self._has_left_stream = False
        self._epochs: list[list[int]] = []
        """The newest epoch of each call of `epochs`, and the completed steps at its beginning. Part of the state."""
        self._num_epoch_calls = 0
        self._epoch: Epoch | None = None
        """The epoch that the loop is in."""
        self._is_epoch_read = False
        """`batches` was called in it."""
        self._entered: object = None
        """Mark of what was tracked when the loop entered the epoch, if steps of it were complete."""
        self._mark: Callable[[], object] = object
        self._untracked: UntrackedState | None = None
        """None in trials, which compare what is not tracked themselves."""
        self.objects: Mapping[str, Stateful] = {}
        """What is tracked, by name."""
        self.collates: list[object] = []
        """What makes batches, in the order in which the loop has opened its data."""
        self.steps_per_epoch: int | None = None
        """Steps in which each sample is read once; None if that is not known."""
        self.most_workers: int | None = None
        """Among how many the data can be divided; None before they are opened."""
        self.most_micro_batches: int | None = None
        """How many are computed of each half of a step; None means all. Trials have few of them."""
        self.is_silent = False
        """No rank is to print and write files."""
        self.noise = 0.0
        """Is added to gradients, with either sign, as a share of the largest one."""
        self.observer: Observer | None = None
        seed_everything(randomness_seed(spec.seed, 0, 0))

    @property
    def rank(self) -> int:
        return self._membership.rank

    @property
    def world_size(self) -> int:
        return self._membership.layout.world_size

    @property
    def is_rank_zero(self) -> bool:
        """True if this is the rank that prints and writes files."""
        return self.rank == 0 and not self.is_silent

    @property
    def device(self) -> torch.device:
        return self._membership.device

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks, for what is wrapped over a mesh: its last axis is that of the shards. `parallelism` of the spec
        says how many there are; by default there is one, and every rank has everything."""
        return self._membership.meshes.dense

    @property
    def step(self) -> int:
        """Completed steps, the one included that `steps` has just ended."""
        return self._membership.position.step + self._awaits_commit

    @property
    def entry_step(self) -> int:
        """Step of the state that `track` puts into the objects; 0 if training begins."""
        return start_step(self._membership.assignment)

    def wrap(self, model: nn.Module, *, blocks: Iterable[nn.Module] | None = None) -> nn.Module:
        """The model as the spec wants it: with `parallelism: {dp_shard: auto}` its parameters are sharded over the
        ranks with FSDP2 (`fully_shard`), else it stays as it is, and every rank has all of it. All ranks have made the
        same model, on `device`. Make optimizers afterwards.

        Args:
            blocks: modules whose parameters are gathered together, one after the other. Default: the children of each
                ModuleList, and those of each Sequential that consist of modules.
        """
        return wrapped(model, self._spec, self._membership.layout, self.mesh, blocks)

    def track(self, **objects: Stateful) -> None:
        """Names the objects that make up the state: models, optimizers, schedulers, averages, counters; anything with
        `state_dict` and `load_state_dict`. Their state of the interrupted step is put into them here, so call it once,
        when all of them are made and before the first step.

        Raises:
            TypeError: an object cannot be tracked; the message says why.
            ValueError: the state to go on from is that of other objects.
        """
        if self._boundary is not None:
            raise RuntimeError("run.track() was called twice. Name all objects in one call.")
        tracked, recent = Tracked(objects, self.mesh), Recent()
        self.objects = objects
        self._gradients.order = tracked.order
        begin_sums(tracked.modules().values(), tracked.optimizers())
        tensors, _ = tracked.collect()  # refuses a state that cannot be kept before anything is restored or trained
        if not self.is_silent and self._membership.layout.dp_shard > 1 and not is_sharded(tensors):
            self._membership.say(
                "parallelism.dp_shard shards the model of a loop, and nothing that run.track() names is sharded: every "
                "worker has all of it. Wrap the model with run.wrap(model), or leave parallelism out."
            )
        if self.most_micro_batches is None:
            self._untracked = UntrackedState(objects, self, self._membership.say)
        restored = self._restore(tracked, recent)
        host_data = RankData("", self._host)
        when_all_have_restored(self._group, restored, host_data, dict)
        self._membership.position.reach(restored.step)
        self._buffers = LoopBuffers(tracked.modules(), self.rank, self.world_size, self.device)
        tracked.unmarked = self._buffers.paths
        if self._spec.elasticity.max_workers > 1:
            self._late_changes = LateChanges(tracked.optimizers(), tracked.order, self._are_factors_usual)
        self._mark = partial(tracked.mark, only_counted=True)
        state = TrackedState(
            tracked,
            self._spec.seed,
            recent,
            self._stream_states,
            self._epochs,
            self._are_factors_usual,
            dict if self._untracked is None else self._untracked.save,
        )
        self._boundary = StepBoundary(
            self._membership, self._spec, state, recent, self._buffers, self._store, self._saver, self.observer
        )

    def untracked(self, *names: str) -> None:
        """Says that these variables may begin anew when the function is called again, because the model that comes out
        does not depend on them. Call it after `track`. `names`: of variables of the program, as messages have them."""
        self._tracked("untracked")
        if self._untracked is not None:
            self._untracked.accepted |= set(names)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs, from the interrupted one on. In each, `batches` or `global_batches` gives the data
        once, from the interrupted step on. What follows (evaluation, schedules) belongs to the epoch's last step, which
        is committed when the loop asks for the next epoch, or returns."""
        self._tracked("epochs")
        call, self._num_epoch_calls = self._num_epoch_calls, self._num_epoch_calls + 1
        if call == len(self._epochs):
            self._epochs.append([0, self.step])
        newest = self._epochs[call]
        while call == len(self._epochs) - 1 and newest[0] < num_epochs:
            self._epoch, self._is_epoch_read = Epoch(*newest), False
            self._entered = self._mark() if self.step > newest[1] else None
            yield newest[0]
            self._epoch = None
            newest[:] = newest[0] + 1, self.step
            self._commit_awaited()

    def batches(
        self,
        data: Any,
        *,
        global_size: int | None = None,
        micro_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        num_streams: int | None = None,
    ) -> Iterator[Any]:
        """This rank's micro-batches, step after step, without end: leave the loop when you are done.

        The samples of a step are the same at every world size, and each rank takes its share of them. A rank may get
        one micro-batch more than others; the others then get one with weight 0, so that all ranks call the same
        collectives.

        Args:
            data: has a length and items; or is a DataLoader, whose batches are the micro-batches; or an iterable that
                has state_dict() and load_state_dict(), which every rank reads; or a function of (stream, num_streams)
                that makes such an iterable for each stream, which one rank reads.
            global_size: samples per step, over all ranks. May be left out for a DataLoader within `epochs`, each of
                whose batches is then a step.
            micro_size: samples per micro-batch; must divide `global_size`. Default: the batch_size of the loader, or so
                many that each of `elasticity.max_workers` ranks has one.
            collate: makes a batch of a list of items, as for a DataLoader.
            num_workers: processes of this rank that read ahead, as for a DataLoader. Default: none.
            prefetch_factor: micro-batches that each of them reads ahead. Default: 2.
            num_streams: of a function; never changes as long as the job lives. Default: `elasticity.max_workers`.
        """
        wanted = Wanted(
            global_size=global_size,
            micro_size=micro_size,
            collate=collate,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            num_streams=num_streams,
        )
        for batch in self._global_batches(data, wanted, again=False):
            yield from batch
            if not self._awaits_commit and self.step == batch.step:
                self._check()
                raise RuntimeError(
                    f"all micro-batches of step {batch.step + 1} are computed, and the loop asks for more without "
                    "run.steps(optimizer) or run.commit(). Call one of them after each micro-batch."
                )

    def global_batches(
        self,
        data: Any,
        *,
        global_size: int | None = None,
        micro_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        num_streams: int | None = None,
    ) -> Iterator[GlobalBatch]:
        """The same, for a loop that makes several updates in a step: each step's micro-batches as something that can be
        iterated over for every one of them. Ends a step with `commit`. Arguments as of `batches`."""
        wanted = Wanted(
            global_size=global_size,
            micro_size=micro_size,
            collate=collate,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            num_streams=num_streams,
        )
        yield from self._global_batches(data, wanted, again=True)

    def _global_batches(self, data: Any, wanted: Wanted, *, again: bool) -> Iterator[GlobalBatch]:
        if is_stream(data):
            self._tracked("batches")
            if self._has_left_stream:
                raise RuntimeError(
                    "run.batches() of a stream was left, and a stream is opened again: which state belongs to it would "
                    "not be known after a lost worker. Iterate over run.batches() once in each call of the function."
                )
        elif hasattr(data, "__len__") and not hasattr(data, "batch_size"):
            self.steps_per_epoch = len(data) // wanted.step_size
        epoch = self._epoch
        if epoch is not None:
            self._begin_epoch(epoch)
        self.collates.append(wanted.collate or getattr(data, "collate_fn", None))
        source = source_of(data, replace(wanted, epoch=epoch), self._reader(), len(self._sources))
        self.most_workers = min(self.most_workers or source.most_workers, source.most_workers)
        if epoch is None:
            self._sources.append(source)
        try:
            while source.epoch is None or self.step < source.epoch.end:
                self._commit_awaited()
                size = wanted.step_size if source.epoch is None else source.epoch.num_samples(self.step)
                yield GlobalBatch(self, self.step, source, size, again=again)
        finally:
            # A stream is closed with the loop: the commit of the step in which it was left needs its state.
            if isinstance(source, Streams):
                self._has_left_stream = True
            else:
                source.close()

    def _begin_epoch(self, epoch: Epoch) -> None:
        if self._is_epoch_read:
            raise RuntimeError(
                f"run.batches() is called again in epoch {epoch.number} of run.epochs(), and one position is kept. "
                "Read one data set in an epoch, or what is not trained on (a validation set) without run."
            )
        if self._entered is not None and self._entered != self._mark():
            raise ValueError(
                f"what is tracked has changed at the beginning of epoch {epoch.number}, of which "
                f"{self.step - epoch.first_step} steps are complete: it would change again whenever the function is "
                "called again. Change it after the epoch's batches."
            )
        self._is_epoch_read = True

    def _reader(self) -> Reader:
        say = self._membership.outbox.log_text
        return Reader(
            rank=self.rank,
            world_size=self.world_size,
            max_workers=self._spec.elasticity.max_workers,
            seed=self._spec.seed,
            device=self.device,
            check=self._check,
            processes=self._processes,
            states=self._stream_states,
            first_look=partial(look, place="the data set of run.batches()", say=say) if self.is_rank_zero else None,
        )

    def backward(self, loss: Tensor, *, weight: float | None = None) -> None:
        """Adds the gradient of `weight` times the loss. `update` divides by the sum of the weights of all micro-batches
        over all ranks. Several calls in one micro-batch add up, and it counts with the largest of their weights.

        Args:
            loss: mean over something, for example the tokens of the micro-batch.
            weight: how many of it, for example the number of tokens. None means 1, and within `epochs` the
                micro-batch's share of the samples of its step.
        """
        self._check()
        if not self._is_in_micro_batch:
            self._commit_step_of_own_data()
            self._begin_untracked()
        self._membership.position.enter(Phase.BACKWARD)
        weight = (self.default_weight if weight is None else weight) * self._micro.weight
        self._late_changes.begin_backward()
        self._gradients.begin_backward(is_last_micro_batch=self._num_left == 0)
        try:
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        finally:
            self._gradients.end_backward()
        self._late_changes.end_backward()
        if not self._is_in_micro_batch:
            self._micro_weight = 0.0
        self._weight_sum += max(0.0, weight - self._micro_weight)
        self._micro_weight = max(weight, self._micro_weight)
        self._buffers.weigh(self._micro_weight)
        self._loss_sum += local_tensor(loss.detach()).double().reshape(()).to(self.device) * weight

    def update(self, optimizer: Optimizer, *, clip: float | None = None) -> float:
        """Makes the gradients of the optimizer's parameters those of the global batch, steps it, and forgets them.

        Collective: all ranks call it, after the same calls before. A parameter without a gradient on every rank keeps
        none. Several optimizers may be updated after the same backward passes, with the same weight. Returns the norm
        of the gradient before it was clipped.

        Args:
            clip: the largest norm; None means any.

        Raises:
            NonFinite: on all ranks; nothing was updated.
        """
        self._check()
        boundary = self._tracked("update")
        changes = self._late_changes.end(optimizer)
        flags = self._gradients.send(optimizer)
        sharded = ShardedGradients(optimizer, self._membership.layout.dp_replicate)
        rate = sum(float(group["lr"]) for group in optimizer.param_groups)
        numbers = [self._weight_sum, rate, rate**2, *changes, *flags]
        rewritten = self._gradients.rewritten(optimizer)
        is_rewritten = self._zero if rewritten is None else to_device(rewritten.double(), self.device)
        scalars = torch.stack([self._loss_sum, sharded.squares(self.device), is_rewritten])
        on_device = torch.cat([scalars, self._buffers.send()])
        if self._results.loss is None:
            self._num_numbers = len(numbers) + len(on_device)
        vote = boundary.begin_vote(self._data_s, [*[0.0] * self.world_size, *numbers], on_device)
        self._weight_sum, self._loss_sum, self._micro_weight = 0.0, self._zero.clone(), 0.0
        sums = self._gradients.wait_for_sums(optimizer)
        verdict = vote.count_ballots(sum_squares(sums, self.device).reshape(1))
        self._check()  # an aborted communicator ends without an error
        self._refuse_leaving_alone(verdict)
        boundary.voted(verdict)
        weight, rates, squared_rates, *totals = verdict.uses[self.world_size :]
        sums_of_changes, totals = totals[: len(changes)], totals[len(changes) :]
        loss, sharded_squares, num_rewritten, *of_buffers = totals[len(flags) :]
        if self.world_size * squared_rates - rates**2 > _SAME_RATE * rates**2:
            raise ValueError(
                f"the learning rate differs between ranks in step {self.step + 1} ({rate:g} on rank {self.rank}), so "
                "their weights would, too. A schedule that decides by a loss (ReduceLROnPlateau) needs run.loss, which "
                "is equal on all ranks."
            )
        self._late_changes.check(optimizer, sums_of_changes, self.world_size)
        last_loss = self._results.loss
        if not weight and last_loss is not None and (sharded_squares or are_any_used(totals[: len(flags)])):
            weight, loss = self._last_weight, last_loss * self._last_weight  # of the same backward passes
        if not weight:
            raise RuntimeError("run.update() without run.backward() before it: there is no gradient on any rank.")
        self._last_weight = weight
        loss /= weight
        used, are_as_expected = self._gradients.finish(optimizer, totals[: len(flags)], num_rewritten, weight)
        sharded.divide(weight)
        self._buffers.add_up(of_buffers, weight)
        gradients = [p.grad for p in used if p.grad is not None]
        if self.noise:
            _add_noise([*gradients, *sharded.parts], self.noise)
        squares = verdict.extra[0] / weight**2 if are_as_expected else float(sum_squares(gradients, self.device))
        norm = _root(squares + sharded_squares / weight**2)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise NonFinite(
                f"loss {loss} and gradient norm {norm} in step {self.step + 1}. Nothing was updated. A lower learning "
                "rate, or clip= in run.steps(), may help.",
                None,
            )
        if (factor := clip_factor(norm, clip)) < 1.0:
            torch._foreach_mul_([*gradients, *sharded.parts], factor)
        self._membership.position.enter(Phase.OPTIMIZER)
        boundary.invalidate()
        self._buffers.apply()
        results = self._results
        results.lr = float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else None
        optimizer.step()
        self._updated.add(id(optimizer))
        optimizer.zero_grad(set_to_none=True)
        self.loss, results.loss, results.grad_norm = loss, loss, norm
        return norm

    def commit(self, **metrics: Any) -> None:
        """The step is complete on all ranks: nothing that is tracked changes any more until the next step. Collective.
        `metrics`: as of `log`."""
        self._check()
        boundary = self._tracked("commit")
        self._gradients.end_step()
        self._late_changes.forget()
        self.log(**metrics)
        results, self._results = self._results, StepResults(samples=self._results.samples)
        self._awaits_commit = False
        self._updated.clear()
        for source in self._sources:
            if isinstance(source, Streams):
                boundary.invalidate()
                source.end_step(self._membership.position.step)
        if self._untracked is not None:
            self._untracked.note()
        boundary.commit(results, self._data_s)

    def steps(self, optimizer: Optimizer, *, clip: float | None = None) -> bool:
        """Call it after each micro-batch. False: this rank has more micro-batches of the step. True: the optimizer was
        stepped. What else belongs to the step, such as schedules and averages, follows; the step is committed when the
        loop asks for the next batch, or returns. A loop that reads data of its own calls `commit`; else its step is
        committed in the next `backward` after all optimizers were stepped. Arguments as of `update`."""
        if self._num_left:
            return False
        self._tracked("steps")
        self.seed_after_pass(self.step, 0)  # an optimizer may draw, too
        self.update(optimizer, clip=clip)
        self.seed_after_pass(self.step, 0)
        self._awaits_commit = True
        self._buffer_versions = self._read_buffer_versions()
        return True

    def log(self, **values: Any) -> None:
        """Adds numbers to the series of the step that is not committed yet; those of rank 0 count. Loss, gradient norm
        and learning rate of the last update are there already.

        `images=`, `histogram=`, `table=` and `text=` are media if they are mappings from names to values; see
        docs/media.md. A bounded part of them is copied, and another thread writes it. Those of rank 0 are kept, or
        of all ranks with `media.ranks: all`. Whatever else the step does, it is theirs once it is complete.
        """
        media, metrics = split(values)
        if media:
            self._recorder.log(self._membership.position.step + 1, **media)
        self._results.metrics |= _numbers(metrics)

    def agree(self, flag: bool) -> bool:
        """True on all ranks if the flag is true on any of them. Collective, for what a rank decides by its own numbers
        or clock."""
        if self.world_size == 1:
            return bool(flag)
        self._check()
        box = torch.tensor([float(flag)], dtype=torch.float64, device=self.device)
        all_ranks().all_reduce_small(box)
        self._check()
        return bool(box.item())

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks one after the other along the first dimension, which may differ, with gradients to
        all of them. Collective.

        Raises:
            ValueError: on all ranks, if the tensors differ in their type or another dimension.
        """
        if self.world_size == 1:
            return tensor
        self._check()
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {['any', *tensor.shape[1:]]}"
        box = torch.zeros(2 * self.world_size, dtype=torch.float64, device=self.device)
        box[self.rank], box[self.world_size + self.rank] = zlib.crc32(kind.encode()), len(tensor)
        all_ranks().all_reduce_small(box)
        self._check()
        kinds, lengths = box.long().view(2, self.world_size).tolist()
        if len(set(kinds)) > 1:
            raise ValueError(
                f"run.gather(): the tensor of rank {self.rank} is {kind}, and those of other ranks are not. All ranks "
                "give the same type and, after the first dimension, the same sizes."
            )
        return _Gather.apply(tensor, self.rank, lengths)  # type: ignore[no-any-return,no-untyped-call]

    def enter_micro_batch(
        self,
        micro: MicroBatch,
        num_left: int,
        num_samples: int,
        step: int,
        first_seed: int,
        read: Callable[[], Any],
    ) -> Any:
        """Called by `GlobalBatch`: reads the samples of a micro-batch, which is the current one from now on."""
        self._check()
        self._begin_untracked()
        self._micro, self._num_left, self._results.samples = micro, num_left, num_samples
        self._micro_weight, self._is_in_micro_batch = 0.0, True
        self._buffers.begin_micro_batch(is_real=micro.weight > 0)
        start = time.perf_counter()
        batch = self._copies.copy(read())
        self._data_s += time.perf_counter() - start
        position = self._membership.position
        position.spent_on_data(self._data_s, in_phase=position.phase)
        position.enter(Phase.FORWARD)
        seed_everything(randomness_seed(self._spec.seed, step, first_seed + micro.index))
        return batch

    def seed_after_pass(self, step: int, number: int) -> None:
        """What the loop draws until the next micro-batch is the same on all ranks."""
        seed_everything(randomness_seed(self._spec.seed ^ AFTER_A_PASS, step, number))

    def keep(self) -> None:
        """Called by the program when the group has broken: the state of the last complete step stays, if it is whole.
        Never raises."""
        if self._boundary is not None:
            self._boundary.keep()

    def close(self) -> None:
        """Called by the program when the loop was left, before the group is, whatever the end: ends the processes that
        it has started, and lets go of the group."""
        for source in self._sources:
            source.close()
        self._processes.end()
        self._gradients.close()

    def finish(self) -> GenerationEnd:
        """Called by the program when the loop has returned."""
        boundary = self._tracked("track")
        self._commit_awaited()
        self._gradients.end_step()
        if self.world_size > 1:
            # As large as the vote in which the others would be if this rank were alone.
            leaving = [float(rank == self.rank) for rank in range(self.world_size)]
            self._refuse_leaving_alone(
                boundary.begin_vote(self._data_s, [*leaving, *[0.0] * self._num_numbers]).count_ballots()
            )
        return boundary.finish()

    def _refuse_leaving_alone(self, verdict: Verdict) -> None:
        """Raises ValueError, on all ranks, if some have left the loop and others have not."""
        left = [rank for rank, count in enumerate(verdict.uses[: self.world_size]) if count]
        if left and len(left) < self.world_size:
            are = f"ranks {', '.join(map(str, left))} have" if len(left) > 1 else f"rank {left[0]} has"
            raise ValueError(
                f"{are} left the loop after step {self._membership.position.step}, and the other ranks go on. All "
                "ranks leave it after the same step: decide by run.step or run.loss, which are equal on all ranks, or "
                "by run.agree(flag)."
            )

    def _check(self) -> None:
        """Leaves a generation that is over, or a group that a failed collective has broken although the loop went
        on."""
        self._membership.check()
        if failure := self._membership.collectives.failure:
            raise GroupBroken(failure)

    def _tracked(self, call: str) -> StepBoundary:
        if self._boundary is None:
            raise RuntimeError(
                f"run.{call}() needs to know the state: call run.track(model=model, optimizer=optimizer, ...) first."
            )
        return self._boundary

    def _restore(self, tracked: Tracked, recent: Recent) -> Restored:
        if not is_restoring(self._membership.assignment):
            return Restored(0, 0, 0)
        self._membership.position.enter(Phase.RESTORING)
        known = read_source(self._membership, {}, self._store)
        tensors = tracked.targets(known.unread, known.extra["tree"])
        loaded = read_source(self._membership, tensors, self._store)
        extra = loaded.extra
        tracked.restore(tensors, extra["tree"])
        self._stream_states.texts = dict(extra.get("streams", {}))
        self._epochs[:] = extra.get("epochs", [])
        self._are_factors_usual.update(extra.get("are_factors_usual", {}))
        if self._untracked is not None:
            self._untracked.restore(extra)
        for report in Recent.parse(extra.get("reports", ())):
            recent.add(report)
            self.loss = getattr(report, "loss", self.loss)
        return Restored(int(extra["step"]), loaded.num_bytes, loaded.remote_bytes)

    def _begin_untracked(self) -> None:
        if self._untracked is not None:
            self._untracked.begin()

    def _commit_awaited(self) -> None:
        if self._awaits_commit:
            self.commit()

    def _commit_step_of_own_data(self) -> None:
        """A backward pass begins. A loop that asks for no batch has begun another step if all optimizers were updated.

        Raises:
            RuntimeError: the forward pass has changed a buffer, so the step before cannot be saved any more.
        """
        optimizers = [tracked for tracked in self.objects.values() if isinstance(tracked, Optimizer)]
        if not self._awaits_commit or not self._updated.issuperset(map(id, optimizers)):
            return
        if self._read_buffer_versions() != self._buffer_versions:
            raise RuntimeError(
                "the loop reads data of its own, and a forward pass has changed a buffer before the step was complete. "
                "Call run.commit() at the end of each step, or read the data with run.batches()."
            )
        self.commit()

    def _read_buffer_versions(self) -> list[int]:
        modules = [tracked for tracked in self.objects.values() if isinstance(tracked, nn.Module)]
        return [buffer._version for module in modules for buffer in module.buffers()]


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension. What comes back for each part is summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: int, lengths: list[int]) -> Tensor:
        ctx.first, ctx.length = sum(lengths[:rank]), lengths[rank]
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = all_ranks().all_gather(padded)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        whole = gradients[0].contiguous()
        all_ranks().all_reduce(whole)
        return whole[ctx.first : ctx.first + ctx.length], None, None


def _root(squares: float) -> float:
    return squares**0.5 if squares >= 0 else squares  # not a number


@torch.no_grad()
def _add_noise(gradients: list[Tensor], share: float) -> None:
    """Changes each element by the same amount, up or down."""
    largest = max([float(gradient.abs().max()) for gradient in gradients if gradient.numel()], default=0.0)
    signs = torch.Generator().manual_seed(0)
    for gradient in gradients:
        change = torch.randint(2, gradient.shape, generator=signs) * 2.0 - 1.0
        gradient.add_(change.to(gradient.device, gradient.dtype), alpha=share * largest)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as finite numbers; one that is not finite is left out."""
    numbers = {}
    for name, value in metrics.items():
        if not is_metric_name(name):
            raise ValueError(f"run.log(): {name!r} is not the name of a metric. Use {suggested_name(name)!r}.")
        number = float(value)
        if torch.isfinite(torch.tensor(number)):
            numbers[name] = number
    return numbers
