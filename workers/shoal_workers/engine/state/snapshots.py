"""When snapshots are taken and sent to the buddy: after every step, or as often as the budget allows.

    step s+1:  backward | vote | update | copy into memory | ---- step s+2 ---->
                                                            | sender thread: to the buddy

Where the state lives in shared memory (living.py) a snapshot is a word that says which step it holds. Copies are only
taken to be sent then.

Rank 0 keeps the pace, since all ranks must snapshot the same steps for a snapshot to be whole; its requests reach the
others through the vote. Without a tier, or once memory is full, everything here is a no-op: training goes on, and an
unexpected death costs the steps since the last checkpoint.
"""

from __future__ import annotations

import time

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.messages import Assignment, SnapshotCost
from shoal_workers.contract.spec import SnapshotSpec
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.state.double_buffered_state import DoubleBufferedState
from shoal_workers.engine.state.pace import SnapshotPace
from shoal_workers.engine.state.state_view import StateView
from shoal_workers.engine.state.training_state import Extra
from shoal_workers.engine.step.vote import Verdict
from shoal_workers.snapshot_store.errors import SharedMemoryFull
from shoal_workers.snapshot_store.slot import Stamp
from shoal_workers.snapshot_store.store import SnapshotStore

_REPORT_EVERY = 50


