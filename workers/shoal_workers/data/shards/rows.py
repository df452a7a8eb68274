"""Shards that are tables: Parquet, Arrow files and streams, JSON lines. A row is a sample, a column a field.

Hidden here: how a row is found without the whole file in memory.

    Parquet      decoded by row groups; the last ones stay in a cache
    Arrow        mapped into memory, so reading a row reads its bytes only
    JSON lines   two offsets of 8 bytes for each line
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np

from shoal_workers.data.concatenation import locate
from shoal_workers.data.records import refuse_cut_stream
from shoal_workers.data.shards.shard import Sample, Shard, mapped
from shoal_workers.recently_used import RecentlyUsed

_ARROW_FILE = b"ARROW1"
_CACHE_BYTES = 64 << 20
"""Bytes of decoded row groups or record batches that are kept. The newest one stays, whatever its size."""
_SCANNED_BYTES = 16 << 20
"""Bytes that are searched for line ends at once."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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
        self._parts = _Parts(lambda group: self._file.read_row_group(group, use_threads=False))
        return int(metadata.num_rows)

    def _read(self, number: int) -> Sample:
        group, row = locate(self._ends, number)
        return _row(self._parts.read(group), row)


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
    """Rows of Arrow data in memory, or in a mapped file. Uncompressed data are not copied."""

    def __init__(self, content: memoryview) -> None:
        import pyarrow

        source = pyarrow.py_buffer(content)
        if bytes(content[: len(_ARROW_FILE)]) == _ARROW_FILE:
            file = pyarrow.ipc.open_file(source)
            self._read_batch: Callable[[int], Any] = _Parts(file.get_batch).read
            # the number of rows is in each batch; with one column, little is decoded to find it
            first_column = pyarrow.ipc.open_file(source, options=pyarrow.ipc.IpcReadOptions(included_fields=[0]))
            lengths = [first_column.get_batch(number).num_rows for number in range(first_column.num_record_batches)]
        else:
            batches = list(pyarrow.ipc.open_stream(source))
            self._read_batch = batches.__getitem__
            lengths = [batch.num_rows for batch in batches]
        self._ends = list(accumulate(lengths))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Sample:
        index, row = locate(self._ends, number)
        return _row(self._read_batch(index), row)


class JsonLinesShard(Shard):
    format = "JSON lines"

    def _open(self) -> int:
        self._content = mapped(self.path)
        self._starts, self._ends = _find_lines(self._content)
        return len(self._starts)

    def _read(self, number: int) -> Sample:
        line = self._content[int(self._starts[number]) : int(self._ends[number])]
        try:
            row = json.loads(line.removeprefix(_BYTE_ORDER_MARK) if number == 0 else line)
        except ValueError as error:
            raise ValueError(f"line {self._line_number(number):,} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {self._line_number(number):,} is not an object with fields")
        return row

    def _line_number(self, number: int) -> int:
        """Return the line of a row in the file, from 1, with empty lines counted."""
        return self._content[: int(self._starts[number])].count(b"\n") + 1


class _Parts:
    """Decoded parts of a file, of which those that were used last are kept."""

    def __init__(self, decode: Callable[[int], Any]) -> None:
        self._decode = decode
        self._recent: RecentlyUsed[int, Any] = RecentlyUsed(_CACHE_BYTES, attrgetter("nbytes"))

    def read(self, number: int) -> Any:
        part = self._recent.get(number)
        if part is None:
            part = self._decode(number)
            self._recent.put(number, part)
        return part


def _row(table: Any, number: int) -> Sample:
    row = table.slice(number, 1)
    row.validate(full=True)  # pyarrow would follow damaged offsets out of the memory
    return dict(row.to_pylist()[0])


def _find_lines(content: Any) -> tuple[Any, Any]:
    """Return the offsets at which lines with content begin and end."""
    line_ends = [
        np.flatnonzero(np.frombuffer(content, np.uint8, min(_SCANNED_BYTES, len(content) - start), start) == 0x0A)
        + start
        for start in range(0, len(content), _SCANNED_BYTES)
    ]
    ends = np.concatenate([*line_ends, [len(content)]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    # Only lines of a few bytes are checked for white space: longer ones fail when they are read.
    empty = [
        line
        for line in np.flatnonzero(ends - starts <= 8)
        if not content[starts[line] : ends[line]].strip(_BYTE_ORDER_MARK + b" \t\r")
    ]
    return np.delete(starts, empty), np.delete(ends, empty)
