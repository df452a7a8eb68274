"""When snapshots are taken and sent to the buddy: after every step, or as often as the budget allows.

    step s+1:  backward | vote | update | copy into memory | ---- step s+2 ---->
                                                            | sender thread: to the buddy

If the state is in shared memory (double_buffered_state.py), a snapshot only marks the buffer with its step. Copies are
then taken only to be sent.

Rank 0 sets the pace, because a snapshot is complete only if all ranks take it after the same step. Its requests reach
the others through the vote. Without a snapshot store, or once memory is full, everything here does nothing: training
continues, and an unexpected death costs the steps since the last checkpoint. Called by the trainer.
"""

from __future__ import annotations

import time

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.worker_reports import SnapshotCost
from shoal_workers.engine.state.double_buffered_state import DoubleBufferedState
from shoal_workers.engine.state.pace import SnapshotPace
from shoal_workers.engine.state.training_state import Extra
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.vote import Verdict
from shoal_workers.snapshot_store.errors import SharedMemoryFull
from shoal_workers.snapshot_store.slots.slot import Stamp
from shoal_workers.snapshot_store.store import SnapshotStore

_REPORT_EVERY = 50


class Snapshots:
    """Takes the snapshots of one generation, and sets their pace. Training thread only."""

    def __init__(
        self, generation: Generation, store: SnapshotStore | None, state: DoubleBufferedState, extra: Extra
    ) -> None:
        self._generation = generation
        self._assignment = generation.assignment
        self._outbox = generation.outbox
        self._store = store
        self._state = state
        self._extra = extra
        self._can_copy = True
        self._pace = SnapshotPace(generation.spec.snapshot.budget)
        self._copy_s = 0.0
        self._sent_copy_s = 0.0
        """Cost of the last copy beside the state in shared memory, until it is counted as part of the cost of its
        send."""
        self._num_taken = 0
        self._num_reported = 0
        self._has_copy = self._assignment.buddy is None
        self._has_freed_older = False
        self._reported: tuple[float, float, bool] | None = None
        """The two paces, and whether their cost was known."""
        self._num_bytes = 0
        self._is_on_gpu = False
        self._busy_since_s = time.process_time()

    @property
    def is_on(self) -> bool:
        return self._store is not None

    @property
    def is_sending(self) -> bool:
        return self._store is not None and self._store.is_sending

    @property
    def lacks_copy(self) -> bool:
        """No snapshot of this generation has reached the buddy: after the loss of a node the one before is needed."""
        return not self._has_copy

    def start(self) -> None:
        """Right before the first step: the CPU time until now is not part of a step."""
        self._busy_since_s = time.process_time()

    def take_costs(self) -> tuple[float, float]:
        """Once per vote: what snapshots cost since the last vote.

        Returns:
            Seconds for which a snapshot kept the training thread busy, and CPU seconds of one that reached the buddy;
            0: there was none.
        """
        cost = self._store.take_send_cost() if self._store is not None else None
        copy_s, self._copy_s = self._copy_s, 0.0
        if cost is None:
            return copy_s, 0.0
        self._has_copy = True
        sent_copy_s, self._sent_copy_s = self._sent_copy_s, 0.0
        return copy_s, sent_copy_s + cost.cpu_s

    def is_due(self, step: int) -> bool:
        """Rank 0: whether the state after `step` shall be copied."""
        return self._decides and self._pace.copies.is_due(step)

    def is_sending_due(self, step: int) -> bool:
        """Rank 0: whether the state after `step` shall be sent to the buddies."""
        return self._decides and self._pace.sends.is_due(step)

    def mark_complete(self, step: int) -> None:
        """After each update, before anything else: mark a buffer in shared memory with the step that it holds.

        Readers take the values that are not tensors from rank 0's part."""
        if self._store is None or not self._state.is_in_shared_memory:
            return
        start_s = time.thread_time()
        self._pace.copies.hold()
        is_rank_0 = self._assignment.rank == 0
        self._state.finish(self._stamp(step), self._extra.encoded(step) if is_rank_0 else b"{}")
        self._copy_s = time.thread_time() - start_s

    def take(self, step: int, *, replicate: bool) -> None:
        """Take a snapshot of the state after `step`. When this returns, the live tensors may change again.

        The time to collect the state is part of the cost."""
        if self._store is None:
            return
        self._num_taken += 1
        self._pace.copies.done(step)
        if self._num_taken == 1:
            self._measure_state()
        if self._state.is_in_shared_memory:
            if replicate and self._assignment.buddy is not None and self._can_copy:
                self._sent_copy_s = self._copy(self._store, step)
                self._send(step)
        elif self._move_to_shared_memory(self._store, step):
            self.mark_complete(step)
        else:
            self._copy_s = self._copy(self._store, step)
            if replicate:
                self._send(step)

    def update(self, verdict: Verdict, step_s: float, step: int) -> None:
        """After each step: free older snapshots once they are not needed, and (rank 0) adapt the pace to the cost."""
        is_older_needed = self._num_taken <= 2 or verdict.requests.lacks_copy
        if self._store is not None and not self._has_freed_older and not is_older_needed:
            self._has_freed_older = True
            self._store.drop_older(self._assignment.generation)
        busy_s = self._take_busy_s()
        if not self._decides:
            return
        self._pace.note(step_s if self._is_on_gpu else min(step_s, busy_s), verdict.copy_s, verdict.send_s)
        paces = self._pace.copies.every_steps, self._pace.sends.every_steps, self._pace.share > 0
        if paces != self._reported or self._num_taken >= self._num_reported + _REPORT_EVERY:
            self._reported, self._num_reported = paces, self._num_taken
            self._report(step)

    @property
    def _decides(self) -> bool:
        return self._store is not None and self._assignment.rank == 0

    def _move_to_shared_memory(self, store: SnapshotStore, step: int) -> bool:
        try:
            return self._state.move_to_shared_memory(
                store,
                owns_replicated=self._assignment.layout.owns_replicated(self._assignment.rank),
                extra_bytes=len(self._extra.encoded(step)),
            )
        except SharedMemoryFull as error:
            self._outbox.log_text(f"shared memory cannot hold the state twice, so snapshots are copies: {error}")
            return False

    def _copy(self, store: SnapshotStore, step: int) -> float:
        """Copy the state. Returns the seconds that it took."""
        a, busy_s, wall_s = self._assignment, time.thread_time(), time.perf_counter()
        try:
            store.snapshot(
                self._state.view.tensors(),
                generation=a.generation,
                rank=a.rank,
                world_size=a.world_size,
                step=step,
                extra=self._extra.values(step),
                owns_replicated=a.layout.owns_replicated(a.rank),
            )
        except SharedMemoryFull as error:
            self._give_up(error)
            return 0.0
        # On CPU the thread's own time: if ranks share cores, wall-clock time includes the turns of other processes.
        return time.perf_counter() - wall_s if self._is_on_gpu else time.thread_time() - busy_s

    def _send(self, step: int) -> None:
        self._pace.sends.done(step)
        if self._assignment.buddy is not None and self._store is not None and self._can_copy:
            self._store.replicate(self._assignment.buddy)

    def _measure_state(self) -> None:
        tensors = [local_tensor(tensor) for tensor in self._state.view.tensors().values()]
        self._is_on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._num_bytes = sum(tensor.nbytes for tensor in tensors)

    def _stamp(self, step: int) -> Stamp:
        a = self._assignment
        return Stamp(a.generation, a.rank, a.world_size, step)

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
            )
        )

    def _give_up(self, error: SharedMemoryFull) -> None:
        if self._state.is_in_shared_memory:
            self._can_copy, self._has_copy = False, True  # the copies that were sent before are the last ones
            self._outbox.log_text(
                f"no more copies to other nodes: {error}. A node's death will cost the steps since the last checkpoint."
            )
        else:
            self._store = None
            self._outbox.log_text(
                f"no more snapshots in memory: {error}. A death will cost the steps since the last checkpoint."
            )
