"""Rows of JSON lines, CSV, Parquet and Arrow: the same documents in each, and words for each bad row."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather, parquet

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.documents import Document, Position, read_documents
from shoal_workers.data.errors import BadRowError, DataError, MissingTextError, UndecodableTextError
from shoal_workers.data.prepare import PreparePhase, PrepareProgress, prepare_corpus
from shoal_workers.data.sources import find_sources

ConfigOf = Callable[..., TextDataConfig]
TEXTS = [f"row {number}: " + "naïve, \"quoted\"\n\tand 'long' " * (number % 7) for number in range(400)]


def _jsonl(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()


def _csv(texts: Sequence[str], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerow(["id", "text"])
    writer.writerows(enumerate(texts))
    return file.getvalue().encode()


def _table(texts: Sequence[Any], name: str = "text") -> Any:
    return pyarrow.table({"id": list(range(len(texts))), name: list(texts)})


def _parquet(table: Any) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, row_group_size=100)
    return buffer.getvalue()


def _arrow_stream(table: Any) -> bytes:
    buffer = io.BytesIO()
    with pyarrow.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)
    return buffer.getvalue()


def _arrow_file(table: Any) -> bytes:
    buffer = io.BytesIO()
    feather.write_feather(table, buffer, compression="zstd", chunksize=90)
    return buffer.getvalue()


def _zstd(content: bytes) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(content)
    return bytes(buffer.getvalue().to_pybytes())


FILES: dict[str, Callable[[Sequence[str]], bytes]] = {
    "a.jsonl": _jsonl,
    "a.ndjson.gz": lambda texts: gzip.compress(_jsonl(texts[:300])) + gzip.compress(_jsonl(texts[300:])),
    "a.jsonl.zst": lambda texts: _zstd(_jsonl(texts)),
    "a.csv": _csv,
    "a.csv.gz": lambda texts: gzip.compress(_csv(texts)),
    "a.tsv": lambda texts: _csv(texts, "\t"),
    "a.parquet": lambda texts: _parquet(_table(texts)),
    "a.arrow": lambda texts: _arrow_stream(_table(texts)),
    "a.feather": lambda texts: _arrow_file(_table(texts)),
}


def _read(config: TextDataConfig, start: Position | None = None) -> list[Document]:
    return list(read_documents(find_sources(config), start or Position(), config))


@pytest.mark.parametrize("name", FILES)
def test_each_row_is_a_document_from_any_row_on(name: str, tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / name).write_bytes(FILES[name](TEXTS))
    config = config_of(tmp_path / name)
    documents = _read(config)
    assert [document.text.decode() for document in documents] == TEXTS
    assert all(document.closes for document in documents)
    for number in (0, 99, 250, 399):
        assert _read(config, documents[number].end) == documents[number + 1 :]
    assert documents[-1].end.read_bytes == pytest.approx((tmp_path / name).stat().st_size, rel=0.01)


def test_the_same_rows_are_the_same_tokens_in_every_format(tmp_path: Path, config_of: ConfigOf) -> None:
    hashes = set()
    for name, write in FILES.items():
        (tmp_path / name).write_bytes(write(TEXTS))
        hashes.add(prepare_corpus(config_of(tmp_path / name), lambda _: None, shard_bytes=8192).index.content_hash)
    assert len(hashes) == 1


@settings(max_examples=10, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=12))
def test_any_text_comes_back(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("any")
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        (directory / name).write_bytes(FILES[name](texts))
        found = _read(TextDataConfig(paths=(str(directory / name),)))
        assert [document.text.decode() for document in found] == texts


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_text_has_the_documents_of_the_text(suffix: str, tmp_path: Path, config_of: ConfigOf) -> None:
    content = "".join(f"line {n} of a large file\n" for n in range(40_000)).encode()
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / f"b.txt{suffix}").write_bytes(gzip.compress(content) if suffix == ".gz" else _zstd(content))
    plain, packed = _read(config_of(tmp_path / "a.txt")), _read(config_of(tmp_path / f"b.txt{suffix}"))
    assert len(plain) > 3
    assert [d.text for d in packed] == [d.text for d in plain]
    assert _read(config_of(tmp_path / f"b.txt{suffix}"), packed[1].end) == packed[2:]
    assert packed[-1].end.read_bytes == (tmp_path / f"b.txt{suffix}").stat().st_size


@pytest.mark.parametrize(
    ("field", "row"),
    [
        ("message.content", {"message": {"content": "hello", "role": "user"}}),
        ("turns.1.text", {"turns": [{"text": "no"}, {"text": "hello"}]}),
        ("a.b", {"a.b": "hello"}),
    ],
)
def test_a_field_may_be_a_path(field: str, row: dict[str, Any], tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    table = pyarrow.Table.from_pylist([row])
    (tmp_path / "b.parquet").write_bytes(_parquet(table))
    (tmp_path / "c.arrow").write_bytes(_arrow_stream(table))
    documents = _read(config_of(tmp_path / "*.*", field=field))
    assert [document.text for document in documents] == [b"hello"] * 3


BAD_ROWS: dict[str, tuple[str, bytes, str]] = {
    "not JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: is not JSON .*data\.format"),
    "not an object": ("a.jsonl", b'["x"]\n', r"line 1: is a list, not an object"),
    "no field": (
        "a.jsonl",
        b'\n{"body": "x", "id": 1}\n',
        r"line 2: field 'text' is missing: .* body, id\. Set data\.field",
    ),
    "a number": ("a.jsonl", b'{"text": 3}\n', r"line 1: field 'text' is a number, not text"),
    "null": ("a.parquet", _parquet(_table(["x", None])), r"a\.parquet, row 2: field 'text' is null, not text"),
    "null in Arrow": ("a.arrow", _arrow_stream(_table(["x", None])), r"a\.arrow, row 2: field 'text' is null"),
    "columns": ("a.csv", b"id,text\n1,x\n2,y,z\n", r"a\.csv, row 2: \(line 3\) has 3 columns, not 2"),
    "quotes": ("a.csv", b'id,text\n1,x\n2,"y"z\n', r"a\.csv, row 2: is not CSV near line 3"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_and_may_be_left_out(case: str, tmp_path: Path, config_of: ConfigOf) -> None:
    name, content, expected = BAD_ROWS[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadRowError, match=expected) as caught:
        _read(config_of(tmp_path / name))
    assert 'data.bad_rows: "skip"' in str(caught.value)
    left = _read(config_of(tmp_path / name, bad_rows="skip"))
    assert [document.text for document in left] == [b"x"] * (
        (b"x" in content and name != "a.jsonl") or case == "not JSON"
    )


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.parquet", _parquet(_table(["x"], "body")), r"has no column 'text'; it has id, body\. Set data\.field"),
        ("a.parquet", _parquet(_table([1, 2])), r"field 'text' is int64, not text; the columns are id \(int64\), text"),
        ("a.arrow", _arrow_stream(_table([[1]])), r"field 'text' is list<.*int64>, not text"),
        ("a.csv", b"id,body\n1,x\n", r"has no column 'text'; it has id, body"),
    ],
)
def test_a_column_without_text_is_refused_also_where_bad_rows_are_left_out(
    name: str, content: bytes, expected: str, tmp_path: Path, config_of: ConfigOf
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadRowError, match=expected):
        _read(config_of(tmp_path / name, bad_rows="skip"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.parquet", _parquet(_table(TEXTS))[:-50]),
        ("a.parquet", b"no parquet"),
        ("a.arrow", b"no arrow file at all"),
        ("a.feather", _arrow_file(_table(TEXTS))[:-50]),
        ("a.txt.gz", gzip.compress(b"text" * 1000)[:-10]),
        ("a.jsonl.zst", _zstd(_jsonl(TEXTS))[:-10]),
        ("a.txt.gz", b"not compressed"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: bytes, tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MissingTextError, match=rf"{name} cannot be read"):
        _read(config_of(tmp_path / name))


def test_bad_rows_are_counted_once_over_a_kill(tmp_path: Path, config_of: ConfigOf) -> None:
    lines = [json.dumps({"text": text * 3} if n % 5 else {"body": text}) for n, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = config_of(tmp_path / "a.jsonl", bad_rows="skip")
    reported: list[PrepareProgress] = []
    corpus = prepare_corpus(config, reported.append, shard_bytes=8192)
    assert corpus.index.bad_rows == 80
    assert reported[-1].phase is PreparePhase.READY
    assert reported[-1].describe() == "text ready, 80 bad rows left out"
    whole = [corpus.shard_path(number).read_bytes() for number in range(len(corpus.index.shards))]
    for number in range(3, len(whole)):  # as if it had been killed there
        corpus.shard_path(number).with_suffix(".json").unlink()
    (corpus.directory / "index.json").unlink()
    again = prepare_corpus(config, reported.append, shard_bytes=8192)
    assert again == corpus
    assert [again.shard_path(number).read_bytes() for number in range(len(whole))] == whole


def test_rows_that_are_not_utf8_are_replaced_or_refused_with_their_row(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": "caf\xe9"}\n{"text": "\\ud800"}\n')
    good, latin, half = _read(config_of(tmp_path / "a.jsonl"))
    assert (good.text, latin.text.decode()[:4]) == (b"good", "caf�")
    assert half.text.decode().strip("�") == ""
    with pytest.raises(UndecodableTextError, match=r"is not UTF-8: .* at row 2"):
        _read(config_of(tmp_path / "a.jsonl", encoding_errors="strict"))


def test_a_format_that_is_set_is_that_of_all_files(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "a.jsonl").write_bytes(_jsonl(["x"]))
    [document] = _read(config_of(tmp_path / "a.jsonl", format="text"))
    assert document.text == _jsonl(["x"])
    (tmp_path / "b.log").write_bytes(_jsonl(["x"]))
    assert [d.text for d in _read(config_of(tmp_path / "b.log", format="jsonl"))] == [b"x"]


def test_a_link_has_the_format_of_its_own_name(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "blob").write_bytes(gzip.compress(_jsonl(["x"])))
    (tmp_path / "a.jsonl.gz").symlink_to(tmp_path / "blob")
    assert [d.text for d in _read(config_of(tmp_path / "a.jsonl.gz"))] == [b"x"]


def test_another_field_is_another_corpus_and_plain_text_keeps_its_own(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "body": "y"}\n')
    (tmp_path / "b.txt").write_text("plain")
    directories = {
        prepare_corpus(config_of(tmp_path / "a.jsonl", field=f), lambda _: None).directory for f in ("text", "body")
    }
    assert len(directories) == 2
    directories = {
        prepare_corpus(config_of(tmp_path / "b.txt", field=f), lambda _: None).directory for f in ("text", "body")
    }
    assert len(directories) == 1


def test_rows_without_any_text_are_refused_as_an_empty_corpus(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="contain no text"):
        prepare_corpus(config_of(tmp_path / "a.jsonl"), lambda _: None)
