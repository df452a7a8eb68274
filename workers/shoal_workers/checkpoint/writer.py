"""Writes one rank's part of a checkpoint: a blocking copy into allocated memory, then a write on a thread of its own.

    training thread   | wait for the previous write | copy | ------------ training continues ------------>
    writer thread                                          | crc32 | .bin + fsync | .json + fsync | on_done

If the storage hangs, so does the writer thread; `abandon` leaves it behind, and its outcome is that of a save that was
given up. There are no collectives. Each rank writes only its own part; the checkpoint exists once the supervisor has
all reports and has written the commit marker. It must never raise for a storage problem: training continues without
the checkpoint. Called by the engine.

The copy goes to a staging buffer: one persistent block of memory with exactly the bytes that the file will contain.
Writing new pages takes 10 to 25 times as long as writing pages that were touched before (0.6 and 16 GiB/s were
measured). The buffer is therefore touched once when it is allocated, and reused for every save; it grows and never
shrinks. It is page-locked if the state is on a GPU, so that the copy runs at the speed of the bus.

Each byte is read once for both checksums: the file's CRC-32 follows from those of its pieces (`combine`).
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from shoal_workers.checkpoint.index import IndexItem, ShardIndex, index_name, jsonable, payload_name
from shoal_workers.checkpoint.save_plan import SavePlan, local_tensor, plan_key, plan_save
from shoal_workers.checkpoint.storage import Directory, open_directory
from shoal_workers.contract.worker_reports import SavedFile, SavedPart, SaveFailed

_WRITE_BYTES = 16 << 20

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """One per process, for all its generations, so that its memory stays allocated. Training thread only."""

    def __init__(self) -> None:
        self._staging = StagingBuffer()
        self._plan = SavePlan((), 0)
        self._plan_key: Hashable = None
        self._thread: threading.Thread | None = None
        self._durable_in = ""

    def warm(self, state: Mapping[str, torch.Tensor], *, owns_replicated: bool) -> None:
        """Plan the save and allocate the memory before the first save, while the worker would otherwise wait."""
        self.wait()
        key = plan_key(state, owns_replicated=owns_replicated)
        if key != self._plan_key:
            self._plan, self._plan_key = plan_save(state, owns_replicated=owns_replicated), key
        self._staging.prepare(self._plan, pinned=any(tensor.is_cuda for tensor in state.values()))

    def save(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        directory: str,
        rank: int,
        world_size: int,
        generation: int,
        step: int,
        extra: Mapping[str, Any],
        on_done: Callable[[SavedPart | SaveFailed], None],
        owns_replicated: bool | None = None,
        advanced: Callable[[int], None] = lambda num_bytes: None,
    ) -> float:
        """Return the seconds of the blocking part; afterwards `state` and `extra` may change.

        `state`: flat, fully qualified name -> DTensor or plain tensor, on any device. `extra`: JSON values; a reader
        gets rank 0's. `on_done` is called exactly once, from the writer thread, when the part is durable or has failed;
        `advanced` before that, with the bytes that the storage has accepted so far.
        `owns_replicated`: this rank writes the plain tensors; by default rank 0 does. If ranks have different plain
        tensors (pipeline stages), one rank per stage must own them.
        TypeError or ValueError if `state` or `extra` cannot be saved (see `plan_save`); no error if the storage fails.
        """
        start = time.perf_counter()
        self.warm(state, owns_replicated=rank == 0 if owns_replicated is None else owns_replicated)
        shard = ShardIndex(
            rank=rank, world_size=world_size, generation=generation, step=step, items=(), extra=jsonable(extra)
        )
        self._staging.copy_in(state)
        stall_s = time.perf_counter() - start
        plan, data = self._plan, self._staging.bytes()

        def write() -> None:
            outcome = _write(directory, shard, plan, data, stall_s, advanced)
            if isinstance(outcome, SavedPart):
                self._durable_in = directory
            elif (
                self._durable_in != directory
            ):  # else a save to it succeeded before, and its files may belong to a checkpoint
                _remove_files(directory, rank)
            on_done(outcome)

        self._thread = threading.Thread(target=write, name=f"checkpoint-write-{step}", daemon=True)
        self._thread.start()
        return stall_s

    def wait(self) -> None:
        """Wait until the last save has called its `on_done`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """The storage hangs: leaves the writer thread behind with the memory that it reads. The next save allocates."""
        self._thread = None
        self._staging, self._plan, self._plan_key = StagingBuffer(), SavePlan((), 0), None

    def close(self) -> None:
        """Wait for the last save, and free the memory."""
        self.wait()
        self._staging, self._plan, self._plan_key = StagingBuffer(), SavePlan((), 0), None


