"""Loads a checkpoint into a state of any layout, in place, and verifies everything that it reads.

In this order: the marker, the lengths of all files, the index of every part that this rank needs, every slice that it
needs against its CRC-32. Each rank reads on its own, without collectives. If it raises, some of the state's values may
have been replaced and others not. Called by the engine and by export.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from socket import gethostname
from threading import local as ThreadLocal
from typing import Any, TypeVar

import torch

from shoal_workers.checkpoint.commit import check_lengths, marker_in, read_checked, reading
from shoal_workers.checkpoint.errors import DamagedCheckpoint
from shoal_workers.checkpoint.index import ShardIndex, index_name, payload_name
from shoal_workers.checkpoint.load_plan import ItemRead, LoadPlan, dtype_of, narrowed, plan_needed
from shoal_workers.checkpoint.storage import Directory, open_directory
from shoal_workers.contract.marker import MARKER_NAME, CommitMarker
from shoal_workers.contract.worker_reports import SavedFile

_REMOTE_READS = 16
"""Parallel requests to an object store, where each takes tens of milliseconds until the first byte."""

T = TypeVar("T")
R = TypeVar("R")


def load(
    state: Mapping[str, torch.Tensor], *, directory: str, advanced: Callable[[int], None] = lambda num_bytes: None
) -> dict[str, Any]:
    """Fill all of `state` (flat, as for `CheckpointWriter.save`) and return the `extra` that rank 0 saved.

    Raises as `fill`."""
    return fill(state, directory=directory, advanced=advanced).extra


def fill(
    state: Mapping[str, torch.Tensor],
    *,
    directory: str,
    optional: Mapping[str, str] | None = None,
    advanced: Callable[[int], None] = lambda num_bytes: None,
) -> LoadPlan:
    """Fill `state` (flat, as for `CheckpointWriter.save`), and return the plan that was carried out.

    DamagedCheckpoint: fall back to an older one. StateMismatch: it was saved from another model or optimizer. OSError:
    the storage does not answer, or this node does not see the directory. Tensors of the checkpoint that the state does
    not contain are not read. `optional`: as for `plan_needed`. `advanced`: called on the calling thread with the bytes
    that were read so far.
    """
    place = open_directory(directory)
    try:
        place.files()
    except FileNotFoundError as error:  # its search was answered where the storage is seen: nothing is damaged
        message = f"{place.url} is not there on {gethostname()}. Make the job's storage available on that node"
        raise FileNotFoundError(message) from error
    marker = marker_in(place)
    check_lengths(place, marker)
    files = _files_of(place, marker)
    lengths = {file.name: file.bytes for file in marker.files}
    plan = plan_needed(
        state,
        marker.world_size,
        lambda ranks: _read_indexes(place, marker, files, ranks),
        directory=place.url,
        optional=optional,
    )
    scratch = _Scratch()
    for read in plan.reads:
        if read.item.file_offset + read.item.nbytes > lengths[read.file]:
            problem = f"is {lengths[read.file]} bytes long, its index puts {read.item.fqn} beyond that"
            raise DamagedCheckpoint(place.url, read.file, problem)
    num_bytes = 0
    for read, _ in zip(plan.reads, _each(place, lambda read: _fill(place, read, scratch), plan.reads), strict=True):
        num_bytes += read.item.nbytes
        advanced(num_bytes)
    return plan


def read_catalogue(directory: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the content of a checkpoint: every whole tensor by name, on the meta device, sorted by name; and `extra`.

    Raises as `load`.
    """
    place = open_directory(directory)
    marker = marker_in(place)
    check_lengths(place, marker)
    indexes = _read_indexes(place, marker, _files_of(place, marker), range(marker.world_size))
    tensors: dict[str, torch.Tensor] = {}
    for index in indexes:
        for item in index.items:
            if item.fqn not in tensors:
                dtype = dtype_of(item, index.rank, place.url)
                tensors[item.fqn] = torch.empty(item.shape, dtype=dtype, device="meta")
    return dict(sorted(tensors.items())), indexes[0].extra


def _files_of(place: Directory, marker: CommitMarker) -> dict[str, SavedFile]:
    """Return the files by name; both files of every rank are among them."""
    files = {file.name: file for file in marker.files}
    for rank in range(marker.world_size):
        for name in (payload_name(rank), index_name(rank)):
            if name not in files:
                raise DamagedCheckpoint(place.url, MARKER_NAME, f"does not list {name}")
    return files


def _read_indexes(
    place: Directory, marker: CommitMarker, files: Mapping[str, SavedFile], ranks: Iterable[int]
) -> list[ShardIndex]:
    def read(rank: int) -> ShardIndex:
        name = index_name(rank)
        try:
            index = ShardIndex.from_json(read_checked(place, files[name]))
        except ValueError as error:
            raise DamagedCheckpoint(place.url, name, f"is not an index ({error})") from None
        recorded = index.rank, index.world_size, index.generation, index.step
        expected = rank, marker.world_size, marker.generation, marker.step
        if recorded != expected:
            problem = f"records rank, world size, generation, step {recorded}; the marker records {expected}"
            raise DamagedCheckpoint(place.url, name, problem)
        return index

    return list(_each(place, read, ranks))


def _fill(place: Directory, read: ItemRead, scratch: _Scratch) -> None:
    """Read and check one whole slice, and copy its boxes; read into the state directly if the slice fits it."""
    item = read.item
    direct = _is_whole(read)
    memory = read.fills[0].target.reshape(-1).view(torch.uint8) if direct else scratch.take(item.nbytes)
    buffer = memory.numpy().data
    with reading(place, read.file):
        count = place.read_into(read.file, item.file_offset, buffer)
    if count < item.nbytes:
        problem = f"ends {item.nbytes - count} bytes before the end of {item.fqn}"
        raise DamagedCheckpoint(place.url, read.file, problem)
    crc32 = zlib.crc32(buffer)
    if crc32 != item.crc32:
        problem = (
            f"has crc32 {crc32:#010x} for {item.fqn} (bytes {item.file_offset} to {item.file_offset + item.nbytes}), "
            f"its index says {item.crc32:#010x}"
        )
        raise DamagedCheckpoint(place.url, read.file, problem)
    if not direct:
        whole = memory.view(read.dtype).view(item.sizes)
        for fill in read.fills:
            fill.target.copy_(narrowed(whole, fill.source_offsets, fill.lengths))


def _is_whole(read: ItemRead) -> bool:
    """Return whether the slice fills one contiguous block of CPU memory completely."""
    target = read.fills[0].target
    return (
        len(read.fills) == 1
        and read.fills[0].lengths == read.item.sizes
        and target.device.type == "cpu"
        and target.is_contiguous()
    )


class _Scratch(ThreadLocal):
    """Memory for slices of which only boxes are needed; reused, so its pages are touched already. One per thread."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes]


def _each(place: Directory, function: Callable[[T], R], values: Iterable[T]) -> Iterator[R]:
    """Yield the results in order, as they become known."""
    if place.is_local:
        yield from map(function, values)
        return
    with ThreadPoolExecutor(_REMOTE_READS, thread_name_prefix="checkpoint-read") as pool:
        yield from pool.map(function, values)
