"""Shards as the libraries have written them (`kit.shards`), and words for those that are damaged."""

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather, parquet

from kit.shards import samples
from shoal_workers.data.errors import DamagedShardError, DataError, MissingTextError
from shoal_workers.data.shard_formats import IndexedShard, ShardFormat, find_shard_format, open_shard, read_index

ROWS = [{"id": n, "text": f"row {n}", "raw": bytes([n % 256]) * (n % 5), "deep": {"x": [n, n]}} for n in range(1000)]


def _same(one: Any, other: Any) -> bool:
    """Also the types, the dtypes and the order of the fields."""
    if isinstance(other, np.ndarray | torch.Tensor):
        is_alike = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return is_alike and bool((one == other).all())
    if isinstance(other, dict):
        return isinstance(one, dict) and list(one) == list(other) and all(_same(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _read(folder: str) -> list[dict[str, Any]]:
    """All samples of a folder, in the order of its index, which knows how many each shard has."""
    path = samples.FILES / folder
    found: list[dict[str, Any]] = []
    for indexed in read_index("index.json", (path / "index.json").read_bytes()):
        shard = open_shard(path / indexed.name)
        assert len(shard) == indexed.num_samples
        if "litdata-chunk" not in folder:
            assert (path / indexed.name).stat().st_size == indexed.num_bytes
        found += shard
    return found


@pytest.mark.parametrize("compression", samples.MDS_COMPRESSIONS)
def test_mds_shards_have_the_values_that_were_written(compression: str) -> None:
    by_name = [{name: one[name] for name in sorted(one)} for one in samples.mds()]
    assert _same(_read(f"mds-{compression}"), by_name)


@pytest.mark.parametrize("level", ["plain", *samples.LITDATA_LEVELS])
def test_chunks_of_litdata_have_the_values_that_were_written(level: str) -> None:
    assert _same(_read(f"litdata-{level}"), samples.trees())


def test_nested_values_of_litdata_are_lists_and_dictionaries() -> None:
    assert _same(_read("litdata-nested"), samples.nested())


def test_rows_that_litdata_keeps_as_arrow_are_read() -> None:
    assert _same(_read("litdata-texts"), samples.texts())


def test_an_item_of_tokens_is_one_sample() -> None:
    assert _same(_read("litdata-tokens"), [{"tokens": one} for one in samples.tokens()])


def test_a_sample_that_is_no_dictionary_has_one_field() -> None:
    assert _read("litdata-pairs") == [{"sample": (one["number"], one["text"])} for one in samples.trees()]


def test_a_chunk_of_litdata_takes_its_index_from_the_caller(tmp_path: Path) -> None:
    source = samples.FILES / "litdata-plain"
    alone = Path(shutil.copy(source / "chunk-0-0.bin", tmp_path))
    with pytest.raises(DamagedShardError, match=r"no index\.json beside it"):
        open_shard(alone)
    shard = open_shard(alone, index=(source / "index.json").read_bytes())
    assert _same(shard[3], samples.trees()[3])


def _tar(path: Path, files: Sequence[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT, mode: str = "w") -> Path:
    with tarfile.open(path, mode, format=format) as tar:  # type: ignore[call-overload]
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


FILES = [
    ("a/0001.jpg", b"picture"),
    ("a/0001.Seg.PNG", b"mask"),
    ("a/0001.cls", b"3"),
    ("a/0002.jpg", b""),
    ("a/0002.cls", b"4"),
    ("b/0002.cls", b"5"),
]
SAMPLES = [
    {"__key__": "a/0001", "jpg": b"picture", "seg.png": b"mask", "cls": b"3"},
    {"__key__": "a/0002", "jpg": b"", "cls": b"4"},
    {"__key__": "b/0002", "cls": b"5"},
]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_of_one_name_up_to_the_first_dot_are_a_sample(tmp_path: Path, format: int) -> None:
    assert list(open_shard(_tar(tmp_path / "x.tar", FILES, format))) == SAMPLES


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar.bz2"])
def test_a_compressed_tar_file_has_the_same_samples(tmp_path: Path, name: str) -> None:
    path = _tar(tmp_path / name, FILES, mode="w:bz2" if name.endswith("bz2") else "w:gz")
    assert list(open_shard(path)) == SAMPLES


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_any_length_and_letter_are_read(tmp_path: Path, format: int) -> None:
    keys = ["d" * 90 + f"/{'ü' * length}" for length in (1, 50, 200)]
    shard = open_shard(_tar(tmp_path / "x.tar", [(f"{key}.txt", key.encode()) for key in keys], format))
    assert list(shard) == [{"__key__": key, "txt": key.encode()} for key in keys]


def test_what_is_no_file_of_a_sample_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (("a", tarfile.DIRTYPE), ("a/0.txt", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
    _tar(path, [(".hidden", b""), ("a/.x.txt", b""), ("README", b""), ("__meta__", b""), *FILES], mode="a")
    assert list(open_shard(path)) == SAMPLES


def test_a_field_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedShardError, match=r"a/0001\.jpg twice in one sample"):
        open_shard(_tar(tmp_path / "x.tar", [FILES[0], FILES[0]]))


def test_a_tar_file_is_read_whole_or_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    files = [(f"{n:04}.{field}", b"1" * size) for n in range(10) for field, size in (("cls", 1), ("txt", 200))]
    path = _tar(tmp_path / "x.tar", files)
    content, whole = path.read_bytes(), list(open_shard(path))
    assert len(whole) == 10
    wrong = []
    for cut in (*range(0, len(content), 256), *range(1000, len(content), 1000)):
        path.write_bytes(content[:cut])
        try:
            if list(open_shard(path)) != whole:
                wrong.append(cut)
        except DamagedShardError as error:
            assert str(path) in str(error)
    assert wrong == []


def test_a_tar_file_with_another_one_behind_it_and_one_with_a_damaged_header_are_refused(tmp_path: Path) -> None:
    path = _tar(tmp_path / "x.tar", FILES)
    content = path.read_bytes()
    path.write_bytes(content + content)
    with pytest.raises(DamagedShardError, match=r"bytes follow the end of the archive .* tar -A"):
        open_shard(path)
    for start in (1024, 2048):
        path.write_bytes(content[:start] + b"x" * 512 + content[start + 512 :])
        with pytest.raises(DamagedShardError, match=r"no header and no end of an archive at byte [\d,]+"):
            open_shard(path)


def test_files_of_a_sample_that_come_back_later_are_refused(tmp_path: Path) -> None:
    files = [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"3"), ("b.cls", b"4")]
    with pytest.raises(DamagedShardError, match=r"a\.cls belongs to the sample 'a', .* before 'b'.*--sort=name"):
        open_shard(_tar(tmp_path / "x.tar", files))


def test_a_stream_of_arrow_without_its_end_is_refused(tmp_path: Path) -> None:
    path = _write_rows(tmp_path / "x.arrow")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DamagedShardError, match="the stream has no end"):
        open_shard(path)


def _write_rows(path: Path) -> Path:
    table = pyarrow.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=300)
    elif path.suffix == ".feather":
        feather.write_feather(table, str(path), compression="lz4", chunksize=170)
    elif path.suffix == ".arrow":
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=170)
    else:
        rows = [{name: value.hex() if name == "raw" else value for name, value in row.items()} for row in ROWS]
        text = "\n".join(json.dumps(row) + (" \n" if row["id"] == 7 else "") for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else b"\xef\xbb\xbf" + text)
    return path


