"""A process's own snapshots: a blocking copy of the state into allocated shared memory, at the speed of memcpy.

    without a buddy   two slots: the newest complete snapshot stays, the other slot is written
    with a buddy      up to four: also the snapshot that is being sent, and the last one that the buddy has (see
                      `retention`). Such a slot is overwritten only if there is no memory for another one.

Everything that depends only on the state's layout (`Shape`: the save plan, its index as JSON, the regions of the file;
and the tensor views of a slot) is made once and found again by `plan_key`. A snapshot then costs one pass over the
tensors. Called from the training thread; the sender thread calls `sent` and the function that `hand_over` returns.
Copies from CUDA go to pinned memory and are non-blocking, followed by one synchronize. Live slots have the same
`Shape`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal_workers.checkpoint.index import ALIGNMENT_BYTES, IndexItem, ShardIndex
from shoal_workers.checkpoint.save_plan import PlannedItem, SavePlan, local_tensor, plan_key, plan_save
from shoal_workers.snapshot_store.slots import retention
from shoal_workers.snapshot_store.slots.slot_files import Regions, SlotFile, SlotPool, Stamp, fitting
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull


class HostRuntime(Protocol):
    """The two functions of CUDA's runtime; 0 is success."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> Any: ...  # noqa: N802

    def cudaHostUnregister(self, address: int, /) -> Any: ...  # noqa: N802


class Pin:
    """Shared memory that is registered with the driver of a GPU, which then copies into it at the speed of the bus.

    Memory that is not registered is filled through a buffer of the driver, page by page, several times as slowly, while
    the thread waits. The `Pin` keeps the memory mapped, and must be dropped before the memory is given back. If the
    driver refuses (a limit on locked memory), snapshots are as slow as before.
    """

    def __init__(self, memory: Tensor, runtime: HostRuntime) -> None:
        self._memory = memory
        self._runtime = runtime

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter, or the GPU, may be gone
            self._runtime.cudaHostUnregister(self._memory.data_ptr())


def pin(memory: Tensor, runtime: HostRuntime | None) -> Pin | None:
    """None if there is no GPU, or its driver refuses. `memory`: bytes, from the beginning of a page."""
    if runtime is None or not memory.nbytes:
        return None
    status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        _log.warning("snapshot_store.not_pinned", extra={"num_bytes": memory.nbytes, "cuda_error": status})
        _forget_error()
        return None
    return Pin(memory, runtime)


def find_host_runtime(state: Mapping[str, Tensor]) -> HostRuntime | None:
    """CUDA's, if any tensor is on a GPU."""
    if any(local_tensor(tensor).is_cuda for tensor in state.values()):
        runtime: HostRuntime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return runtime
    return None