def _write(
    directory: str,
    shard: ShardIndex,
    plan: SavePlan,
    data: memoryview,
    stall_s: float,
    advanced: Callable[[int], None],
) -> SavedPart | SaveFailed:
    """Write the files of a part. `shard`: its index, still without items."""
    start = time.perf_counter()
    try:
        files = _write_files(open_directory(directory), shard, plan, data, advanced)
    except Exception as error:  # the boundary of the writer thread: any error means that the part does not exist
        _log.warning(
            "checkpoint.part_failed",
            extra={"step": shard.step, "generation": shard.generation, "rank": shard.rank, "directory": directory},
            exc_info=True,
        )
        return SaveFailed(
            generation=shard.generation,
            step=shard.step,
            rank=shard.rank,
            directory=directory,
            error=f"{type(error).__name__}: {error}",
        )
    return SavedPart(
        generation=shard.generation,
        step=shard.step,
        rank=shard.rank,
        world_size=shard.world_size,
        directory=directory,
        files=files,
        stall_s=stall_s,
        write_s=time.perf_counter() - start,
    )


def _write_files(
    place: Directory, shard: ShardIndex, plan: SavePlan, data: memoryview, advanced: Callable[[int], None]
) -> tuple[SavedFile, ...]:
    items, payload_crc = _checksums(plan, data)
    index = shard.model_copy(update={"items": items}).to_json()
    place.create()
    # The storage has answered: the time within which it must accept bytes begins anew.
    advanced(0)
    place.write(payload_name(shard.rank), _chunks(data, advanced))
    advanced(len(data))
    place.write(index_name(shard.rank), [index])
    return (
        SavedFile(name=payload_name(shard.rank), bytes=len(data), crc32=payload_crc),
        SavedFile(name=index_name(shard.rank), bytes=len(index), crc32=zlib.crc32(index)),
    )


def _checksums(plan: SavePlan, data: memoryview) -> tuple[tuple[IndexItem, ...], int]:
    """Checksums of each item and of the whole file; reads every byte once."""
    items: list[IndexItem] = []
    whole = end = 0
    for item in plan.items:
        whole = zlib.crc32(data[end : item.file_offset], whole)
        end = item.file_offset + item.nbytes
        crc = zlib.crc32(data[item.file_offset : end])
        whole = combine(whole, crc, item.nbytes)
        items.append(
            IndexItem(
                fqn=item.fqn,
                dtype=str(item.dtype).removeprefix("torch."),
                shape=item.shape,
                offsets=item.offsets,
                sizes=item.sizes,
                file_offset=item.file_offset,
                nbytes=item.nbytes,
                crc32=crc,
            )
        )
    return tuple(items), whole


def _chunks(data: memoryview, advanced: Callable[[int], None]) -> Iterator[memoryview]:
    for start in range(0, len(data), _WRITE_BYTES):
        yield data[start : start + _WRITE_BYTES]
        advanced(min(start + _WRITE_BYTES, len(data)))


def _remove_files(directory: str, rank: int) -> None:
    try:
        place = open_directory(directory)
        for name in (payload_name(rank), index_name(rank)):
            place.remove(name)
    except Exception:  # storage that cannot write may not delete either; retention does it later
        _log.info("checkpoint.part_not_removed", extra={"directory": directory, "rank": rank}, exc_info=True)


_ALIGNMENT_BYTES = 4096


class StagingBuffer:
    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._plan = SavePlan((), 0)
        self._views: list[torch.Tensor] = []

    def prepare(self, plan: SavePlan, *, pinned: bool) -> None:
        """Allocate and touch memory for a plan; do nothing if the plan is the same object as before."""
        if plan is self._plan:
            return
        if plan.total_bytes > self._memory.numel():
            self._views, self._memory = (
                [],
                torch.empty(0, dtype=torch.uint8),
            )  # free the old buffer before allocating the new one
            room = -(-plan.total_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._memory = torch.empty(room, dtype=torch.uint8, pin_memory=pinned)
        self._memory.zero_()  # also the gaps between items, which become part of the file
        self._views = [
            self._memory[item.file_offset : item.file_offset + item.nbytes].view(item.dtype).view(item.sizes)
            for item in plan.items
        ]
        self._plan = plan

    def copy_in(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the planned slices; when it returns, the state may change."""
        with torch.no_grad():
            sources = [local_tensor(state[item.fqn]) for item in self._plan.items]
            for view, source in zip(self._views, sources, strict=True):
                view.copy_(source, non_blocking=True)
        # Copies from a GPU may be under way still, and the state may change once this returns.
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def bytes(self) -> memoryview:
        """Return the file's content, without a copy; valid until the next `prepare` or `copy_in`."""
        return self._memory[: self._plan.total_bytes].numpy().data


_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X = 1 << 30


def combine(first: int, second: int, second_bytes: int) -> int:
    """crc32(a + b) from crc32(a), crc32(b) and len(b); around 50 microseconds.

    crc(a + b) = crc(a) * x^(8 * len(b)) + crc(b) over GF(2), modulo the CRC polynomial: the method of zlib's
    `crc32_combine_op` (Adler, 2022), which Python's zlib does not expose.
    """
    return _multiply(_x_to_bits(second_bytes * 8), first) ^ second


@lru_cache(maxsize=4096)
def _x_to_bits(exponent: int) -> int:
    """x^exponent modulo the polynomial, by repeated squaring."""
    result, square = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials in zlib's reflected representation: the highest bit is x^0."""
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product