@pytest.mark.parametrize("name", ["x.parquet", "x.feather", "x.arrow", "x.jsonl", "x.jsonl.gz"])
def test_rows_are_samples_in_any_order(tmp_path: Path, name: str) -> None:
    shard = open_shard(_write_rows(tmp_path / name))
    order = np.random.default_rng(1).permutation(len(ROWS)).tolist()
    wanted = [{**ROWS[n], "raw": ROWS[n]["raw"].hex()} if "jsonl" in name else ROWS[n] for n in order]  # type: ignore[attr-defined]

    assert len(shard) == len(ROWS)
    assert [shard[n] for n in order] == wanted
    assert shard[-1] == shard[999]
    assert shard[998:] == [shard[998], shard[999]]
    with pytest.raises(IndexError, match="sample 1000 of 1000"):
        shard[1000]


def test_row_groups_that_are_read_once_are_kept_up_to_a_bound(tmp_path: Path) -> None:
    """All row groups of a shard of 1 GB are not in memory at once."""
    path = tmp_path / "x.parquet"
    column = pyarrow.array([bytes(1 << 20)] * 160)
    parquet.write_table(
        pyarrow.table({"raw": column}), path, row_group_size=16, compression="none", use_dictionary=False
    )
    before = pyarrow.total_allocated_bytes()
    shard = open_shard(path)
    for number in range(0, 160, 16):
        assert len(shard[number]["raw"]) == 1 << 20
    assert pyarrow.total_allocated_bytes() - before <= 100 << 20


def test_a_sample_shares_no_memory_with_its_shard() -> None:
    shard = open_shard(samples.FILES / "mds-plain" / "shard.00000.mds")
    first = shard[0]["array"]
    first[:] = 9  # raises if the array can only be read
    assert not (shard[0]["array"] == first).all()