def _forget_error() -> None:
    """CUDA reports an error of registration once more at the next launch."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Views:
    """The tensors over one slot, for one shape."""

    shape: Shape
    tensors: list[torch.Tensor]
    addresses: list[int]
    pin: Pin | None
    """Lives as long as the views, which are `attached` to the slot."""


class OwnSlots:
    def __init__(
        self,
        directory: Path,
        make_room: Callable[[], bool] | None = None,
        find_runtime: Callable[[Mapping[str, torch.Tensor]], HostRuntime | None] = find_host_runtime,
    ) -> None:
        """`find_runtime`: that of the GPU of a state, which pins the slots."""
        self._pool = SlotPool(directory, "own", make_room)
        self._find_runtime = find_runtime
        self._runtime: HostRuntime | None = None
        self._allocating = threading.Lock()
        """Held while memory is allocated, which is slow. Acquired before `_lock`."""
        self._lock = threading.Lock()
        """Guards what is known of the slots; held briefly."""
        self._newest: SlotFile | None = None
        self._sending: SlotFile | None = None
        self._last_sent: SlotFile | None = None
        """The last one of which the buddy has a copy."""
        self._retained: list[SlotFile] = []
        """The last one that was handed to the sender, and the last one of which the buddy had a copy by then."""
        self._num_since_sent = 0
        self._num_wanted = retention.NUM_OWN_SLOTS
        self._key: Hashable = None
        self._shape: Shape | None = None
        self._restored: tuple[int, int] | None = None

    def prepare(self, state: Mapping[str, torch.Tensor], *, owns_replicated: bool) -> None:
        """Allocate and touch the memory without overwriting a complete part. SharedMemoryFull."""
        self._reserve(self._shape_of(state, owns_replicated, extra_bytes=0), retention.NUM_OWN_SLOTS)

    def write(
        self, state: Mapping[str, torch.Tensor], stamp: Stamp, extra: Mapping[str, Any], *, owns_replicated: bool
    ) -> None:
        """Write a snapshot. When it returns, `state` and `extra` may change.

        SharedMemoryFull; the earlier snapshots are unchanged then.
        """
        extra_json = json.dumps(extra).encode()
        shape = self._shape_of(state, owns_replicated, extra_bytes=len(extra_json))
        slot = self._take(shape, stamp.generation)
        regions = shape.regions
        slot.begin()
        views = self._lay_out(slot, shape)
        slot.map[regions.extra_offset : regions.extra_offset + len(extra_json)] = extra_json
        _copy(views, state, shape.plan)
        slot.finish(regions, stamp, num_extra_bytes=len(extra_json))
        with self._lock:
            self._newest = slot
            self._num_since_sent += 1
            self._remove_stale(stamp.generation, regions.file_bytes)

    @property
    def plan(self) -> SavePlan:
        """The plan of the newest snapshot; there must be one."""
        assert self._shape is not None
        return self._shape.plan

    def keep_restored(self, generation: int, step: int) -> None:
        """Keep the snapshot that the group was restored from until the new generation has one of its own."""
        self._restored = generation, step

    def holds(self, generation: int, step: int) -> bool:
        """Return whether this process still has a copy of its own state at this step."""
        with self._lock:
            return any(slot.is_of(generation, step) for slot in self._pool.slots)

    def hand_over(self, keep_step: int | None = None) -> tuple[SlotFile, Callable[[], None]] | None:
        """Return the newest snapshot, which does not change until `sent`, and a function that the sender thread calls
        first.

        `keep_step`: this step of the same generation is retained instead of the last one that was sent.

        None if there is no snapshot. No snapshot may be being sent: asserted.
        """
        with self._lock:
            assert self._sending is None
            slot, shape = self._newest, self._shape
            if slot is None or shape is None:
                return None
            self._sending = slot
            generation = slot.header.generation if slot.header is not None else None
            older = next((other for other in self._retained if other.is_of(generation, keep_step)), self._last_sent)
            self._retained = [slot] if older is None else [older, slot]
            num_slots = retention.num_own_slots(
                has_copy=self._last_sent is not None, num_since_sent=self._num_since_sent
            )
            self._num_since_sent, self._num_wanted = 0, num_slots

        def reserve() -> None:
            try:
                self._reserve(shape, num_slots, generation)
            except SharedMemoryFull as error:
                _log.warning("snapshot_store.no_spare_slot", extra={"error": str(error)})

        return slot, reserve

    def sent(self, slot: SlotFile, has_arrived: bool) -> None:
        """End what `hand_over` began; called by the sender thread. `has_arrived`: the buddy has a complete copy."""
        with self._lock:
            self._sending = None
            if has_arrived:
                self._last_sent = slot
            else:
                self._retained = [other for other in self._retained if other is not slot]

    def drop_older(self, generation: int) -> None:
        """Snapshots of earlier generations are no longer retained; later snapshots overwrite their slots."""
        with self._lock:
            self._retained = [
                slot for slot in self._retained if not retention.is_outdated(slot.header, before=generation)
            ]
            if self._last_sent not in self._retained:
                self._last_sent = None

    def close(self) -> None:
        """Called after the sender has ended."""
        with self._lock:
            self._pool.close()
            self._last_sent = None

    def _shape_of(self, state: Mapping[str, torch.Tensor], owns_replicated: bool, *, extra_bytes: int) -> Shape:
        key = plan_key(state, owns_replicated=owns_replicated, every_replica=True)
        shape = self._shape
        if shape is None or key != self._key:
            self._runtime = self._find_runtime(state)
            plan = plan_save(state, owns_replicated=owns_replicated, every_replica=True)
            shape = Shape.from_plan(plan, extra_bytes=extra_bytes)
        elif extra_bytes > shape.regions.extra_room:
            shape = Shape.from_plan(shape.plan, extra_bytes=extra_bytes)
        self._key, self._shape = key, shape
        return shape

    def _take(self, shape: Shape, generation: int) -> SlotFile:
        """A slot that fits and may be overwritten; waits for the spare slot if the sender thread is allocating it."""
        slot = self._choose(shape, generation)
        if slot is not None:
            return slot
        with self._allocating:
            slot = self._choose(shape, generation)
            if slot is not None:
                return slot
            with self._lock:
                free = self._overwritable(generation)
            try:
                return self._pool.take(free, shape.regions.file_bytes)
            except SharedMemoryFull:
                retained = self._give_up_retained(shape, generation)
                if retained is None:
                    raise
                return retained
            finally:
                with self._lock:
                    self._forget([slot for slot in free if slot.header is None])

    def _give_up_retained(self, shape: Shape, generation: int) -> SlotFile | None:
        """A retained slot that fits, other than the one that is being sent and the one that must stay."""
        with self._lock:
            kept = retention.kept(self._pool.slots, generation=generation, restored=self._restored)
            stay = (self._sending, kept)
            candidates = [slot for slot in self._retained if slot not in stay]
            slot = next(iter(fitting(candidates, shape.regions.file_bytes)), None)
            if slot is not None:
                self._retained.remove(slot)
            return slot

    def _choose(self, shape: Shape, generation: int) -> SlotFile | None:
        with self._lock:
            return next(iter(fitting(self._overwritable(generation), shape.regions.file_bytes)), None)

    def _overwritable(self, generation: int) -> list[SlotFile]:
        """Oldest first."""
        held = (self._sending, *self._retained)
        return retention.overwritable(self._pool.slots, generation=generation, restored=self._restored, held=held)

    def _reserve(self, shape: Shape, num_slots: int, generation: int | None = None) -> None:
        """`generation`: slots of another size that it may overwrite are taken over; None if nothing is overwritten."""
        num_bytes = shape.regions.file_bytes
        with self._allocating:
            while len(fitting(self._pool.slots, num_bytes)) < num_slots:
                with self._lock:
                    stale = [] if generation is None else self._stale(generation, num_bytes)
                try:
                    slot = self._pool.take(stale, num_bytes)
                except SharedMemoryFull:
                    if len(self._pool.slots) < retention.NUM_OWN_SLOTS:
                        raise
                    return  # slots of another layout leave room, once they may be removed
                finally:
                    with self._lock:
                        self._forget([slot for slot in stale if slot.header is None])
                self._lay_out(slot, shape)

    def _lay_out(self, slot: SlotFile, shape: Shape) -> _Views:
        """Return the tensors over the slot; writes the index if the slot has another shape. No part is complete in
        it."""
        views = slot.attached
        if not isinstance(views, _Views) or views.shape is not shape:
            views = slot.attached = None  # the pin ends before the next one begins
            payload = shape.lay_out(slot)
            tensors = [view_item(payload, item) for item in shape.plan.items]
            addresses = [tensor.data_ptr() for tensor in tensors]
            views = _Views(shape, tensors, addresses, pin(payload[: shape.plan.total_bytes], self._runtime))
            slot.attached = views
        return views

    def _remove_stale(self, generation: int, num_bytes: int) -> None:
        """Slots of another size, once there are enough that fit; until then they are taken over."""
        if len(fitting(self._pool.slots, num_bytes)) < self._num_wanted:
            return
        stale = self._stale(generation, num_bytes)
        self._pool.release(stale)
        self._forget(stale)

    def _stale(self, generation: int, num_bytes: int) -> list[SlotFile]:
        return [slot for slot in self._overwritable(generation) if not slot.fits(num_bytes)]

    def _forget(self, slots: Collection[SlotFile]) -> None:
        """Forget slots that were resized or removed, and hold no part."""
        if self._last_sent in slots:
            self._last_sent = None


def _copy(views: _Views, state: Mapping[str, torch.Tensor], plan: SavePlan) -> None:
    """Copy with memmove where possible: torch's copy loop writes through the cache, which takes longer."""
    targets, sources = [], []
    for item, view, address in zip(plan.items, views.tensors, views.addresses, strict=True):
        tensor = state[item.fqn]
        source = local_tensor(tensor)
        if source.is_cpu and source.is_contiguous() and source.nbytes == item.nbytes:
            ctypes.memmove(address, source.data_ptr(), item.nbytes)
        else:
            targets.append(view)
            sources.append(source.detach())
    if sources:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)
    # Copies from a GPU may be under way still, and the state may change once this returns.
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