class Snapshots:
    """Of one generation. Training thread only."""

    def __init__(
        self,
        spec: SnapshotSpec,
        assignment: Assignment,
        ram: SnapshotStore | None,
        outbox: Outbox,
        view: StateView,
        living: DoubleBufferedState,
        extra: Extra,
    ) -> None:
        self._assignment = assignment
        self._ram = ram
        self._view = view
        self._living = living
        self._extra = extra
        self._copies = True
        self._outbox = outbox
        self._pace = SnapshotPace(spec.budget)
        self._copy_s = 0.0
        self._apart_s = 0.0
        """Of a copy beside the living state, until it is counted: a part of what it costs to send one."""
        self._num_taken = 0
        self._num_told = 0
        self._has_copy = assignment.buddy is None
        self._has_let_go = False
        self._told: tuple[float, float, bool] | None = None
        """The paces, and whether it was known yet what they cost."""
        self._num_bytes = 0
        self._is_on_gpu = False
        self._busy_since_s = time.process_time()

    @property
    def is_on(self) -> bool:
        return self._ram is not None

    def take_costs(self) -> tuple[float, float]:
        """Once per vote: seconds that a snapshot has kept the training thread busy since the last, and CPU seconds of
        one that has been sent; 0: none was."""
        cost = self._ram.take_send_cost() if self._ram is not None else None
        copy_s, self._copy_s = self._copy_s, 0.0
        if cost is None:
            return copy_s, 0.0
        self._has_copy = True
        apart_s, self._apart_s = self._apart_s, 0.0
        return copy_s, apart_s + cost.cpu_s

    def is_due(self, step: int) -> bool:
        """Rank 0: whether the state after `step` shall be copied."""
        return self._decides and self._pace.copies.is_due(step)

    def is_sending_due(self, step: int) -> bool:
        """Rank 0: ... and sent to the buddies."""
        return self._decides and self._pace.sends.is_due(step)

    def say(self, step: int) -> None:
        """After each update, and before anything else: where the state lives in shared memory, let it say which step it
        holds. What is no tensor is read from rank 0's part."""
        if self._ram is None or not self._living.has_moved:
            return
        start_s = time.thread_time()
        self._pace.copies.hold()
        is_rank_0 = self._assignment.rank == 0
        self._living.finish(self._stamp(step), self._extra.encoded(step) if is_rank_0 else b"{}")
        self._copy_s = time.thread_time() - start_s

    def take(self, step: int, *, replicate: bool) -> None:
        """Of the state after `step`; once it returns the live tensors may change again. What it takes to put the state
        together is a part of the cost."""
        if self._ram is None:
            return
        self._num_taken += 1
        self._pace.copies.done(step)
        if self._num_taken == 1:
            self._look_at_the_state()
        if self._living.has_moved:
            if replicate and self._assignment.buddy is not None and self._copies:
                self._apart_s = self._copied_s(self._ram, step)
                self._send(step)
        elif self._move_in(self._ram, step):
            self.say(step)
        else:
            self._copy_s = self._copied_s(self._ram, step)
            if replicate:
                self._send(step)

    def _move_in(self, ram: SnapshotStore, step: int) -> bool:
        try:
            return self._living.move_in(
                ram,
                owns_replicated=self._assignment.layout.owns_replicated(self._assignment.rank),
                extra_bytes=len(self._extra.encoded(step)),
            )
        except SharedMemoryFull as error:
            self._outbox.say(f"snapshots in memory take copies now: {error}")
            return False

    def _copied_s(self, ram: SnapshotStore, step: int) -> float:
        """Seconds that it took to copy the state."""
        a, busy_s, wall_s = self._assignment, time.thread_time(), time.perf_counter()
        try:
            ram.snapshot(
                self._view.tensors(),
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
        # On CPU the thread's own time: where cores are shared, the clock also counts the turns of other processes.
        return time.perf_counter() - wall_s if self._is_on_gpu else time.thread_time() - busy_s

    def _send(self, step: int) -> None:
        self._pace.sends.done(step)
        if self._assignment.buddy is not None and self._ram is not None and self._copies:
            self._ram.replicate(self._assignment.buddy)

    def _look_at_the_state(self) -> None:
        tensors = [local_tensor(tensor) for tensor in self._view.tensors().values()]
        self._is_on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._num_bytes = sum(tensor.nbytes for tensor in tensors)

    def _stamp(self, step: int) -> Stamp:
        a = self._assignment
        return Stamp(a.generation, a.rank, a.world_size, step)

    @property
    def is_sending(self) -> bool:
        return self._ram is not None and self._ram.is_sending

    @property
    def lacks_copy(self) -> bool:
        """The generation before is still needed, should a node be lost now."""
        return not self._has_copy

    def update(self, verdict: Verdict, step_s: float, step: int) -> None:
        """After each step: let the past go once it is not needed, and (rank 0) adapt the pace to what it costs."""
        if self._ram is not None and not self._has_let_go and self._num_taken > 2 and not verdict.requests.lacks_copy:
            self._has_let_go = True
            self._ram.forget_older(self._assignment.generation)
        busy_s = self._take_busy_s()
        if not self._decides:
            return
        self._pace.note(step_s if self._is_on_gpu else min(step_s, busy_s), verdict.copy_s, verdict.send_s)
        what = self._pace.copies.every_steps, self._pace.sends.every_steps, self._pace.share > 0
        if what != self._told or self._num_taken >= self._num_told + _REPORT_EVERY:
            self._told, self._num_told = what, self._num_taken
            self._tell(step)

    def _take_busy_s(self) -> float:
        """CPU seconds of this process since the last call: what a snapshot's CPU seconds are held against where ranks
        share cores. In the rest of a step's time others compute, and a snapshot keeps them from it as well."""
        now_s = time.process_time()
        busy_s, self._busy_since_s = now_s - self._busy_since_s, now_s
        return busy_s

    @property
    def _decides(self) -> bool:
        return self._ram is not None and self._assignment.rank == 0

    def _tell(self, step: int) -> None:
        self._outbox.tell(
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
        if self._living.has_moved:
            self._copies, self._has_copy = False, True  # what was sent before is all that there will be
            self._outbox.say(
                f"no more copies to other nodes: {error}. A node's death will cost the steps since the last checkpoint."
            )
        else:
            self._ram = None
            self._outbox.say(
                f"no more snapshots in memory: {error}. A death will cost the steps since the last checkpoint."
            )
