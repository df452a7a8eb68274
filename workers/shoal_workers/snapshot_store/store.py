"""The RAM tier of one process: snapshots of its state in shared memory that outlives it, and a copy on another node.

    training thread   | step | snapshot: copy | step | snapshot | step ...      where the state lives in it: no copy
    sender thread                       | the newest goes to the buddy ........ |
    server threads    other nodes' restores and copies, whenever they come

Decides nothing about when: the engine says how often, the supervisor from where. Must never raise for a peer that is
gone or slow, except in `load`, whose caller has another source. Called by the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shoal_workers.checkpoint.save_plan import SavePlan
from shoal_workers.contract.snapshots import SnapshotPart, SnapshotServer, SnapshotSource
from shoal_workers.snapshot_store import loading, slot_registry
from shoal_workers.snapshot_store.buddy_slots import BuddySlots
from shoal_workers.snapshot_store.live_slots import LiveSlot, LiveSlots
from shoal_workers.snapshot_store.loading import Loaded
from shoal_workers.snapshot_store.own_slots import OwnSlots
from shoal_workers.snapshot_store.sender import SendCost, Sender, Sending
from shoal_workers.snapshot_store.server import PartServer, snapshot_parts_of
from shoal_workers.snapshot_store.slot import Stamp
from shoal_workers.snapshot_store.slot_registry import SlotRegistry

__all__ = ["LiveSlot", "Loaded", "SendCost", "SnapshotStore", "sweep_stale"]

_log = logging.getLogger(__name__)


class SnapshotStore:
    """One per process; outlives generations. `holdings` from any thread, everything else from the training thread."""

    def __init__(
        self,
        *,
        job_id: str,
        attempt: int,
        worker_id: str,
        node_id: str,
        key: str,
        host: str = "127.0.0.1",
        root: Path = Path("/dev/shm"),
    ) -> None:
        """`key`: the attempt's secret; who does not know it is neither served nor asked. `root`: a tmpfs.

        Serves on `port` of `host` from here on. Clears up after attempts of which no process lives on this machine.
        OSError where `root` or `host` cannot be used: then there is no RAM tier here.
        """
        self._node_id = node_id
        self._key = key
        self._directory = SlotRegistry(root, job_id=job_id, attempt=attempt, node_id=node_id, worker_id=worker_id)
        swept = sweep_stale(root)
        if swept:
            _log.info("memory.swept", extra={"attempts": swept})
        self._own = OwnSlots(self._directory.path)
        self._live = LiveSlots(self._directory.path)
        self._buddies = BuddySlots(self._directory.path)
        self._sender = Sender(key)
        try:
            self._server = PartServer(self._directory, self._buddies, node_id=node_id, key=key, host=host)
        except OSError:
            self._directory.close()
            raise
        self.port: int = self._server.port
        self._is_closed = False

    def snapshot_parts(self) -> tuple[SnapshotPart, ...]:
        """Every complete part of this attempt in this node's memory: own, dead processes', buddies' copies."""
        return snapshot_parts_of(self._directory, self._node_id)

    def prepare(
        self, state: Mapping[str, torch.Tensor], *, rank: int, world_size: int, owns_replicated: bool | None = None
    ) -> None:
        """Takes and touches the memory before the first snapshot has to, which would be 10 to 25 times as slow.

        Destroys no snapshot, so it may be called before or after `load`. SharedMemoryFull.
        """
        self._own.prepare(state, owns_replicated=rank == 0 if owns_replicated is None else owns_replicated)

    def snapshot(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        generation: int,
        rank: int,
        world_size: int,
        step: int,
        extra: Mapping[str, Any],
        owns_replicated: bool | None = None,
    ) -> float:
        """Copies this rank's part; returns the seconds that it took. The live tensors may change afterwards.

        `state`: flat name -> DTensor or Tensor. `extra`: small, JSON. `owns_replicated` as for `CheckpointWriter.save`.
        SharedMemoryFull; TypeError or ValueError for what can never be saved.
        """
        start = time.perf_counter()
        self._own.write(
            state,
            Stamp(generation, rank, world_size, step),
            extra,
            owns_replicated=rank == 0 if owns_replicated is None else owns_replicated,
        )
        return time.perf_counter() - start

    def live_slots(self, plan: SavePlan, *, extra_bytes: int) -> tuple[LiveSlot, ...]:
        """Two slots for the tensors of a new model; `extra_bytes`: size of its plain values now. SharedMemoryFull."""
        return self._live.make(plan, extra_bytes=extra_bytes)

    def replicate(self, buddy: SnapshotServer) -> bool:
        """Hands the newest own snapshot to the sender thread; returns at once.

        False: it is still busy with an older one, or there is no snapshot. After the loss of a node only a step that
        every rank has handed over helps: let all ranks agree, so that they send the same steps.
        """
        if self._sender.is_busy:
            return False
        handed = self._own.hand_over()
        if handed is None:
            return False
        slot, reserve = handed
        assert slot.file.header is not None
        self._sender.offer(
            Sending(
                memory=memoryview(slot.file.map),
                header=slot.file.header,
                buddy=buddy,
                on_start=reserve,
                on_end=lambda has_arrived: self._own.sent(slot, has_arrived),
            )
        )
        return True

    @property
    def is_sending(self) -> bool:
        """`replicate` would say no: for a vote on whether all ranks can send."""
        return self._sender.is_busy

    def take_send_cost(self) -> SendCost | None:
        """Of the last send that was completed since the last call; None: none was."""
        return self._sender.take_cost()

    def load(self, state: Mapping[str, torch.Tensor], source: SnapshotSource, *, check: Callable[[], None]) -> Loaded:
        """Fills `state` in place, from any layout into any other. No collectives.

        `check` is called all the time and may raise, which ends the load. SnapshotLost where a part cannot be had.
        """
        loaded = loading.load(
            state, source, directory=self._directory, node_id=self._node_id, key=self._key, check=check
        )
        self._own.keep_restored(source.generation, source.step)
        self._live.keep_restored(source.generation, source.step)
        return loaded

    def forget_older(self, generation: int) -> None:
        """Frees parts of generations before this one that nobody alive owns, and copies that were taken in for others.

        For when the group no longer needs them: it has a whole snapshot of its own.
        """
        self._own.forget_older(generation)
        self._live.forget_older(generation)
        self._buddies.forget_older(generation)
        self._directory.forget_dead(generation)

    def forget_all(self) -> None:
        """The attempt is over: removes everything of it on this machine, whoever's it is."""
        self._directory.forget_attempt()

    def close(self) -> None:
        """Stops the threads and removes what this process has; what the dead have left stays while others live."""
        if self._is_closed:
            return
        self._is_closed = True
        self._sender.close()
        self._server.close()
        self._own.close()
        self._live.close()
        self._buddies.close()
        self._directory.close()


def sweep_stale(root: Path) -> list[str]:
    """Removes the attempts of which no process lives on this machine; returns their names."""
    return slot_registry.sweep_stale(root)
