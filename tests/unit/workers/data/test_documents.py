"""Which files are read, the documents of them from any position on, and their division between nodes."""

import gzip
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.documents import PIECE_BYTES, Document, Position, read_documents
from shoal_workers.data.errors import BadRowError, MissingTextError, TextChangedError, UndecodableTextError
from shoal_workers.data.portions import Portions, divided
from shoal_workers.data.sources import SourceFile, find_sources, make_local_source
from shoal_workers.data.tokenizer import ByteTokenizer, DocumentEncoder, EncodedDocument

ConfigOf = Callable[..., TextDataConfig]
TEXT = TextDataConfig(paths=("text",))
STRICT = TextDataConfig(paths=("text",), encoding_errors="strict")


def _read(path: Path, start: Position | None = None) -> list[Document]:
    return list(read_documents([make_local_source(path)], start or Position(), TEXT))


def test_a_small_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("héllo\n")
    [document] = _read(path)
    assert document.text.decode() == "héllo\n"
    assert document.closes
    assert document.end == Position(file=1, offset=0, text_bytes=7, read_bytes=7)


def test_reading_from_any_position_gives_the_same_rest(text_dir: Path, config_of: ConfigOf) -> None:
    sources = find_sources(config_of(text_dir))
    every = list(read_documents(sources, Position(), TEXT))
    assert len(every) == 40
    for number, document in enumerate(every):
        assert list(read_documents(sources, document.end, TEXT)) == every[number + 1 :]


