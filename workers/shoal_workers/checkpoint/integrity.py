"""Compares the files of a checkpoint with its marker: lengths of all files, and checksums. Imports no torch."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal_workers.checkpoint.errors import DamagedCheckpoint
from shoal_workers.checkpoint.storage import Directory
from shoal_workers.contract.marker import CommitMarker
from shoal_workers.contract.worker_reports import SavedFile

_CHUNK_BYTES = 8 << 20


def check_lengths(place: Directory, marker: CommitMarker) -> None:
    """Checks, with one listing, that every file in the marker exists and has the right length. Other files are
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
    """The content of a small file, verified."""
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
