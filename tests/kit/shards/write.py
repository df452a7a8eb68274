"""Writes `files/` anew with the libraries themselves, in an environment that has them:

pip install mosaicml-streaming==0.13.0 litdata==0.2.76 datasets==5.2.0
PYTHONPATH=tests python -m kit.shards.write
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from typing import Any

from kit.shards import samples


def main() -> None:
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.serializers import JsonLeaf

    shutil.rmtree(samples.FILES, ignore_errors=True)
    for name, compression in samples.MDS_COMPRESSIONS.items():
        _mds(f"mds-{name}", compression)
    _litdata("litdata-plain", samples.trees())
    for level in samples.LITDATA_LEVELS:
        _litdata(f"litdata-{level}", samples.trees(), compression="zstd", compression_level=level)
    _litdata("litdata-texts", samples.texts())
    _litdata("litdata-tokens", samples.tokens(), item_loader=TokensLoader(block_size=4))
    leaf: Callable[[Any], Any] = lambda value: JsonLeaf(value) if isinstance(value, list | dict) else value  # noqa: E731
    _litdata("litdata-nested", ({name: leaf(value) for name, value in one.items()} for one in samples.nested()))
    _saved()
    _litdata("litdata-pairs", [(one["number"], one["text"]) for one in samples.trees()])


def _mds(name: str, compression: str | None) -> None:
    from streaming.base import MDSWriter

    out, columns = str(samples.FILES / name), samples.MDS_COLUMNS
    with MDSWriter(out=out, columns=columns, compression=compression, size_limit=1500, hashes=["sha1"]) as writer:
        for sample in samples.mds():
            writer.write(sample)


def _litdata(name: str, values: Iterable[Any], **settings: Any) -> None:
    from litdata.streaming import Cache

    cache = Cache(str(samples.FILES / name), chunk_size=4, **settings)
    for number, value in enumerate(values):
        cache[number] = value
    cache.done()
    cache.merge()


def _saved() -> None:
    """As after a shuffle and a choice of rows, in two files."""
    from datasets import Array2D, ClassLabel, Dataset, Features, List, Value

    kinds = {"text": Value("string"), "label": ClassLabel(names=["a", "b"]), "raw": Value("binary")}
    features = Features({**kinds, "tokens": List(Value("int32")), "grid": Array2D((2, 3), "float32")})
    rows = Dataset.from_list(samples.saved()[::-1], features=features)
    rows.select(range(len(rows))[::-1]).save_to_disk(str(samples.FILES / "saved"), num_shards=2)


if __name__ == "__main__":
    main()
