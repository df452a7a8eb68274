"""The boundary between two steps of a loop: vote, report, snapshot, checkpoint, and the end if one is requested.

    gradients | vote | update | ... | the step counts | report | snapshot | checkpoint, if due | end, if requested

Each update holds a vote, in which its sums travel too; the one of the last update of a step is that of the step. So the
ranks wait for each other once in an update, and not at all at the boundary. A rank may complete a step that another one
cannot complete any more, because a third was lost: then the state of the first one is what the group goes on from. A
step without an update votes at its end.

Every rank has the whole state, so the one of a single survivor is enough to go on. From the end of a step until the
next update begins, what is tracked is that of the step, as long as nothing changes it, which is known. If the group
breaks meanwhile, a survivor keeps it on its way out (`keep`), and no completed step is repeated. Otherwise the group
goes on from the last copy. Called by `Run` on the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind, Phase
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import StepReport
from shoal_workers.engine.group.collectives import clock_of_this_thread, waited_s
from shoal_workers.engine.group.device_clock import DeviceClock
from shoal_workers.engine.loop.buffers import LoopBuffers
from shoal_workers.engine.loop.streams import StreamStates
from shoal_workers.engine.loop.tracked import Tracked
from shoal_workers.engine.parallel.device_copies import to_device
from shoal_workers.engine.process.exits import GenerationEnd
from shoal_workers.engine.schedule import is_due
from shoal_workers.engine.state.device_state import SnapshotState
from shoal_workers.engine.state.saving import Saver, is_save_time
from shoal_workers.engine.state.snapshots import Snapshots
from shoal_workers.engine.state.training_state import PlainValues, Recent
from shoal_workers.engine.step.generation import Membership
from shoal_workers.engine.step.vote import Ballot, Verdict, Vote, begin_vote
from shoal_workers.snapshot_store.store import SnapshotStore

_SETTLING_SHARE = 0.05
"""Largest share of a step that may be spent on noting what is tracked."""


class TrackedState(SnapshotState, PlainValues):
    """What a loop tracks, as snapshots and checkpoints take it. Training thread only."""

    why_copies = "a loop decides itself what it updates, so its state is copied"

    def __init__(
        self,
        tracked: Tracked,
        seed: int,
        recent: Recent,
        streams: StreamStates,
        epochs: Sequence[Sequence[int]],
        are_factors_usual: Mapping[str, bool],
        read_untracked: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._tracked = tracked
        self._seed = seed
        self._recent = recent
        self._streams = streams
        self._epochs = epochs
        self._are_factors_usual = are_factors_usual
        self._read_untracked = read_untracked
        self._collected: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def changed(self) -> None:
        """The objects have another state than at the last look."""
        self._collected = None

    def tensors(self) -> dict[str, Tensor]:
        return self._collect()[0]

    def mark(self) -> object:
        return self._tracked.mark()

    def values(self, step: int) -> dict[str, Any]:
        tree = self._collect()[1]
        streams = {"streams": self._streams.texts} if self._streams.texts else {}
        epochs = {"epochs": [list(newest) for newest in self._epochs]} if self._epochs else {}
        factors = {"are_factors_usual": dict(self._are_factors_usual)} if self._are_factors_usual else {}
        reports = self._recent.values()
        parts = {**streams, **epochs, **factors, **self._read_untracked()}
        return {"step": step, "seed": self._seed, "tree": tree, "reports": reports, **parts}

    def _collect(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self._collected is None:
            self._collected = self._tracked.collect()
        return self._collected


@dataclass(slots=True)
class StepResults:
    """What the loop has found in one step."""

    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    samples: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """What the loop has logged."""


class LoopEnd(BaseException):
    """Unwinds the user's function at a step boundary. No Exception, so that `except Exception` lets it pass."""

    def __init__(self, end: GenerationEnd) -> None:
        super().__init__(end)
        self.end = end


@dataclass(frozen=True, slots=True)
class _CommittedState:
    """What was tracked when a step was complete on this rank."""

    step: int
    mark: object
    """What is equal as long as nothing that is tracked has changed."""
    reported: Mapping[str, Any] | None
    """The fields of the step's report, as long as it was not sent."""