def test_a_compressed_shard_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shard = open_shard(samples.FILES / "mds-zstd" / "shard.00000.mds.zstd")
    assert shard[0]["number"] == -2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a/x-000.tar", ShardFormat.WEBDATASET),
        ("x.TAR.gz", ShardFormat.WEBDATASET),
        ("shard.00000.mds.zstd", ShardFormat.MDS),
        ("chunk-0-0.zstd.bin", ShardFormat.LITDATA),
        ("x.jsonl.zst", ShardFormat.JSONL),
        ("data-00000-of-00002.arrow", ShardFormat.ARROW),
        ("x.parquet", ShardFormat.PARQUET),
        ("x.txt", None),
        ("tar", None),
    ],
)
def test_the_name_says_the_format(name: str, format: ShardFormat | None) -> None:
    assert find_shard_format(name) is format


def test_a_name_without_a_format_needs_one(tmp_path: Path) -> None:
    path = _tar(tmp_path / "shard", FILES)
    with pytest.raises(MissingTextError, match="Give its format: webdataset, mds, litdata"):
        open_shard(path)
    assert list(open_shard(path, ShardFormat.WEBDATASET)) == SAMPLES


def test_an_index_of_webdataset_is_read() -> None:
    content = json.dumps({"shardlist": [{"url": "x-0.tar", "nsamples": 3, "filesize": 10240}], "wids_version": 1})
    assert read_index("index.json", content.encode()) == (IndexedShard("x-0.tar", 10240, 3),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "JSONDecodeError"),
        (b"[]", "AttributeError|TypeError"),
        (b"{}", "shardlist"),
        (b'{"shards": [{"version": 1, "format": "mds"}]}', "of version 1, and version 2"),
        (b'{"shards": [{"version": 2, "format": "csv"}]}', "'csv'"),
        (b'{"chunks": [{}]}', "filename"),
    ],
)
def test_an_index_of_another_kind_ends_in_words(content: bytes, words: str) -> None:
    with pytest.raises(DamagedShardError, match=rf"(?s)data/index\.json is no index of MDS.*({words})"):
        read_index("data/index.json", content)


class _RunsCode:
    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_a_pickled_column_is_refused_and_never_loaded(tmp_path: Path) -> None:
    columns = {
        "version": 2,
        "format": "mds",
        "column_names": ["x"],
        "column_encodings": ["pkl"],
        "column_sizes": [None],
    }
    head, body = json.dumps(columns).encode(), pickle.dumps(_RunsCode())
    start = 12 + len(head)
    end = start + 4 + len(body)
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(struct.pack("<III", 1, start, end) + head + struct.pack("<I", len(body)) + body)
    with pytest.raises(DamagedShardError, match=r"column 'x' is pickled .* Write it as json, ndarray or bytes"):
        open_shard(path)


def test_a_pickled_leaf_is_refused_and_never_loaded(tmp_path: Path) -> None:
    source = samples.FILES / "litdata-plain"
    index = json.loads((source / "index.json").read_text())
    index["config"]["data_format"][0] = "pickle"
    with pytest.raises(DamagedShardError, match=r"pickled objects .* Write numbers, text"):
        open_shard(source / "chunk-0-0.bin", index=json.dumps(index).encode())


def test_a_file_that_does_not_exist_says_so(tmp_path: Path) -> None:
    for name in ("x.tar", "x.parquet", "shard.00000.mds.zstd", "x.arrow"):
        with pytest.raises(MissingTextError, match=f"{name} does not exist"):
            open_shard(tmp_path / name)


WHOLE = [
    samples.FILES / "mds-plain" / "shard.00000.mds",
    samples.FILES / "mds-zstd" / "shard.00000.mds.zstd",
    samples.FILES / "litdata-plain" / "chunk-0-0.bin",
    samples.FILES / "litdata-batch" / "chunk-0-0.bin",
    samples.FILES / "litdata-sample" / "chunk-0-0.bin",
    samples.FILES / "litdata-texts" / "chunk-0-0.bin",
    samples.FILES / "litdata-nested" / "chunk-0-0.bin",
]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("whole")
    names = ("x.parquet", "x.feather", "x.arrow", "x.jsonl", "x.jsonl.gz")
    return [*WHOLE, _tar(folder / "x.tar", FILES), *(_write_rows(folder / name) for name in names)]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_ends_in_a_sentence_that_names_the_file(others: list[Path], data: st.DataObject) -> None:
    """Bytes that are missing at the end, or that are others: an error of data, or samples, never another exception."""
    source = data.draw(st.sampled_from(others))
    whole = bytearray(source.read_bytes())
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        for at in data.draw(st.lists(st.integers(0, min(len(whole), 600) - 1), min_size=1, max_size=4)):
            whole[at] = data.draw(st.integers(0, 255))
    path = source.with_name(f"damaged-{source.name}") if source not in WHOLE else others[-1].with_name(source.name)
    path.write_bytes(whole)
    index = source.with_name("index.json").read_bytes() if source.suffix == ".bin" else None
    try:
        shard = open_shard(path, index=index)
        for number in range(0, len(shard), 97):
            assert isinstance(shard[number], dict)
    except DataError as error:
        assert str(path) in str(error)
        assert "Write the shard again" in str(error)
