"""The commit marker in storage. A checkpoint exists as soon as its marker exists, not before.

The file contains the marker and the CRC-32 of its canonical JSON, so a flipped bit is found, as in the tensors. It is
written last, atomically, when every part is durable: by the supervisor, or by `shoal_workers.run`.

`check_lengths` and `verify_file` compare the files of a checkpoint with its marker. Imports no torch.
"""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from shoal_workers.checkpoint.errors import CommitConflict, DamagedCheckpoint
from shoal_workers.checkpoint.storage import Directory, join, open_directory
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName, CommitMarker
from shoal_workers.contract.worker_reports import SavedFile, SavedPart


def write_marker(directory: str, marker: CommitMarker) -> None:
    """Atomic and durable: afterwards the checkpoint in `directory` exists. OSError if the storage fails."""
    open_directory(directory).write(MARKER_NAME, [_encode(marker)])


def marker_of(parts: Sequence[SavedPart], *, job_id: str, attempt: int, now: float) -> CommitMarker:
    """Return the marker of the checkpoint that consists of these parts. The caller has the parts of all ranks:
    asserted."""
    assert parts, "no parts to commit"
    first = parts[0]
    name = CheckpointName(first.step, attempt, first.generation)
    for part in parts:
        assert (part.generation, part.step, part.world_size) == (first.generation, first.step, first.world_size), part
        assert part.directory.rstrip("/").rsplit("/", 1)[-1] == str(name), f"{part.directory} is not {name}"
    in_order = sorted(parts, key=lambda part: part.rank)
    ranks = [part.rank for part in in_order]
    assert ranks == list(range(first.world_size)), f"parts of ranks {ranks}, world size {first.world_size}"
    return CommitMarker(
        job_id=job_id,
        attempt=attempt,
        generation=first.generation,
        step=first.step,
        world_size=first.world_size,
        committed_at=now,
        files=tuple(file for part in in_order for file in part.files),
    )


def read_marker(directory: str) -> CommitMarker:
    """DamagedCheckpoint if there is no valid marker, OSError if the storage cannot be reached."""
    return marker_in(open_directory(directory))


def commit_in(place: Directory, marker: CommitMarker) -> CommitMarker:
    """Compare and set: the first marker of a directory stays. Repeating a commit returns the first one.

    Raises CommitConflict: there is a marker of other files.
    """
    if place.create_file(MARKER_NAME, _encode(marker)):
        return marker
    known = marker_in(place)
    if known.model_copy(update={"committed_at": marker.committed_at}) != marker:
        raise CommitConflict(place.url)
    return known


def marker_in(place: Directory) -> CommitMarker:
    """Do what `read_marker` does, for an open directory."""
    with reading(place, MARKER_NAME, missing="is missing: the checkpoint was never committed"):
        data = place.read(MARKER_NAME)
    marker = _decode(place.url, data)
    written_as = CheckpointName(marker.step, marker.attempt, marker.generation)
    found_in = CheckpointName.parse(place.url.rsplit("/", 1)[-1])
    if found_in is not None and found_in != written_as:
        raise DamagedCheckpoint(place.url, MARKER_NAME, f"belongs to {written_as}, but was found in {found_in}")
    return marker


def newest_committed(root: str) -> str | None:
    """URL of the newest checkpoint under `root` with a valid marker; for callers without a supervisor."""
    place = open_directory(root)
    for name in checkpoint_names(place):
        try:
            marker_in(place.child(str(name)))
        except DamagedCheckpoint:
            continue
        return join(root, str(name))
    return None


def checkpoint_names(place: Directory) -> list[CheckpointName]:
    """Checkpoint directories in a job's directory, committed or not, newest first."""
    parsed = (CheckpointName.parse(name) for name in place.directories())
    return sorted((name for name in parsed if name is not None), reverse=True)


def _encode(marker: CommitMarker) -> bytes:
    canonical = marker.model_dump_json()
    return f'{{"crc32":{zlib.crc32(canonical.encode())},"marker":{canonical}}}\n'.encode()


def _canonical(data: bytes) -> bytes:
    """Return the marker as it was written. Not written again from its fields: another release writes other fields."""
    return data.partition(b'"marker":')[2].rstrip().removesuffix(b"}")


def _decode(url: str, data: bytes) -> CommitMarker:
    try:
        parsed: Any = json.loads(data)
        recorded = parsed["crc32"]
        marker = CommitMarker.model_validate(parsed["marker"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        why = "its fields are not valid" if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise DamagedCheckpoint(url, MARKER_NAME, f"is not a commit marker ({why})") from None
    checksum = zlib.crc32(_canonical(data))
    if checksum != recorded:
        raise DamagedCheckpoint(url, MARKER_NAME, f"has crc32 {checksum:#010x}, but records {recorded!r}")
    return marker


_CHUNK_BYTES = 8 << 20


def check_lengths(place: Directory, marker: CommitMarker) -> None:
    """Check, with one listing, that every file in the marker exists and has the right length. Other files are
    ignored."""
    try:
        sizes = place.files()
    except FileNotFoundError:
        raise DamagedCheckpoint(place.url, marker.files[0].name, "is missing; its directory does not exist") from None
    for file in marker.files:
        if file.name not in sizes:
            raise DamagedCheckpoint(place.url, file.name, f"is missing ({file.bytes} bytes)")
        if sizes[file.name] != file.bytes:
            problem = f"is {sizes[file.name]} bytes long, the marker says {file.bytes}"
            raise DamagedCheckpoint(place.url, file.name, problem)


def read_checked(place: Directory, file: SavedFile) -> bytes:
    """Return the content of a small file, verified."""
    with reading(place, file.name):
        data = place.read(file.name)
    if len(data) != file.bytes:
        raise DamagedCheckpoint(place.url, file.name, f"is {len(data)} bytes long, the marker says {file.bytes}")
    _compare(place, file, zlib.crc32(data))
    return data


def verify_file(place: Directory, file: SavedFile, advanced: Callable[[int], None] = lambda count: None) -> None:
    """Verify a file of any size in constant memory. `advanced` is called with the bytes of each piece."""
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, file.bytes)))
    crc = offset = 0
    while offset < file.bytes:
        chunk = buffer[: file.bytes - offset]
        with reading(place, file.name):
            count = place.read_into(file.name, offset, chunk)
        if count < len(chunk):
            problem = f"ends at byte {offset + count}, the marker says {file.bytes}"
            raise DamagedCheckpoint(place.url, file.name, problem)
        crc = zlib.crc32(chunk, crc)
        offset += count
        advanced(count)
    _compare(place, file, crc)


@contextmanager
def reading(place: Directory, name: str, missing: str = "is missing") -> Iterator[None]:
    """Make a missing file and a read error of the disk (EIO) a DamagedCheckpoint; other OSErrors pass through."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedCheckpoint(place.url, name, missing) from None
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedCheckpoint(place.url, name, f"cannot be read: {error}") from error
        raise


def _compare(place: Directory, file: SavedFile, files_there: int) -> None:
    if files_there != file.crc32:
        problem = f"has crc32 {files_there:#010x}, the marker says {file.crc32:#010x}"
        raise DamagedCheckpoint(place.url, file.name, problem)