class Observer(Protocol):
    """What is told of complete steps."""

    def observe(self, step: int, check: Callable[[], None], note: Callable[[str], None]) -> None:
        """`check` raises if the generation is over, `note` says what is waited for."""

    def settle(self, check: Callable[[], None], note: Callable[[str], None]) -> None:
        """A checkpoint is about to be saved."""


class StepBoundary:
    """Training thread only."""

    def __init__(
        self,
        membership: Membership,
        spec: JobSpec,
        state: TrackedState,
        recent: Recent,
        buffers: LoopBuffers,
        store: SnapshotStore | None,
        saver: Saver,
        observer: Observer | None,
    ) -> None:
        self._membership = membership
        self._observer = observer
        self._spec = spec
        self._state = state
        self._recent = recent
        self._buffers = buffers
        self._saver = saver
        self._snapshots = Snapshots(membership, store, state, state, budget=spec.snapshot.budget)
        self._snapshots.start()
        self._zero = torch.zeros((), dtype=torch.float64, device=membership.device)
        self._ended = time.perf_counter()
        self._voted = self._ended, waited_s()
        """When the vote of the last step began, and what this thread had waited until then."""
        self._newest_vote = self._voted
        self._verdict: Verdict | None = None
        """That of the newest update of this step."""
        self._costs: tuple[float, float] | None = None
        """What snapshots cost since the last step; None if no vote of this step has taken them."""
        self._saved_mono = time.monotonic()
        self._saving_s = 0.0
        self._store = store
        self._settled: _CommittedState | None = None
        self._settling_is_cheap = True

    def commit(self, results: StepResults, data_s: float) -> None:
        """All ranks: one more step is complete. `data_s`: seconds that this rank has spent on data so far.

        Raises:
            LoopEnd: a yield was requested.
            Fenced: the generation is over.
        """
        membership, step = self._membership, self._membership.position.step + 1
        self._buffers.restore()
        self._buffers.adopt()
        self._buffers.forget_changes()
        self._state.changed()
        reported = self._reported(step, results)
        settling_s = self._settle(step, reported)
        verdict = self._verdict if self._verdict is not None else self.begin_vote(data_s, ()).count_ballots()
        membership.check()
        now = time.perf_counter()
        step_s, self._ended, self._voted = now - self._ended, now, self._newest_vote
        self._verdict, self._costs, self._saving_s = None, None, 0.0
        self._settling_is_cheap = settling_s <= _SETTLING_SHARE * step_s
        membership.position.reach(step)
        measured = {"step_s": step_s, "compute_s": verdict.compute_s, "data_s": verdict.data_s}
        self._report(StepReport(**{**reported, **measured, "saving_s": verdict.saving_s}))
        if self._observer is not None:
            self._observer.observe(step, membership.check, membership.position.note)
            self._ended = time.perf_counter()
        requests = verdict.requests
        self._snapshots.end_step(verdict, step_s, step)
        pending = None
        if requests.durably or requests.saves or is_due(step, self._spec.checkpoint.every_steps):
            pending = self.save(step)
        if requests.yields:
            raise LoopEnd(GenerationEnd(ExitKind.YIELDED, pending=pending if requests.durably else None))

    def begin_vote(self, data_s: float, sums: Sequence[float], on_device: Tensor | None = None) -> Vote:
        """All ranks: begins the vote of an update. `sums`, then `on_device`, float64 of shape (n,): further numbers,
        whose sums over all ranks are `uses` of the verdict. What is counted then is given to `voted`."""
        membership, step = self._membership, self._membership.position.step + 1
        saves = is_save_time(membership.assignment, self._spec.checkpoint.every_s, self._saved_mono)
        requests = self._snapshots.requests(step, saves=saves)
        if self._costs is None:
            self._costs = self._snapshots.take_costs()
        copy_s, send_s = self._costs
        voted_at, voted_waited_s = self._voted
        self._newest_vote = time.perf_counter(), waited_s()
        compute_s = max(0.0, self._newest_vote[0] - voted_at - (self._newest_vote[1] - voted_waited_s))
        if (clock := clock_of_this_thread()) is not None:
            compute_s = self._take_device_s(clock, compute_s)
        uses = to_device(torch.tensor(sums, dtype=torch.float64), membership.device)
        ballot = Ballot(
            loss_sum=self._zero,  # the loss is among the sums
            squared_norm=self._zero,
            requests=requests,
            compute_s=compute_s,
            copy_s=copy_s,
            send_s=send_s,
            arrived_step=self._snapshots.arrived_step,
            data_s=data_s,
            saving_s=self._saving_s,
            uses=uses if on_device is None else torch.cat([uses, on_device]),
        )
        return begin_vote(ballot, membership.rank, membership.layout.world_size)

    def _take_device_s(self, clock: DeviceClock, otherwise: float) -> float:
        """Seconds that the GPU has computed from the vote before the newest one until that."""
        device_s = clock.take()
        clock.end()
        clock.begin()
        return otherwise if device_s is None else device_s

    def voted(self, verdict: Verdict) -> None:
        """The newest vote of this step."""
        self._verdict = verdict

    def invalidate(self) -> None:
        """An update begins: until the next commit the state is that of no step."""
        self._settled = None

    def keep(self) -> None:
        """The group is broken: keep the state of the last complete step, if it is still that. Never raises."""
        settled, store, a = self._settled, self._store, self._membership.assignment
        if settled is None or store is None:
            return
        try:
            self._buffers.restore()
            self._state.changed()
            if self._state.mark() != settled.mark or self._buffers.have_changed():
                return
            # A second copy of the step would take the place of the step before, of which a lost rank may have a part.
            if settled.reported is None and store.own.holds(a.generation, settled.step):
                return
            if settled.reported is not None:
                self._recent.add(StepReport(**settled.reported))
            tensors, values = self._state.tensors(), self._state.values(settled.step)
            store.snapshot(
                tensors,
                generation=a.generation,
                rank=a.shard,
                world_size=a.num_shards,
                step=settled.step,
                extra=values,
                owns_replicated=a.layout.is_first_of_stage(a.rank),
            )
        except Exception as error:  # the last copy is there
            self._membership.outbox.log_text(f"the state of step {settled.step} could not be kept: {error}")

    def save(self, step: int) -> CheckpointName:
        membership, start = self._membership, time.perf_counter()
        if self._observer is not None:
            self._observer.settle(membership.check, membership.position.note)
        membership.position.enter(Phase.SAVING)
        tensors, extra = self._state.tensors(), self._state.values(step)
        name = self._saver.save(membership.assignment, step, tensors, extra, membership.check)
        self._saved_mono = time.monotonic()
        self._saving_s += time.perf_counter() - start
        return name

    def finish(self) -> GenerationEnd:
        """The loop has returned: the state of its last step becomes durable."""
        self._buffers.restore()
        return GenerationEnd(ExitKind.FINISHED, pending=self.save(self._membership.position.step))

    def _settle(self, step: int, reported: Mapping[str, Any]) -> float:
        """Notes what is tracked now, unless that takes long beside a step. Returns the seconds that it took."""
        if not self._settling_is_cheap or self._store is None:
            self._settled = None
            return 0.0
        start = time.perf_counter()
        self._settled = _CommittedState(step, self._state.mark(), reported)
        return time.perf_counter() - start

    def _reported(self, step: int, results: StepResults) -> dict[str, Any]:
        """The fields of a report. It is made once, when all of them are known."""
        return {
            "generation": self._membership.number,
            "step": step,
            "at": time.time(),
            "loss": results.loss,
            "grad_norm": results.grad_norm,
            "lr": results.lr,
            "tokens": results.samples,
            "step_s": time.perf_counter() - self._ended,
            "world_size": self._membership.layout.world_size,
            "metrics": results.metrics,
        }

    def _report(self, report: StepReport) -> None:
        """All ranks keep the report, rank 0 sends it."""
        self._recent.add(report)
        if self._settled is not None:
            self._settled = replace(self._settled, reported=None)
        self._membership.report(report)
