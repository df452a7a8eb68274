"""When snapshots are taken and sent to the buddy: after every step, or as often as the budget allows. Hides what they
cost, and which step's copies have arrived everywhere.

    step s+1:  backward | vote | update | copy into memory | ---- step s+2 ---->
                                                            | sender thread: to the buddy

If the state is in shared memory (device_state.py), a snapshot only marks the buffer with its step. Copies are
then taken only to be sent.

Rank 0 sets the pace, because a snapshot is complete only if all ranks take it after the same step. Its requests reach
the others through the vote. Costs and step times are measured while training, because they change with the world size
and with other load on the machine.

After the loss of a node only a step of which every rank has a copy elsewhere can be restored. Each rank contributes the
step of its newest copy to the vote. The step counts once all ranks contribute the same one. It stays whole until the
next one is, because senders and buddies keep it when a later copy of only some ranks arrives. If there is no memory for
that, a rank drops its own part, and says so in the next vote: then no step is whole until the next one is.

    rank 0     4 arrived   8 arrived  12 arrived
    rank 1     4 arrived   8 failed   12 arrived
    whole      4           4          12

Without a snapshot store, or once memory is full, everything here does nothing: training continues, and an unexpected
death costs the steps since the last checkpoint. Called by the trainer, and by a loop of the user's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.messages import Phase
from shoal_workers.contract.worker_reports import SnapshotCost, SnapshotsStopped
from shoal_workers.engine.state.device_state import SnapshotState
from shoal_workers.engine.state.training_state import PlainValues
from shoal_workers.engine.step.generation import Membership
from shoal_workers.engine.step.vote import NO_BUDDY, NOTHING_ARRIVED, Requests, Verdict
from shoal_workers.snapshot_store.slots.slot_files import Stamp
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull
from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.snapshot_store.transfer.sender import SendCost

_REPORT_EVERY = 50


class Snapshots:
    """Takes the snapshots of one generation, and sets their pace. Training thread only."""

    def __init__(
        self,
        membership: Membership,
        store: SnapshotStore | None,
        state: SnapshotState,
        extra: PlainValues,
        *,
        budget: float,
    ) -> None:
        """`budget`: fraction of the step time that snapshots may cost."""
        self._membership = membership
        self._assignment = membership.assignment
        self._outbox = membership.outbox
        self._store = store
        self._state = state
        self._extra = extra
        self._can_copy = True
        self._lacks_memory = False
        self._pace = SnapshotPace(budget)
        self._copies = BuddyCopies(self._assignment.generation, has_buddy=self._assignment.buddy is not None)
        self._copy_s = 0.0
        self._num_taken = 0
        self._num_reported = 0
        self._num_since_freed = -1
        """Steps since older snapshots were freed; -1: they were not."""
        self._has_senders = False
        """Some ranks send copies. A rank without a buddy then keeps copies of the same steps: a step is whole only with
        every shard."""
        self._reported: tuple[object, ...] | None = None
        """The two paces, whether their cost was known, and the step that every buddy has."""
        self._num_bytes = 0
        self._is_on_gpu = False
        self._busy_since_s = time.process_time()

    @property
    def arrived_step(self) -> float:
        """Returns what the ballot needs, once `take_costs` was called; see vote.Ballot."""
        whole, store = self._copies.whole_step, self._store
        holds_whole = whole is None or store is None or store.own.holds(self._assignment.generation, whole)
        return self._copies.arrived_step(holds_whole=holds_whole)

    def move_before_restore(self) -> None:
        """Once the optimizer's state exists: point the state to shared memory, so that it is read straight into it."""
        if self._store is not None and not self._state.is_in_shared_memory:
            self._move_to_shared_memory(self._store, step=0, is_restoring=True)

    def mark_restored(self, step: int) -> bool:
        """Called after a restore: the state that was read is a part of a snapshot itself, of this generation.

        Returns:
            Whether this rank does not need what it was restored from any more, once all ranks say so. With a buddy it
            does: the buddy has only copies of the older generation yet.
        """
        if self._store is None or not self._state.finish_restored(self._stamp(step), self._encoded(step)):
            return False
        return self._assignment.buddy is None

    def start(self) -> None:
        """Right before the first step: the CPU time until now is not part of a step."""
        if self._store is not None:
            # It is a send of an earlier generation, and would be neither a copy nor a cost of this one.
            self._store.sender.break_off()
        self._busy_since_s = time.process_time()

    def take_costs(self) -> tuple[float, float]:
        """Once per vote: what snapshots cost since the last vote.

        Returns:
            Seconds for which a snapshot kept the training thread busy, and CPU seconds of one that reached the buddy;
            0: there was none.
        """
        cost = self._store.sender.take_cost() if self._store is not None else None
        copy_s, self._copy_s = self._copy_s, 0.0
        return copy_s, self._copies.sent(cost)

    def requests(self, step: int, *, saves: bool) -> Requests:
        """Called before `take_costs`: a send that ends in between has not arrived yet. Returns what this rank requests
        after `step`. `saves`: a checkpoint is due by the clock."""
        fence = self._membership.fence
        yields, copies = fence.is_yield_requested, self._decides and self._pace.copies.is_due(step)
        return Requests(
            yields=yields,
            durably=yields and fence.is_durable_requested,
            saves=saves,
            snapshots=copies,
            replicates=copies and self._pace.sends.is_due(step),
            is_sending=self._store is not None and self._store.sender.is_busy,
            lacks_memory=self._lacks_memory,
        )

    def end_step(self, verdict: Verdict, step_s: float, step: int) -> None:
        """Called after each step, when it was reported: takes the snapshot that the vote has requested, and sets the
        pace."""
        # before the snapshot: a copy that is sent with it must not replace one of those that have just become whole
        self._copies.voted(verdict.arrived_steps, step)
        requests = verdict.requests
        if verdict.is_finite or requests.yields:
            self._mark_complete(step)
        if self._store is not None and (requests.snapshots or requests.yields):
            self._membership.position.enter(Phase.SNAPSHOT)
            self._has_senders = any(at != NO_BUDDY for at in verdict.arrived_steps)
            self._take(self._store, step, replicate=requests.replicates and not requests.is_sending)
        self._adapt(verdict, step_s, step)

    def _mark_complete(self, step: int) -> None:
        """Marks a buffer in shared memory with the step that it holds.

        Readers take the values that are not tensors from the part of shard 0."""
        if self._state.why_left:
            text, self._state.why_left = self._state.why_left, ""
            self._pace.copies.release()
            self._outbox.log_text(f"the state is in private memory now, and snapshots are copies: {text}")
        if self._store is None or not self._state.is_in_shared_memory:
            return
        start_s = time.thread_time()
        self._pace.copies.hold()
        self._state.finish(self._stamp(step), self._encoded(step))
        self._copy_s = time.thread_time() - start_s

    def _take(self, store: SnapshotStore, step: int, *, replicate: bool) -> None:
        """Take a snapshot of the state after `step`. When this returns, the live tensors may change again.

        The time to collect the state is part of the cost. `replicate`: the copy is sent, on all ranks."""
        self._num_taken += 1
        self._pace.copies.done(step)
        if self._num_taken == 1:
            self._measure_state()
        was_moved_before = self._state.is_in_shared_memory
        if was_moved_before or self._move_to_shared_memory(store, step):
            if not was_moved_before:
                self._mark_complete(step)
            if replicate and self._has_senders and self._can_copy:
                self._replicate(store, step)
        else:
            self._copy_s = self._copy(store, step)
            if replicate:
                self._send(step)

    def _adapt(self, verdict: Verdict, step_s: float, step: int) -> None:
        """Frees older snapshots once they are not needed; rank 0 also adapts the pace to the cost."""
        is_older_needed = self._num_taken <= 2 or self._copies.are_lacking
        if verdict.requests.lacks_memory:
            self._can_copy, is_older_needed = False, False
            if not self._state.is_in_shared_memory:
                self._store = None
        if self._store is not None and not is_older_needed:
            self._free_older(self._store)
        busy_s = self._take_busy_s()
        if not self._decides:
            return
        step_s = step_s if self._is_on_gpu else min(step_s, busy_s)
        self._pace.note(step_s, verdict.copy_s, verdict.send_s)
        pace = self._pace
        current = pace.copies.every_steps, pace.sends.every_steps, pace.share > 0, self._copies.whole_step
        if current != self._reported or self._num_taken >= self._num_reported + _REPORT_EVERY:
            self._reported, self._num_reported = current, self._num_taken
            self._report(step)

    def _free_older(self, store: SnapshotStore) -> None:
        """Once per generation. In the step after it, all ranks have voted since they did so, so their slots stay."""
        self._num_since_freed += 1
        if self._num_since_freed == 0:
            store.drop_older(self._assignment.generation)
        elif self._num_since_freed == 1:
            store.peer_maps.map_ahead()

    def _replicate(self, store: SnapshotStore, step: int) -> None:
        """A whole copy for the buddy."""
        self._copies.copied(self._copy(store, step))
        if self._can_copy:
            self._send(step)

    @property
    def _decides(self) -> bool:
        return self._store is not None and self._assignment.rank == 0

    def _encoded(self, step: int) -> bytes:
        return self._extra.encoded(step) if self._assignment.shard == 0 else self._extra.encoded_values()

    def _move_to_shared_memory(self, store: SnapshotStore, step: int, *, is_restoring: bool = False) -> bool:
        try:
            return self._state.move_to_shared_memory(
                store,
                owns_replicated=self._assignment.layout.is_first_of_stage(self._assignment.rank),
                extra_bytes=len(self._extra.encoded(step)),
                restoring=self._assignment.restore_snapshot,
                with_values=not is_restoring,
            )
        except SharedMemoryFull as error:
            self._outbox.log_text(f"shared memory cannot hold the state twice, so snapshots are copies: {error}")
            return False

    def _copy(self, store: SnapshotStore, step: int) -> float:
        """Copy the state. Returns the seconds that it took."""
        a, busy_s, wall_s = self._assignment, time.thread_time(), time.perf_counter()
        try:
            store.snapshot(
                self._state.tensors(),
                generation=a.generation,
                rank=a.shard,
                world_size=a.num_shards,
                step=step,
                extra=self._extra.values(step),
                owns_replicated=a.layout.is_first_of_stage(a.rank),
            )
        except SharedMemoryFull as error:
            self._give_up(error)
            return 0.0
        # On CPU the thread's own time: if ranks share cores, wall-clock time includes the turns of other processes.
        return time.perf_counter() - wall_s if self._is_on_gpu else time.thread_time() - busy_s

    def _send(self, step: int) -> None:
        self._pace.sends.done(step)
        if self._store is None or not self._can_copy:
            return
        if self._assignment.buddy is not None:
            self._store.replicate(self._assignment.buddy, keep_step=self._copies.whole_step)
        elif self._has_senders:
            self._store.keep_copy(keep_step=self._copies.whole_step)

    def _measure_state(self) -> None:
        tensors = [local_tensor(tensor) for tensor in self._state.tensors().values()]
        self._is_on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._num_bytes = sum(tensor.nbytes for tensor in tensors)

    def _stamp(self, step: int) -> Stamp:
        a = self._assignment
        return Stamp(a.generation, a.shard, a.num_shards, step)

    def _take_busy_s(self) -> float:
        """CPU seconds of this worker since the last call. If ranks share cores, a snapshot's CPU seconds are compared
        with these: in the rest of a step's time other workers compute, and a snapshot delays them as well."""
        now_s = time.process_time()
        busy_s, self._busy_since_s = now_s - self._busy_since_s, now_s
        return busy_s

    def _report(self, step: int) -> None:
        self._outbox.report(
            SnapshotCost(
                generation=self._assignment.generation,
                step=step,
                every_steps=self._pace.copies.every_steps,
                buddy_every_steps=self._pace.sends.every_steps,
                copy_s=self._pace.copies.cost_s,
                buddy_s=self._pace.sends.cost_s,
                share=self._pace.share,
                num_bytes=self._num_bytes,
                buddy_step=self._copies.whole_step,
                buddy_flight_steps=self._copies.flight_steps,
                copies_reason=self._state.why_copies,
            )
        )

    def _give_up(self, error: SharedMemoryFull) -> None:
        self._lacks_memory = True
        only_copies = self._state.is_in_shared_memory
        if only_copies:
            self._can_copy = False  # the copies that were sent before are the last ones
            text = f"no more copies to other nodes: {error}. A lost node will cost the steps since the checkpoint."
        else:
            self._store = None
            text = f"no more snapshots in memory: {error}. A death will cost the steps since the last checkpoint."
        self._outbox.log_text(text)
        self._outbox.report(
            SnapshotsStopped(
                generation=self._assignment.generation,
                step=self._membership.position.step,
                at=time.time(),
                rank=self._assignment.rank,
                only_copies=only_copies,
                message=str(error),
            )
        )


