"""Steps and curves of a script that writes TensorBoard event files, without a change to it.

    script        SummaryWriter().add_scalar("train/loss", 0.5, 17)     a record at the end of a file
    this module   {"step": 17, "loss": 0.5, ...}                        as if it had called shoal.log

Files are looked for below the working directory (`runs`, `lightning_logs` ...), the checkpoint directory, and the one
that SHOAL_TENSORBOARD names. Only what this generation writes is read. The scalars of one step become one message once
those of a later step are there, or nothing more has come for a while. The script is never waited for, and
never sees this. Used by the runner on its training thread, on rank 0.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.names import sorted_out

VARIABLE = "SHOAL_TENSORBOARD"
"""A further directory in which event files are looked for; set it in `code.env`."""
EVERY_S = 1.0
"""Seconds between two looks."""
_SEARCH_EVERY_S = 5.0
_QUIET_S = 5.0
"""After so long without a record the scalars of the last step are all there. A writer writes whole buffers, so a step
may come in two parts."""
_MARK = ".tfevents."
_MAX_DEPTH = 6
_MAX_ENTRIES = 5_000
_MAX_BYTES = 4 << 20
"""What is read of one file in one look. A longer file is read over several looks."""
_MAX_RECORD_BYTES = 64 << 20
_CLOCK_S = 60.0
"""Largest difference of the clocks of a file server and of this machine."""
_HEAD_BYTES = 64
_HEADER = struct.Struct("<QI")
_CRC_BYTES = 4
_LEFT_OUT = frozenset({"node_modules", "__pycache__", "site-packages"})


class EventFiles:
    """The event files of one generation's script.

    Args:
        folders: where to look; those that are not there are looked for again.
        began_at: wall-clock time at which the script was started, seconds since the epoch. What is older was written by
            another generation.
        clock: monotonic, in seconds.
    """

    def __init__(self, folders: Sequence[str], began_at: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folders = [folder for folder in folders if folder and "://" not in folder]
        self._began_at = began_at
        self._offsets: dict[str, int] = {}
        self._heads: dict[str, bytes] = {}
        """The first bytes of each file, which say when its writer began."""
        self._steps: dict[int, dict[str, float]] = {}
        """Scalars by step, of steps that no message was made of yet."""
        self._times: dict[int, float] = {}
        self._clock = clock
        self._looked_mono = self._searched_mono = self._grown_mono = -math.inf

    @property
    def next_mono(self) -> float:
        """When to look again."""
        return self._looked_mono + EVERY_S

    def messages(self, *, is_last: bool = False) -> list[dict[str, Any]]:
        """Messages as those of `shoal.log`, in the order of their steps, if it is time to look. `is_last`: the script
        has ended."""
        now_mono = self._clock()
        if now_mono < self.next_mono and not is_last:
            return []
        self._looked_mono = now_mono
        if now_mono >= self._searched_mono + _SEARCH_EVERY_S or is_last:
            self._searched_mono = now_mono
            self._search()
        if sum(self._read(path) for path in self._offsets):
            self._grown_mono = now_mono
        steps = sorted(self._steps)
        if not is_last and now_mono < self._grown_mono + _QUIET_S:
            steps = steps[:-1]
        return [self._message(step) for step in steps]

    def _message(self, step: int) -> dict[str, Any]:
        known, others = sorted_out(self._steps.pop(step))
        return {"step": step, "at": self._times.pop(step), **known, "metrics": others}

    def _search(self) -> None:
        left = _MAX_ENTRIES
        for folder in self._folders:
            below = [(folder, 0)]
            while below and left > 0:
                place, depth = below.pop()
                with suppress(OSError), os.scandir(place) as entries:
                    for entry in entries:
                        left -= 1
                        if entry.is_dir(follow_symlinks=False):
                            if depth < _MAX_DEPTH and not entry.name.startswith(".") and entry.name not in _LEFT_OUT:
                                below.append((entry.path, depth + 1))
                        elif _MARK in entry.name and entry.stat().st_mtime >= self._began_at - _CLOCK_S:
                            self._offsets.setdefault(os.path.realpath(entry.path), 0)

    def _read(self, path: str) -> bool:
        """Add what was written to the file since the last look. Return whether there was something, or has begun."""
        try:
            with Path(path).open("rb") as file:
                head = file.read(_HEAD_BYTES)
                known = self._heads.get(path, b"")
                if head[: len(known)] != known:
                    self._offsets[path] = 0  # written anew: a name has only the second in which its writer began
                self._heads[path] = head
                file.seek(self._offsets[path])
                data = file.read(_MAX_BYTES)
                size = _record_bytes(data)
                if len(data) < size <= _MAX_RECORD_BYTES:
                    data += file.read(size - len(data))
        except OSError:
            return False
        num_bytes = 0
        for record, end in _records(data):
            num_bytes = end
            self._add(record)
        self._offsets[path] += num_bytes
        return len(data) > 0

    def _add(self, record: bytes) -> None:
        event = _parsed(record)
        if event is None or event.wall_time < self._began_at or event.step < 0:
            return
        for value in event.summary.value:
            number = _scalar(value)
            if number is not None:
                self._steps.setdefault(event.step, {})[value.tag] = number
                self._times[event.step] = float(event.wall_time)


def _record_bytes(data: bytes) -> int:
    """Length of the first record, as far as its header is there."""
    return _HEADER.size + int(_HEADER.unpack_from(data)[0]) + _CRC_BYTES if len(data) >= _HEADER.size else 0


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the whole records at the beginning of the data, and where each ends. Their sums are not checked: a record
    is read when its last byte is there."""
    begin = 0
    while len(data) - begin >= _HEADER.size:
        (length, _) = _HEADER.unpack_from(data, begin)
        end = begin + _HEADER.size + length + _CRC_BYTES
        if end > len(data):
            return
        yield data[begin + _HEADER.size : end - _CRC_BYTES], end
        begin = end


def _parsed(record: bytes) -> Any:
    """Return the event; None if it is none that can be read."""
    try:
        from tensorboardX.proto.event_pb2 import Event  # a dependency of Ray Train; imported if a file is found

        return Event.FromString(record)
    except Exception:  # the file is the script's, and may hold anything
        return None


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind == "tensor" and value.metadata.plugin_data.plugin_name in ("", "scalars"):
        tensor = value.tensor
        for numbers in (tensor.float_val, tensor.double_val, tensor.int_val):
            if len(numbers) == 1:
                return float(numbers[0])
        if len(tensor.tensor_content) == 4 and tensor.dtype == 1:  # DT_FLOAT
            return float(struct.unpack("<f", tensor.tensor_content)[0])
    return None
