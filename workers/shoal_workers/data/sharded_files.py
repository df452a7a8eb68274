"""A map-style data set of shards on local disk, for a task's `build_dataset` or for `run.batches`.

    ShardedFiles("/data/train/*.tar", decode=decode)          files, patterns and folders
    ShardedFiles("/data/mds", decode="my_code:decode")        a folder with an index.json: its shards, in its order
    ShardedFiles("/data/saved")                               what datasets.save_to_disk wrote; no library is needed

Sample i is a dictionary (`shard_formats`), or what the user's `decode` makes of it: images, audio and tensors are
decoded in the process that reads, so in those of `batch.num_workers`. Hidden here: which files an entry means, in an
order that is the same on every node; which shard has sample i; that only so many shards are open; and a hash of the
content without reading all of it. It never changes a file. Called by tasks and loops of users.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import os
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from shoal_workers.data.concatenation import locate
from shoal_workers.data.errors import DataError, MissingTextError
from shoal_workers.data.shard_formats import ShardFormat, find_shard_format, open_shard, read_index
from shoal_workers.recently_used import RecentlyUsed

INDEX = "index.json"
_SAVED_STATE = "state.json"
_SAVED_SPLITS = "dataset_dict.json"
_WHOLE_BYTES = 1 << 20
_NUM_PIECES = 8
_PIECE_BYTES = 16 << 10
Decode = Callable[[dict[str, Any]], Any]


class ShardedFiles(Dataset[Any]):
    """Sample i of all shards, one after the other."""

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        decode: Decode | str | None = None,
        format: ShardFormat | str | None = None,
        most_open: int = 256,
    ) -> None:
        """Lists the shards. Those that no index counts are opened once, to count their samples.

        Args:
            paths: files, patterns and folders; of a folder without an index all files whose names say a format.
            decode: makes a sample of a dictionary of fields; or `module:function`. None: the dictionary is the sample.
            format: of all files; None: what their names say.
            most_open: shards that are open at a time; an open one has a file descriptor and its table of contents.

        Raises:
            MissingTextError: an entry means no file.
            DamagedShardError: a shard or an index is not what it should be.
            DataError: `decode` cannot be imported.
        """
        entries = [paths] if isinstance(paths, str | Path) else list(paths)
        format_of_all = ShardFormat(format) if format is not None else None
        self._shards = [shard for entry in entries for shard in _find_shards(entry, format_of_all)]
        self._decode = _import_function(decode) if isinstance(decode, str) else decode
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._open: RecentlyUsed[int, Sequence[dict[str, Any]]] = RecentlyUsed(min(most_open, num_files // 4))
        self._ends = list(accumulate(self._count(number) for number in range(len(self._shards))))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        """Raises DamagedShardError, or what `decode` raises, with a note that names the sample's file."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number, within = locate(self._ends, index)
        sample = self._open_shard(number)[within]
        if (columns := self._shards[number].columns) is not None:
            sample = {name: sample[name] for name in columns if name in sample}
        if self._decode is None:
            return sample
        try:
            return self._decode(sample)
        except Exception as error:
            error.add_note(f"Raised by decode for sample {within:,} of {self._shards[number].path}.")
            raise

    @cached_property
    def content_hash(self) -> str:
        """A hash of all shards in their order, wherever they are. See `content_parts`."""
        text = json.dumps([self._ends, list(self.content_parts().values())])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def content_parts(self) -> dict[str, str]:
        """A hash of each shard: of all its bytes up to 1 MiB; of a larger one of its length and of eight pieces of 16
        KiB, the first and the last among them. So it costs 128 KiB a shard, and changes within other bytes that leave
        the length are not seen."""
        with ThreadPoolExecutor(max_workers=8, thread_name_prefix="shoal-hash") as pool:
            paths = [shard.path for shard in self._shards]
            return dict(zip(map(str, paths), pool.map(_hash, paths), strict=True))

    def _count(self, number: int) -> int:
        known = self._shards[number].num_samples
        return len(self._open_shard(number)) if known is None else known

    def _open_shard(self, number: int) -> Sequence[dict[str, Any]]:
        if (opened := self._open.get(number)) is not None:
            return opened
        listed = self._shards[number]
        shard = open_shard(listed.path, listed.format)
        if listed.num_samples is not None and len(shard) != listed.num_samples:
            raise DataError(
                f"{listed.path} has {len(shard):,} samples, and {listed.path.with_name(INDEX)} names "
                f"{listed.num_samples:,}. They are not of the same data set: write both again."
            )
        self._open.put(number, shard)
        return shard


