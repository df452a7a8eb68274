"""Tar files as WebDataset writes them: consecutive files of the same name up to the first dot are one sample.

    a/0001.jpg  a/0001.cls  a/0002.jpg  ...   ->   {"__key__": "a/0001", "jpg": b"...", "cls": b"3"}, ...

The bytes of a file are a value; what they mean is the user's (a `decode` function). The names of fields are in lower
case, as the library has them. Hidden files, directories, links and names of the form `__name__` are passed over.

`tarfile` reads the headers, once; the bytes are read from the mapped file, because an archive has a position that
forked processes would share. `tarfile` takes a header that it cannot read for the end, so the block of zeros that ends
an archive is looked for here. Files with holes are refused. Called through `shard_formats`.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import Any

from shoal_workers.data.shards.shard import Sample, Shard, mapped

KEY = "__key__"
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)


class TarShard(Shard):
    format = "a tar file of WebDataset"

    def _open(self) -> int:
        self._content = mapped(self.path)
        self._samples: dict[str, dict[str, slice]] = {}
        key = ""
        for name, place in _files(self._content):
            key = self._add(name, place, key)
        self._keys = list(self._samples)
        return len(self._keys)

    def _add(self, name: str, place: slice, last_key: str) -> str:
        """Return the key of the sample that the file, or else the one before it, belongs to."""
        match = _NAME.fullmatch(name)
        if match is None or (name.rpartition("/")[2].startswith("__") and name.endswith("__")):
            return last_key
        key, field = match.group(1), match.group(2).lower()
        if key in self._samples and key != last_key:
            raise ValueError(
                f"{name} belongs to the sample {key!r}, whose other files stand before {last_key!r}. The files of a "
                "sample follow each other (tar --sort=name)"
            )
        fields = self._samples.setdefault(key, {})
        if field in fields:
            raise ValueError(f"it has {name} twice in one sample")
        fields[field] = place
        return key

    def _read(self, number: int) -> Sample:
        key = self._keys[number]
        return {KEY: key} | {field: self._content[place] for field, place in self._samples[key].items()}


def _files(content: Any) -> Iterator[tuple[str, slice]]:
    """Name and place of each regular file."""
    with tarfile.open(fileobj=content, mode="r:") as archive:
        for member in archive:
            if member.issparse():
                raise ValueError(f"{member.name} has holes. Write it without the option for sparse files")
            if member.isreg():
                yield member.name, slice(member.offset_data, member.offset_data + member.size)
        end = archive.offset
    if not content[end : end + tarfile.BLOCKSIZE] or any(content[end : end + tarfile.BLOCKSIZE]):
        raise ValueError(f"there is no header and no end of an archive at byte {end:,} of {len(content):,}: it is cut")
    if rest := content[end:].strip(b"\0"):
        raise ValueError(
            f"{len(rest):,} bytes follow the end of the archive at byte {end:,}. Join archives with tar -A"
        )