_MIN_EXTRA_ROOM_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Compared by identity: the same object means the same layout."""

    plan: SavePlan
    index: bytes
    regions: Regions

    @staticmethod
    def from_plan(plan: SavePlan, *, extra_bytes: int) -> Shape:
        """Reserve twice `extra_bytes` for the plain values, since they grow."""
        index = _make_index(plan)
        room = max(_MIN_EXTRA_ROOM_BYTES, 2 * extra_bytes)
        return Shape(plan, index, Regions.lay_out(index_bytes=len(index), extra_room=room, num_bytes=plan.total_bytes))

    def make_index(self, names: Collection[str]) -> bytes:
        """Return the index of a part that has only these of the items; as long as the whole index."""
        items = tuple(item for item in self.plan.items if item.fqn in names)
        return _make_index(replace(self.plan, items=items)).ljust(len(self.index))

    def lay_out(self, file: SlotFile) -> torch.Tensor:
        """Write the index; return the payload as bytes, in the file's memory. The slot holds no complete part."""
        regions = self.regions
        file.map[regions.index_offset : regions.index_offset + regions.index_bytes] = self.index
        return torch.frombuffer(file.map, dtype=torch.uint8)[regions.payload_offset :]


def view_item(payload: torch.Tensor, item: PlannedItem) -> torch.Tensor:
    """An item's slice of the payload, with the item's dtype and sizes."""
    return payload[item.file_offset : item.file_offset + item.nbytes].view(item.dtype).view(item.sizes)


def with_rooms(plan: SavePlan, rooms: Mapping[str, int]) -> SavePlan:
    """Return the same items further apart: an item named in `rooms` gets at least that many bytes."""
    items: list[PlannedItem] = []
    end = 0
    for item in plan.items:
        item = replace(item, file_offset=-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        items.append(item)
        end = item.file_offset + max(item.nbytes, rooms.get(item.fqn, 0))
    return SavePlan(tuple(items), end)


def _make_index(plan: SavePlan) -> bytes:
    """Written once for many snapshots, so the fields that the slot's header carries (rank, step ...) are 0 in it."""
    items = tuple(
        IndexItem(
            fqn=item.fqn,
            dtype=str(item.dtype).removeprefix("torch."),
            shape=item.shape,
            offsets=item.offsets,
            sizes=item.sizes,
            file_offset=item.file_offset,
            nbytes=item.nbytes,
            crc32=0,
        )
        for item in plan.items
    )
    return ShardIndex(rank=0, world_size=0, generation=0, step=0, items=items, extra={}).to_json()