_EMA = 0.2
_FINENESS = 4
"""Paces are multiples of a quarter of a step, so that they change rarely."""
_NUM_COLD = 2
"""Costs that are left out at first: both slots are new memory then, whose first touch is slow."""
_CALM = 1.25
"""A pace stays until the budget requires one that differs by more than this factor: it would alternate otherwise."""
_COPIES = 0.8
"""Largest share of the snapshot budget for copies. They go first: they outlive any worker, and only a node's loss loses
them."""


class Pace:
    """`every_steps` follows from the noted costs; 2.5 means 2 and 3 in turn. A new `budget` applies from the next
    note."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._step_s: float | None = None
        self._cost_s: float | None = None
        self._num_costs = 0
        self.every_steps = 1.0
        self._is_held = False
        self._due = 0.0

    @property
    def cost_s(self) -> float:
        """Moving average; 0 before the first."""
        return self._cost_s or 0.0

    @property
    def share(self) -> float:
        """Share of the step time, at this pace."""
        return self.cost_s / (self._step_s * self.every_steps) if self._step_s else 0.0

    def hold(self) -> None:
        """From now on the work is done in every step, at any cost."""
        self.every_steps, self._is_held = 1.0, True

    def release(self) -> None:
        """Ends `hold`: from now on the work is done as seldom as the budget requires."""
        self._is_held = False

    def is_due(self, step: int) -> bool:
        return step >= self._due

    def done(self, step: int) -> None:
        """The work was done after this step. If it was late by less than a step, the next is not delayed."""
        self._due = (self._due if 0 <= step - self._due < 1 else step) + self.every_steps

    def note_step(self, step_s: float) -> None:
        self._step_s = _blend(self._step_s, step_s)
        self._adapt()

    def note_cost(self, cost_s: float) -> None:
        self._num_costs += 1
        if self._num_costs > _NUM_COLD:
            self._cost_s = _blend(self._cost_s, cost_s)
            self._adapt()

    def _adapt(self) -> None:
        if not self._step_s or not self._cost_s or self._is_held:
            return
        desired = self._cost_s / (self.budget * self._step_s)
        if not self.every_steps / _CALM < max(1.0, desired) <= self.every_steps:
            self.every_steps = max(1.0, math.ceil(_FINENESS * desired) / _FINENESS)


class SnapshotPace:
    """The paces of copies into memory and of sends to the buddy, which share one budget."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self.copies = Pace(budget * _COPIES)
        self.sends = Pace(budget)

    @property
    def share(self) -> float:
        """Share of the step time, for both."""
        return self.copies.share + self.sends.share

    def note(self, step_s: float, copy_s: float, send_s: float) -> None:
        """Once per step; a cost of 0: there was none."""
        for pace, cost_s in ((self.copies, copy_s), (self.sends, send_s)):
            pace.note_step(step_s)
            if cost_s:
                pace.note_cost(cost_s)
        self.sends.budget = max(self._budget * (1 - _COPIES), self._budget - self.copies.share)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else (1 - _EMA) * average + _EMA * value


