"""The snapshot store of one process: snapshots of its state in shared memory, and a copy of them on another node.

    training thread   | step | snapshot: copy | step | snapshot | step ...      no copy, if live slots hold the state
    sender thread                       | sends the newest to the buddy ....... |
    server threads    serve restores of other nodes, and receive their copies, at any time

The snapshots outlive the process. Called by the engine and by the worker's actor. It does not decide when to take a
snapshot (the engine does) or from where to restore (the supervisor does). It must never raise because a peer is dead or
slow, except in `load`, whose caller has another source.
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
from shoal_workers.snapshot_store.slots import registry
from shoal_workers.snapshot_store.slots.buddy_slots import BuddySlots
from shoal_workers.snapshot_store.slots.live_slots import LiveSlot, LiveSlots
from shoal_workers.snapshot_store.slots.own_slots import OwnSlots
from shoal_workers.snapshot_store.slots.registry import SlotRegistry, Sweep
from shoal_workers.snapshot_store.slots.slot_files import Stamp
from shoal_workers.snapshot_store.transfer import loading
from shoal_workers.snapshot_store.transfer.loading import LoadResult
from shoal_workers.snapshot_store.transfer.peer_maps import PeerMaps
from shoal_workers.snapshot_store.transfer.sender import SendCost, Sender, Sending
from shoal_workers.snapshot_store.transfer.server import PartServer

__all__ = ["LiveSlot", "LoadResult", "SendCost", "SnapshotStore"]

_log = logging.getLogger(__name__)


class SnapshotStore:
    """One per process, for all its generations. `snapshot_parts` from any thread, all else from the training thread.

    `own`, `live`, `sender`, `peer_maps` and `registry` are called themselves where the store would add nothing.
    """

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
        memory_id: str | None = None,
    ) -> None:
        """`key`: the attempt's secret; both sides of a connection prove that they know it. `root`: a tmpfs.
        `memory_id`: processes with the same one read each other's slots; by default those of the same node.

        Serves on `port` of `host` from now on. Removes the directories of earlier attempts of this job, and of other
        jobs' attempts that have had no live process on this machine for a while. OSError if `root` or `host` cannot be
        used: then this process keeps no snapshots.
        """
        self._node_id = node_id
        self._key = key
        self.memory_id = node_id if memory_id is None else memory_id
        self.registry = SlotRegistry(
            root, job_id=job_id, attempt=attempt, memory_id=self.memory_id, worker_id=worker_id
        )
        self._root, self._job_id, self._attempt = root, job_id, attempt
        self._sweep()
        self.own = OwnSlots(self.registry.path, self._make_room)
        self.live = LiveSlots(self.registry.path, self._make_room)
        self.peer_maps = PeerMaps(self.registry)
        self._buddies = BuddySlots(self.registry.path, self._make_room)
        self.sender = Sender(key)
        try:
            self._server = PartServer(self.registry, self._buddies, key=key, host=host)
        except OSError:
            self.registry.close()
            raise
        self.port: int = self._server.port
        self._is_closed = False

    def snapshot_parts(self) -> tuple[SnapshotPart, ...]:
        """Return every complete part in this node's memory once, sorted by generation, step and rank.

        They are of live and dead processes of this attempt, and copies.
        """
        parts = {
            SnapshotPart(
                generation=header.generation,
                rank=header.rank,
                world_size=header.world_size,
                step=header.step,
                num_bytes=header.num_bytes,
                node_id=self._node_id,
            )
            for _, header in self.registry.parts()
        }
        return tuple(sorted(parts, key=lambda part: (part.generation, part.step, part.rank)))

    def prepare(
        self, state: Mapping[str, torch.Tensor], *, rank: int, world_size: int, owns_replicated: bool | None = None
    ) -> None:
        """Allocate and touch the memory in advance: in the first snapshot it would make it 10 to 25 times as slow.

        Overwrites no snapshot, so it may be called before or after `load`. SharedMemoryFull.
        """
        self.own.prepare(state, owns_replicated=rank == 0 if owns_replicated is None else owns_replicated)

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
        """Copy this rank's part; return the seconds that it took. Afterwards the tensors of `state` may change.

        `state`: flat name -> DTensor or Tensor. `extra`: small, JSON. `owns_replicated` as for `CheckpointWriter.save`.
        SharedMemoryFull; TypeError or ValueError if `state` or `extra` contains something that cannot be saved.
        """
        start = time.perf_counter()
        self.own.write(
            state,
            Stamp(generation, rank, world_size, step),
            extra,
            owns_replicated=rank == 0 if owns_replicated is None else owns_replicated,
        )
        return time.perf_counter() - start

    def live_slot(self, plan: SavePlan, *, extra_bytes: int, restoring: SnapshotSource | None = None) -> LiveSlot:
        """Return the first of two slots for the tensors of a new model; `extra_bytes`: size of its plain values now.

        `restoring`: what the group is about to be restored from; it stays complete. SharedMemoryFull: there is no
        memory for both slots.
        """
        place = None if restoring is None else (restoring.generation, restoring.step)
        return self.live.make(plan, extra_bytes=extra_bytes, restoring=place)

    def replicate(self, buddy: SnapshotServer, *, keep_step: int | None = None) -> bool:
        """Hand the newest own snapshot to the sender thread, without waiting for it.

        False: the sender is still busy with an older one, or there is no snapshot. After a node is lost, the group can
        only restore a step that every rank has sent. The caller therefore lets all ranks agree on the steps to send.
        `keep_step`: the newest one of which every rank's copy has arrived. Its snapshot stays here and at the buddy.
        """
        if self.sender.is_busy:
            return False
        handed = self.own.hand_over(keep_step)
        if handed is None:
            return False
        slot, reserve = handed
        assert slot.header is not None
        self.sender.offer(
            Sending(
                memory=memoryview(slot.map),
                header=slot.header,
                buddy=buddy,
                on_start=reserve,
                on_end=lambda has_arrived: self.own.sent(slot, has_arrived),
                keep_step=keep_step,
            )
        )
        return True

    def keep_copy(self, *, keep_step: int | None = None) -> None:
        """Retain the newest own snapshot as if it had been sent, for a rank without a buddy whose group has copies."""
        handed = self.own.hand_over(keep_step)
        if handed is not None:
            self.own.sent(handed[0], True)

    def load(
        self,
        state: Mapping[str, torch.Tensor],
        source: SnapshotSource,
        *,
        check: Callable[[], None],
        optional: Mapping[str, str] | None = None,
    ) -> LoadResult:
        """Fill `state` in place, from any layout into any other, without collectives. `optional`: tensors that the
        snapshot may lack, as for `plan_needed`.

        `check` is called between reads, at least every 0.1 s while waiting; if it raises, the load ends. SnapshotLost
        if a part cannot be read.
        """
        loaded = loading.load(
            state,
            source,
            registry=self.registry,
            find_map=lambda fd, num_bytes: self.peer_maps.find(fd, num_bytes, self.live.files),
            node_id=self._node_id,
            key=self._key,
            check=check,
            optional=optional,
        )
        self.own.keep_restored(source.generation, source.step)
        self.live.keep_restored(source.generation, source.step)
        return loaded

    def drop_older(self, generation: int) -> None:
        """Drop parts of generations before this one: own ones, those of dead processes, and copies for buddies.

        Called when the group has a complete snapshot of this generation, and so no longer needs them.
        """
        self.own.drop_older(generation)
        self.live.drop_older(generation)
        self._buddies.drop_older(generation)
        self.registry.remove_dead_slots(generation)
        self._sweep()

    def _sweep(self) -> None:
        # All processes of the machine share this clock, and setting the date does not move it.
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        _report_swept(registry.sweep_stale(self._root, Sweep(self._job_id, self._attempt, now)))

    def _make_room(self) -> bool:
        """Free memory for a slot: attempts without a live process are not kept any longer."""
        had_maps = self.peer_maps.drop()  # of slots that may have been removed
        return _report_swept(registry.sweep_stale(self._root)) or had_maps

    def close(self) -> None:
        """Stop the threads and remove its slots. Slots of dead processes remain until the last one closes."""
        if self._is_closed:
            return
        self._is_closed = True
        # The threads end first: they read and write the slots, which are unmapped below.
        self.sender.close()
        self._server.close()
        self.peer_maps.close()
        self.own.close()
        self.live.close()
        self._buddies.close()
        self.registry.close()


def _report_swept(attempts: list[str]) -> bool:
    if attempts:
        _log.info("snapshot_store.swept", extra={"attempts": attempts})
    return bool(attempts)