@dataclass(frozen=True, slots=True)
class _ListedShard:
    path: Path
    format: ShardFormat | None
    num_samples: int | None = None
    """None if no index says it."""
    columns: tuple[str, ...] | None = None
    """None means all."""


def _find_shards(entry: str | Path, format: ShardFormat | None) -> list[_ListedShard]:
    text = os.path.expanduser(entry)  # noqa: PTH111 - a pattern is no path
    path = Path(text)
    if path.is_dir():
        return _shards_in_folder(path, format)
    if path.name == INDEX and path.is_file():
        return _shards_in_index(path, format)
    if path.is_file():
        return [_ListedShard(path, format)]
    paths = sorted(Path(name) for name in glob.iglob(text, recursive=True) if Path(name).is_file())  # noqa: PTH207 - absolute patterns
    if not paths:
        raise MissingTextError(
            f"{entry} means no file. Check the path or the pattern, on every node that runs a worker."
        )
    return [_ListedShard(shard, format) for shard in paths]


def _shards_in_folder(folder: Path, format: ShardFormat | None) -> list[_ListedShard]:
    if (folder / INDEX).is_file():
        return _shards_in_index(folder / INDEX, format)
    if (folder / _SAVED_SPLITS).is_file():
        splits = json.loads((folder / _SAVED_SPLITS).read_bytes())["splits"]
        raise MissingTextError(f"{folder} has the splits {', '.join(splits)}. Name one of them: {folder / splits[0]}.")
    if (folder / _SAVED_STATE).is_file():
        return _saved_shards(folder)
    named = sorted(path for path in folder.rglob("*") if path.is_file() and _is_shard(path))
    if not named:
        raise MissingTextError(
            f"{folder} has no file whose name says a format of shards, and no {INDEX}. Name the files, and give format."
        )
    return [_ListedShard(path, format) for path in named]


def _is_shard(path: Path) -> bool:
    return find_shard_format(path.name) is not None and not path.name.startswith((".", "_"))


def _shards_in_index(index: Path, format: ShardFormat | None) -> list[_ListedShard]:
    shards = read_index(str(index), index.read_bytes())
    return [_ListedShard(index.parent / shard.name, format, shard.num_samples) for shard in shards]


def _saved_shards(folder: Path) -> list[_ListedShard]:
    """A folder of `datasets.save_to_disk`: Arrow streams, in the order that its state has, with the columns that it
    shows."""
    state = json.loads((folder / _SAVED_STATE).read_bytes())
    if state.get("_indices_data_files"):
        raise MissingTextError(
            f"{folder} has its rows in another order than its files. Save it again: "
            "dataset.flatten_indices().save_to_disk(...)."
        )
    listed = state.get("_format_columns") if not state.get("_output_all_columns") else None
    columns = tuple(listed) if listed is not None else None
    return [
        _ListedShard(folder / file_state["filename"], ShardFormat.ARROW, columns=columns)
        for file_state in state.get("_data_files", ())
    ]


def _import_function(name: str) -> Decode:
    module, _, function = name.partition(":")
    try:
        function_object = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(
            f"decode {name!r} cannot be imported: {error}. Write module:function, of a module that the job's code has."
        ) from error
    if not callable(function_object):
        raise DataError(f"decode {name!r} is no function, but {function_object!r}.")
    return function_object  # type: ignore[no-any-return]


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        digest.update(num_bytes.to_bytes(8, "big"))
        if num_bytes <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for piece in range(_NUM_PIECES):
                file.seek((num_bytes - _PIECE_BYTES) * piece // (_NUM_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
