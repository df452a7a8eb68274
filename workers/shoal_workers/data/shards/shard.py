"""What all formats share: a file that is mapped into memory, random access with checked numbers, and what is said about
damage.

A compressed file is unpacked once, into a temporary file without a name: the kernel removes it with the last process
that has it open, however that process ends. Extended by the modules of the formats.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from shoal_workers.data.errors import DamagedShardError, DataError, MissingTextError

Sample = dict[str, Any]
COMPRESSIONS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".br": "brotli"}
"""By the last suffix of a file's name; the words are those of pyarrow."""
OTHER = "sample"
"""The field of a sample that is no dictionary, but an array, a number or a list."""
_DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError),
    *(struct.error, EOFError, OSError, MemoryError, tarfile.TarError, zlib.error),
)
"""What reading bytes as what they are not has raised in tests that damage files at random."""
_COPIED_BYTES = 1 << 20


class Samples(Sequence[Any]):
    """Random access by number; slices are lists. A subclass says how many there are, and reads one."""

    place: object
    """Where they are, for messages."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.place}")
        return self.sample(index % len(self))

    def sample(self, number: int) -> Any:
        """Read the sample of this number, which is valid."""
        raise NotImplementedError


class Shard(Samples):
    """The samples of one file, dictionaries. Forked processes may share one; threads take turns.

    A sample shares no memory with the file, so it may be changed and outlives the shard.
    """

    format: str
    """As a message names it."""

    def __init__(self, path: Path, place: object = None) -> None:
        """Read the table of contents.

        Args:
            place: what messages name instead of the path.

        Raises:
            MissingTextError: there is no such file.
            DamagedShardError: it is not what its format demands.
        """
        self.path, self.place = path, place or path
        try:
            self._num_samples = self._open()
        except FileNotFoundError as error:
            raise MissingTextError(f"{self.place} does not exist. Check the path, or write the shard again.") from error
        except DataError:
            raise
        except _DAMAGE as error:
            raise self._damaged(error) from error

    def __len__(self) -> int:
        return self._num_samples

    def sample(self, number: int) -> Sample:
        """Raises DamagedShardError if the sample's bytes are not what the format demands."""
        try:
            return self._read(number)
        except DataError:
            raise
        except _DAMAGE as error:
            raise self._damaged(error, number) from error

    def _open(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError

    def _read(self, number: int) -> Sample:
        raise NotImplementedError

    def _damaged(self, error: Exception, number: int | None = None) -> Exception:
        place = self.place if number is None else f"{self.place}, sample {number:,}"
        problem = str(error) or type(error).__name__
        return DamagedShardError(
            f"{place} cannot be read as {self.format}: {problem}. Write the shard again, or give its format if it has "
            "another one."
        )


def mapped(path: Path, compression: str | None = None) -> mmap.mmap:
    """Return the content of a file without compression, read only. Raises ValueError if it is empty.

    Args:
        compression: as pyarrow names it; None means what the name says.
    """
    compression = compression or COMPRESSIONS.get(path.suffix)
    with path.open("rb") as stored:
        if compression is None:
            return _mapped(stored)
        with tempfile.TemporaryFile(prefix="shoal-shard-") as plain:
            _unpack(stored, plain, compression)
            return _mapped(plain)


def checked(offsets: Any, num_bytes: int) -> Any:
    """Return the offsets of samples, which must neither fall nor lead out of the file."""
    import numpy as np

    if len(offsets) and (int(offsets[-1]) > num_bytes or bool(np.any(offsets[1:] < offsets[:-1]))):
        raise ValueError(f"its samples would end at byte {int(np.max(offsets)):,}, and it has {num_bytes:,} bytes")
    return offsets


def encoded_images(raw: bytes, at: int = 0) -> list[bytes]:
    """What several formats write of a list of images: how many, their sizes as uint32, and they themselves."""
    import numpy as np

    num = int(np.frombuffer(raw, "<u4", 1, at)[0])
    first = at + 4 + 4 * num
    ends = (np.cumsum(np.frombuffer(raw, "<u4", num, at + 4), dtype=np.int64) + first).tolist()
    if num and ends[-1] > len(raw):
        raise ValueError(f"a list would end at byte {ends[-1]:,} of {len(raw):,}")
    return [raw[start:end] for start, end in pairwise((first, *ends))]


def _mapped(file: Any) -> mmap.mmap:
    file.seek(0, 2)
    if not file.tell():
        raise ValueError("it is empty")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _unpack(stored: BinaryIO, plain: Any, compression: str) -> None:
    import pyarrow

    with pyarrow.CompressedInputStream(stored, compression) as stream:
        shutil.copyfileobj(stream, plain, _COPIED_BYTES)
    plain.flush()
