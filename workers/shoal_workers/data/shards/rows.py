"""Shards that are tables: Parquet, Arrow files and streams, JSON lines. A row is a sample, a column a field.

Hidden here: how a row is found without the whole file in memory. Parquet is decoded by row groups, and those that were
read last are kept up to a bound; Arrow is mapped, so a row costs its own bytes; of JSON lines only the offsets of the
lines are held, 8 bytes each. Called through `shard_formats` and by `litdata`, whose newer chunks contain Arrow.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import Any

import numpy as np

from shoal_workers.data.records import refuse_cut_stream
from shoal_workers.data.shards.shard import Sample, Shard, mapped

_ARROW_FILE = b"ARROW1"
_KEPT_BYTES = 64 << 20
"""Bytes of decoded row groups or record batches that are kept; the last one is, whatever its size."""
_SCANNED_BYTES = 16 << 20
_MARK = b"\xef\xbb\xbf"


class ParquetShard(Shard):
    format = "Parquet"

    def _open(self) -> int:
        from pyarrow import parquet

        with self.path.open("rb") as file:
            if not file.read(1):
                raise ValueError("it is empty")
        self._file = parquet.ParquetFile(self.path, memory_map=True)
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
        self._kept = _Kept()
        return int(metadata.num_rows)

    def _read(self, number: int) -> Sample:
        group = bisect_right(self._ends, number)
        table = self._kept.get(group, lambda: self._file.read_row_group(group, use_threads=False))
        return _row(table, number - (self._ends[group - 1] if group else 0))


class ArrowShard(Shard):
    """A file as pyarrow and Feather write it, or a stream as `datasets` writes it."""

    format = "Arrow"

    def _open(self) -> int:
        content = mapped(self.path)
        if content[: len(_ARROW_FILE)] != _ARROW_FILE:
            refuse_cut_stream(content[-16:])
        self._rows = ArrowRows(memoryview(content))
        return len(self._rows)

    def _read(self, number: int) -> Sample:
        return self._rows[number]


class ArrowRows:
    """Rows of Arrow data that is in memory, or mapped: without compression inside, nothing is copied."""

    def __init__(self, content: memoryview) -> None:
        import pyarrow

        source = pyarrow.py_buffer(content)
        self._kept = _Kept()
        self._file: Any = None
        self._batches: list[Any] = []
        if bytes(content[: len(_ARROW_FILE)]) == _ARROW_FILE:
            self._file = pyarrow.ipc.open_file(source)
            one_column = pyarrow.ipc.open_file(source, options=pyarrow.ipc.IpcReadOptions(included_fields=[0]))
            lengths = [one_column.get_batch(number).num_rows for number in range(one_column.num_record_batches)]
        else:
            self._batches = list(pyarrow.ipc.open_stream(source))
            lengths = [batch.num_rows for batch in self._batches]
        self._ends = list(accumulate(lengths))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Sample:
        at = bisect_right(self._ends, number)
        batch = self._kept.get(at, lambda: self._file.get_batch(at)) if self._file is not None else self._batches[at]
        return _row(batch, number - (self._ends[at - 1] if at else 0))


class JsonLinesShard(Shard):
    format = "JSON lines"

    def _open(self) -> int:
        self._content = mapped(self.path)
        self._starts, self._ends = _lines(self._content)
        return len(self._starts)

    def _read(self, number: int) -> Sample:
        line = self._content[int(self._starts[number]) : int(self._ends[number])]
        try:
            row = json.loads(line.removeprefix(_MARK) if number == 0 else line)
        except ValueError as error:
            raise ValueError(f"line {self._line(number):,} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {self._line(number):,} is not an object with fields")
        return row

    def _line(self, number: int) -> int:
        """Its number in the file, counted from 1, with lines without content."""
        return self._content[: int(self._starts[number])].count(b"\n") + 1


class _Kept:
    """Decoded parts of a file, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._parts: OrderedDict[int, Any] = OrderedDict()
        self._num_bytes = 0

    def get(self, number: int, read: Any) -> Any:
        if number in self._parts:
            self._parts.move_to_end(number)
            return self._parts[number]
        part = read()
        self._parts[number] = part
        self._num_bytes += part.nbytes
        while self._num_bytes > _KEPT_BYTES and len(self._parts) > 1:
            _, dropped = self._parts.popitem(last=False)
            self._num_bytes -= dropped.nbytes
        return part


def _row(table: Any, number: int) -> Sample:
    row = table.slice(number, 1)
    row.validate(full=True)  # offsets that are damaged lead out of the memory, and pyarrow follows them
    return dict(row.to_pylist()[0])


def _lines(content: Any) -> tuple[Any, Any]:
    """Where the lines with content begin and end."""
    line_ends = [
        np.flatnonzero(np.frombuffer(content, np.uint8, min(_SCANNED_BYTES, len(content) - at), at) == 0x0A) + at
        for at in range(0, len(content), _SCANNED_BYTES)
    ]
    ends = np.concatenate([*line_ends, [len(content)]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    # A line of a few bytes may be white space; longer ones are looked at when they are read.
    short = [
        at
        for at in np.flatnonzero(ends - starts <= 8)
        if not content[starts[at] : ends[at]].strip(b"\xef\xbb\xbf \t\r")
    ]
    return np.delete(starts, short), np.delete(ends, short)
