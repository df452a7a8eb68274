"""Whether a script has written anything new: files below its directories with a content that none had before.

Names do not count, nor times: a script that starts again and again writes the same files under new names. Event files
and logs do not count either, since every line of theirs has its time. A remote checkpoint directory is not looked into.
Called by the runner of rank 0.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

_MAX_FILES = 5_000
_PIECES, _PIECE_BYTES = 16, 1 << 16
"""So many pieces of a larger file are read, at equal distances: a step changes all weights of a model."""
_OF_RECORDS = (".log", ".lock", ".pyc", ".out", ".err")
_EVENTS = ".tfevents."


class WrittenFiles:
    """What these directories hold.

    Args:
        directories: those that exist are looked into, each with what is below it.
        left_out: names of folders and files in them that are Shoal's.
    """

    def __init__(self, directories: Sequence[str], left_out: Collection[str] = ()) -> None:
        self._left_out = left_out
        self._directories = [directory for directory in dict.fromkeys(directories) if "://" not in directory]
        self._digests: dict[tuple[str, int, int], bytes] = {}
        """By path, size and time of the last change."""
        self._before: frozenset[bytes] = frozenset()

    def begin(self) -> None:
        """Note the contents that are there."""
        self._before = self._contents()

    def has_new(self) -> bool:
        """Return whether there is a content that was not there at `begin`."""
        return not self._contents() <= self._before

    def _contents(self) -> frozenset[bytes]:
        files = islice((file for directory in self._directories for file in self._files(directory)), _MAX_FILES)
        self._digests = {
            key: digest for key in files if (digest := self._digests.get(key) or _digest(key[0], key[1])) is not None
        }
        return frozenset(self._digests.values())

    def _files(self, directory: str) -> Iterator[tuple[str, int, int]]:
        for folder, folders, names in os.walk(directory):
            left_out = self._left_out if folder == directory else ()
            folders[:] = [name for name in folders if name not in left_out]
            for name in names:
                if name.endswith(_OF_RECORDS) or _EVENTS in name or name in left_out:
                    continue
                path = Path(folder, name)
                try:
                    status = path.lstat()
                except OSError:
                    continue
                yield str(path), status.st_size, status.st_mtime_ns


def _digest(path: str, size: int) -> bytes | None:
    """None if it cannot be read, or is no plain file."""
    digest = hashlib.blake2b(size.to_bytes(8), digest_size=16)
    distance = max(_PIECE_BYTES, size // _PIECES)
    try:
        if not Path(path).is_file():
            return None
        with Path(path).open("rb") as file:
            for begin in range(0, size, distance):
                digest.update(os.pread(file.fileno(), _PIECE_BYTES, begin))
    except OSError:
        return None
    return digest.digest()
