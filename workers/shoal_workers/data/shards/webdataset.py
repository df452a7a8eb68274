"""Tar files as WebDataset writes them: consecutive files of the same name up to the first dot are one sample.

    a/0001.jpg  a/0001.cls  a/0002.jpg  ...   ->   {"__key__": "a/0001", "jpg": b"...", "cls": b"3"}, ...

The bytes of a file are a value; what they mean is the user's (a `decode` function). The names of fields are in lower
case, as the library has them. Hidden files, directories, links and names of the form `__name__` are passed over.

The headers are read here and not by `tarfile`, which takes several times as long for them, and whose archives have a
position that forked processes would share. Names and sizes are those of POSIX (ustar, pax) and of GNU tar; files with
holes are refused. Called through `shard_formats`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shoal_workers.data.shards.shard import Sample, Shard, mapped

KEY = "__key__"
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_BLOCK = 512
_REGULAR = (0, ord("0"), ord("7"))
_LONG_NAME, _LONG_LINK, _EXTENDED, _SPARSE = ord("L"), ord("K"), b"xX", ord("S")


class TarShard(Shard):
    format = "a tar file of WebDataset"

    def _open(self) -> int:
        self._content = mapped(self.path)
        self._samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
        for name, start, end in _files(self._content):
            self._add(name, start, end)
        return len(self._samples)

    def _add(self, name: str, start: int, end: int) -> None:
        found = _NAME.fullmatch(name)
        if found is None or (name.rpartition("/")[2].startswith("__") and name.endswith("__")):
            return
        key, field = found.group(1), found.group(2).lower()
        if not self._samples or self._samples[-1][0] != key:
            self._samples.append((key, {}))
        fields = self._samples[-1][1]
        if field in fields:
            raise ValueError(f"it has {name} twice in one sample")
        fields[field] = (start, end)

    def _read(self, number: int) -> Sample:
        key, fields = self._samples[number]
        return {KEY: key} | {field: self._content[start:end] for field, (start, end) in fields.items()}


def _files(content: Any) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and end of each regular file."""
    at, long_name = 0, ""
    extended: dict[str, str] = {}
    while at < len(content):
        header = content[at : at + _BLOCK]
        if not any(header):
            return
        _check(header, at)
        start, size = at + _BLOCK, _number(header[124:136])
        kind = header[156]
        if kind not in (_LONG_NAME, _LONG_LINK) and kind not in _EXTENDED:
            size = int(extended.get("size", size))
        end = start + size
        if end > len(content):
            raise ValueError(f"a file would end at byte {end:,}, and it has {len(content):,} bytes")
        at = start + -(-size // _BLOCK) * _BLOCK
        if kind == _LONG_NAME:
            long_name = _text(content[start:end])
        elif kind in _EXTENDED:
            extended = _records(content[start:end])
        elif kind == _SPARSE or any(name.startswith("GNU.sparse") for name in extended):
            raise ValueError(f"{_name(header)} has holes. Write it without the option for sparse files")
        elif kind != _LONG_LINK:
            if kind in _REGULAR:
                yield extended.get("path") or long_name or _name(header), start, end
            long_name, extended = "", {}


def _check(header: bytes, at: int) -> None:
    if len(header) < _BLOCK:
        raise ValueError(f"it ends at byte {at + len(header):,}, within a header")
    if sum(header) - sum(header[148:156]) + 8 * ord(" ") != _number(header[148:156]):
        raise ValueError(f"the header at byte {at:,} has another checksum than it names")


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU: 8 GiB or more
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def _records(content: bytes) -> dict[str, str]:
    """Those of pax: `length name=value`, a line each; a value may contain line ends."""
    records = {}
    while content:
        length, _, _ = content.partition(b" ")
        name, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        records[name.decode()] = value.decode(errors="surrogateescape")
        content = content[int(length) :]
    return records


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")
