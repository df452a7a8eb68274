"""Which files are read, and the documents of them from any position on."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.documents import PIECE_BYTES, Document, Position, read_documents
from shoal_workers.data.errors import MissingTextError, TextChangedError, UndecodableTextError
from shoal_workers.data.sources import find_sources, make_local_source

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