def test_a_large_file_is_cut_at_line_ends_and_ends_once(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_text("".join(f"line {n} of a large file\n" for n in range(40_000)))
    documents = _read(path)
    assert len(documents) > 3
    assert b"".join(d.text for d in documents) == path.read_bytes()
    assert all(len(d.text) <= PIECE_BYTES and d.text.endswith(b"\n") for d in documents)
    assert [d.closes for d in documents] == [False] * (len(documents) - 1) + [True]
    assert _read(path, documents[1].end) == documents[2:]


@given(shift=st.integers(0, 5), letter=st.sampled_from(["é", "€", "𝄞", "x"]))
def test_a_line_without_end_is_never_cut_inside_a_character(
    shift: int, letter: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "line.txt"
    text = "a" * shift + letter * (PIECE_BYTES // len(letter.encode()) + 100)
    path.write_text(text)
    documents = list(read_documents([make_local_source(path)], Position(), STRICT))
    assert len(documents) >= 2
    assert "".join(d.text.decode() for d in documents) == text


def test_max_bytes_takes_only_complete_documents(text_dir: Path, config_of: ConfigOf) -> None:
    sources = find_sources(config_of(text_dir))
    limit = sources[0].num_bytes + sources[1].num_bytes
    assert len(list(read_documents(sources, Position(), config_of(text_dir, max_bytes=limit)))) == 2
    assert len(list(read_documents(sources, Position(), config_of(text_dir, max_bytes=limit - 1)))) == 1


def test_text_that_is_not_utf8_is_replaced_or_refused_with_its_position(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9 au lait")
    [document] = _read(path)
    assert document.text.decode() == "caf� au lait"
    with pytest.raises(UndecodableTextError, match=r"0xe9 at offset 3 .*data\.encoding_errors"):
        list(read_documents([make_local_source(path)], Position(), STRICT))


def test_binary_files_are_skipped_in_directories_but_read_when_named(tmp_path: Path) -> None:
    path = tmp_path / "image.txt"
    path.write_bytes(b"\x89PNG\0\0data")
    assert list(read_documents([make_local_source(path, may_be_binary=True)], Position(), TEXT)) == []
    assert len(_read(path)) == 1


@pytest.mark.parametrize("now", [b"short", b"much longer than it was before", b""])
def test_a_file_that_changed_since_it_was_listed_is_refused(tmp_path: Path, now: bytes) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"ten bytes.")
    listed = make_local_source(path)
    path.write_bytes(now)
    with pytest.raises(TextChangedError, match="changed while it was read"):
        list(read_documents([listed], Position(), TEXT))


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone.txt"
    path.write_text("x")
    listed = make_local_source(path)
    path.unlink()
    with pytest.raises(MissingTextError, match=r"gone\.txt cannot be read"):
        list(read_documents([listed], Position(), TEXT))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    [document] = _read(path)
    assert document.text == b"one\n\xef\xbb\xbftwo\n"
    path.write_bytes(b"\xef\xbb\xbf" + b"a line\n" * PIECE_BYTES)
    documents = _read(path)
    assert b"".join(document.text for document in documents) == b"a line\n" * PIECE_BYTES
    assert _read(path, documents[0].end) == documents[1:]


def test_directories_globs_and_files_are_read_once_each_in_order(tmp_path: Path, config_of: ConfigOf) -> None:
    for name in ("b/two.txt", "b/one.txt", "a/three.md", "b/.hidden", "b/__pycache__/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    config = config_of(tmp_path / "b" / "two.txt", tmp_path / "*" / "*.*", tmp_path / "a")
    names = [str(Path(source.location).relative_to(tmp_path)) for source in find_sources(config)]
    assert names == ["b/two.txt", "a/three.md", "b/one.txt"]


def test_a_recursive_glob_reaches_deep_files(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "deep.txt").write_text("deep")
    assert [s.name for s in find_sources(config_of(tmp_path / "**" / "*.txt"))] == ["deep.txt"]


def test_the_standard_library_is_python_text_without_packages_and_tests() -> None:
    sources = find_sources(TextDataConfig(corpus="python-stdlib"))
    names = {source.name for source in sources}
    parts = {part for source in sources for part in Path(source.location).parts}
    assert {"argparse.py", "dataclasses.py", "base_events.py"} <= names
    assert not {"site-packages", "test", "tests", "__pycache__"} & parts
    assert sum(source.num_bytes for source in sources) > 5_000_000
    assert sources == find_sources(TextDataConfig(corpus="python-stdlib"))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("no/such/*.txt", "matches no file"),
        ("no-such-file.txt", "matches no file"),
        ("memory://nothing/here.txt", "names no file"),
        ("memory://nothing/*.txt", "names no file"),
        ("nosuchstore://bucket/key.txt", "nosuchstore"),
        ("simplecache::s3://bucket/key.txt", "chain of stores"),
        ("a" * 5000, "data.paths"),
        ("null\0byte", "data.paths"),
    ],
)
def test_a_missing_path_is_named_with_its_setting(entry: str, expected: str, config_of: ConfigOf) -> None:
    with pytest.raises(MissingTextError, match=r"data\.paths|://") as caught:
        find_sources(config_of(entry))
    assert expected in str(caught.value)
    assert repr(entry)[:40] in str(caught.value)


def test_an_empty_directory_is_named(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingTextError, match="exists but contains no file"):
        find_sources(config_of(tmp_path / "empty"))


PORTION_BYTES = 700_000
ENCODER = DocumentEncoder(ByteTokenizer(), 0.3)


@pytest.fixture
def config(tmp_path: Path, config_of: ConfigOf) -> TextDataConfig:
    """Small files, a text of several portions, rows without text at the begin, within and at the end of files, an empty
    file, and a compressed one."""
    texts = tmp_path / "texts"
    texts.mkdir()
    draw = random.Random(7)
    for number in range(9):
        (texts / f"a{number}.txt").write_text(f"small {number}\n" * draw.randint(1, 9000))
    lines = (f"{n} " + "ä" * draw.randint(1, 300) + "\n" for n in range(12_000))
    (texts / "b-large.txt").write_text("".join(lines))
    (texts / "c-empty.txt").write_text("")
    for name, rows in (("d.jsonl", 3000), ("e.jsonl", 10), ("f.jsonl", 2000)):
        content = [json.dumps({"text": f"row {n} " * 40} if n % 7 else {"other": n}) for n in range(rows)]
        (texts / name).write_text("\n".join([*content, '{"other": 1}']))
    (texts / "g.txt.gz").write_bytes(gzip.compress(("packed " * 300_000).encode()))
    return config_of(texts, bad_rows="skip")


def _sequential(sources: list[SourceFile], config: TextDataConfig, start: Position = Position()) -> list[Any]:  # noqa: B008
    return [_plain(document) for document in ENCODER.encode_all(read_documents(sources, start, config))]


def _plain(document: EncodedDocument) -> Any:
    return document.text.tokens.tobytes(), document.text.split, document.end


def _portions(directory: Path, sources: list[SourceFile], config: TextDataConfig, machine: str) -> Portions:
    return Portions(directory, sources, config, machine=machine, portion_bytes=PORTION_BYTES, advanced=lambda _: None)


def _never() -> None:
    raise AssertionError("no other process works here")


def test_portions_follow_each_other_and_a_large_text_is_divided(config: TextDataConfig) -> None:
    sources = find_sources(config)
    portions = divided(sources, PORTION_BYTES)
    assert [portion.number for portion in portions] == list(range(len(portions)))
    assert portions[0].first == (0, 0) and portions[-1].end == (len(sources), 0)
    assert all(portion.end == following.first for portion, following in itertools.pairwise(portions))
    assert all(portion.first < portion.end for portion in portions)
    assert sum(portion.num_bytes for portion in portions) == sum(source.num_bytes for source in sources)
    large = next(n for n, source in enumerate(sources) if source.location.endswith("b-large.txt"))
    assert (
        sum(portion.first[0] == large and portion.first[1] > 0 for portion in portions)
        == sources[large].num_bytes // PORTION_BYTES
    )


@pytest.mark.parametrize("helped", ["none", "all", "some"])
@pytest.mark.parametrize("max_bytes", [None, 3_000_000])
def test_documents_and_positions_are_those_of_one_process(
    helped: str, max_bytes: int | None, config: TextDataConfig, tmp_path: Path
) -> None:
    config = config.model_copy(update={"max_bytes": max_bytes})
    sources = find_sources(config)
    expected = _sequential(sources, config)
    draw = random.Random(3)
    starts = [Position(), *(one[2] for one in draw.sample(expected, 4)), expected[-1][2]]
    for number, start in enumerate(starts):
        directory = tmp_path / f"corpus{number}"
        directory.mkdir()
        holder, helper = (_portions(directory, sources, config, machine) for machine in ("a", "b"))
        holder.hold()
        documents = holder.encoded_from(start, ENCODER.encode_all, _never)
        documents_read = [
            _plain(document) for document in (next(documents, None),) if document is not None
        ]  # now it says where it is
        if helped != "none":
            while helper.help(ENCODER.encode_all) and (helped == "all" or draw.random() < 0.7):
                pass
        documents_read += map(_plain, documents)
        assert documents_read == expected[len(expected) - len(_sequential(sources, config, start)) :]
        holder.remove()
        assert list(directory.iterdir()) == []


def test_a_process_of_the_same_machine_does_not_help(config: TextDataConfig, tmp_path: Path) -> None:
    sources = find_sources(config)
    holder, waiting = (_portions(tmp_path, sources, config, "a") for _ in range(2))
    assert not waiting.help(ENCODER.encode_all), "nobody prepares"
    holder.hold()
    documents = holder.encoded_from(Position(), ENCODER.encode_all, _never)
    next(documents)
    assert not waiting.help(ENCODER.encode_all)
    assert len(list(documents)) + 1 == len(_sequential(sources, config)) and holder.num_others == 0


@pytest.mark.parametrize("suffix", ["tokens", "part"])
def test_a_damaged_portion_is_encoded_again(suffix: str, config: TextDataConfig, tmp_path: Path) -> None:
    sources = find_sources(config)
    holder, helper = (_portions(tmp_path, sources, config, machine) for machine in ("a", "b"))
    holder.hold()
    documents = holder.encoded_from(Position(), ENCODER.encode_all, _never)
    documents_read = [_plain(next(documents))]
    while helper.help(ENCODER.encode_all):
        pass
    damaged = sorted((tmp_path / "portions").glob(f"*.{suffix}"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert documents_read + list(map(_plain, documents)) == _sequential(sources, config)


def test_a_row_without_text_is_refused_in_its_place_by_the_holder(config: TextDataConfig, tmp_path: Path) -> None:
    config = config.model_copy(update={"bad_rows": "refuse"})
    sources = find_sources(config)
    holder, helper = (_portions(tmp_path, sources, config, machine) for machine in ("a", "b"))
    holder.hold()
    documents = holder.encoded_from(Position(), ENCODER.encode_all, _never)
    next(documents)
    while helper.help(ENCODER.encode_all):
        pass
    with pytest.raises(BadRowError, match=r"d\.jsonl, line 1:"):
        list(documents)