class BuddyCopies:
    """The copies of one generation. Training thread only."""

    def __init__(self, generation: int, *, has_buddy: bool) -> None:
        self._generation = generation
        self._arrived_step = NOTHING_ARRIVED if has_buddy else NO_BUDDY
        self.whole_step: int | None = None
        """Newest step of which every rank's copy has arrived; equal on all ranks."""
        self.flight_steps = 1
        """Completed steps between the whole step and the vote in which it became whole: the most of this generation."""
        self._local_copy_s = 0.0
        self._are_expected = True
        self._dropped_step = -1
        """Newest whole step of which a rank has dropped its own part since."""

    def arrived_step(self, *, holds_whole: bool = True) -> float:
        """Returns what the ballot needs. `holds_whole`: the memory of this rank still has its own part of the whole
        step."""
        return self._arrived_step if holds_whole else NOTHING_ARRIVED

    @property
    def are_lacking(self) -> bool:
        """True if copies are expected, and none is whole yet: after the loss of a node the snapshot before is
        needed."""
        return self._are_expected and self.whole_step is None

    def copied(self, seconds: float) -> None:
        """A copy was made in order to be sent; its cost is counted as part of the cost of its send."""
        self._local_copy_s = seconds

    def sent(self, cost: SendCost | None) -> float:
        """`cost`: of the send that has ended since the last vote. Returns its CPU seconds; 0: nothing has arrived.

        A send of an earlier generation may end in this one. It is neither a cost nor a copy of this one."""
        if cost is None or cost.generation != self._generation:
            return 0.0
        self._arrived_step = float(cost.step)
        local_copy_s, self._local_copy_s = self._local_copy_s, 0.0
        return local_copy_s + cost.cpu_s

    def voted(self, arrived_steps: Sequence[float], step: int) -> None:
        """`arrived_steps`: of all ranks; `step`: the completed one."""
        arrived = {at for at in arrived_steps if at != NO_BUDDY}
        self._are_expected = bool(arrived)
        if NOTHING_ARRIVED in arrived and self.whole_step is not None:
            self._dropped_step, self.whole_step = self.whole_step, None
        if len(arrived) != 1 or NOTHING_ARRIVED in arrived:
            return
        whole = int(arrived.pop())
        if whole != self.whole_step and whole > self._dropped_step:
            self.whole_step = whole
            self.flight_steps = max(self.flight_steps, step - whole)
