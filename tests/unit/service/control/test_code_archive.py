"""Hostile archives of code: refused with words, in little time and memory."""

from __future__ import annotations

import hashlib
import io
import stat
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable

import pytest

from shoal_service.control.code_archive import MAX_FILES, CodeArchiveError, check

Write = Callable[[zipfile.ZipFile], None]


def _archive(*entries: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # about duplicate names
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


def _check(data: bytes) -> None:
    check(hashlib.sha256(data).hexdigest(), data)


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.create_system = 3
    entry.external_attr = mode << 16
    return entry


def _renamed(data: bytes, old: bytes, new: bytes) -> bytes:
    """zipfile itself writes no such name."""
    assert len(old) == len(new)
    return data.replace(old, new)


def test_an_ordinary_archive_is_accepted() -> None:
    _check(_archive(("a/", b""), ("a/b.py", b"x = 1"), (_entry("run", stat.S_IFREG | 0o755), b""), ("ä/ü.txt", b"")))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(_archive(("../a", b"")), "outside", id="parent"),
        pytest.param(_archive(("a/../../b", b"")), "outside", id="parent further down"),
        pytest.param(_archive(("/etc/passwd", b"")), "outside", id="absolute"),
        pytest.param(_renamed(_archive(("XXa", b"")), b"XXa", b"\\\\a"), "outside", id="a share of Windows"),
        pytest.param(_archive(("C:/a", b"")), "outside", id="a drive"),
        pytest.param(_archive((_entry("a", stat.S_IFLNK | 0o777), b"/etc/passwd")), "link or a device", id="link"),
        pytest.param(_archive((_entry("a", stat.S_IFCHR | 0o666), b"")), "link or a device", id="device"),
        pytest.param(_archive((_entry("a", stat.S_IFIFO | 0o666), b"")), "link or a device", id="fifo"),
        pytest.param(_archive((_entry("a", stat.S_IFSOCK | 0o666), b"")), "link or a device", id="socket"),
        pytest.param(_archive(("a" * 60_000, b"")), "more than 1024 or 255 bytes", id="a huge name"),
        pytest.param(_archive(("/".join("a" * 900), b"")), "more than 1024 or 255 bytes", id="a deep name"),
        pytest.param(_archive(("a\nb", b"")), "not every file system", id="a control character"),
        pytest.param(_archive(("a//b", b"")), "not every file system", id="an empty part"),
        pytest.param(_archive(("a", b"1"), ("a", b"2")), "there twice", id="a name twice"),
        pytest.param(_archive(("a", b""), ("a/b", b"")), "there twice|a file and a directory", id="file and folder"),
        pytest.param(_archive(("a/b", b""), ("a", b"")), "there twice|a file and a directory", id="folder and file"),
        pytest.param(_archive(("a", b""))[:-8], "no directory|not a valid zip", id="cut off"),
        pytest.param(b"PK\x05\x06", "no directory", id="nothing but a signature"),
        pytest.param(b"not a zip", "no directory", id="no zip"),
    ],
)
def test_a_hostile_entry_is_refused_in_words(data: bytes, words: str) -> None:
    with pytest.raises(CodeArchiveError, match=words) as refused:
        _check(data)
    assert len(str(refused.value)) < 500


def test_a_bomb_is_refused_by_what_it_declares() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(17):
            archive.writestr(f"{number}", b"")
            archive.filelist[-1].file_size = 65 << 20
    bomb = buffer.getvalue()
    began = time.process_time()
    with pytest.raises(CodeArchiveError, match="more than 1 GiB"):
        _check(bomb)
    assert time.process_time() - began < 1.0


def test_a_bomb_that_declares_less_is_damaged() -> None:
    honest = _archive(("a", bytes(1 << 20)))
    lying = honest.replace((1 << 20).to_bytes(4, "little"), (1).to_bytes(4, "little"))
    assert lying != honest
    with pytest.raises(CodeArchiveError, match=r"damaged|not a valid zip"):
        _check(lying)


def test_many_entries_are_refused_before_they_are_read() -> None:
    entry = b"PK\x01\x02" + bytes(42)
    count = 1_000_000
    end = b"PK\x05\x06" + bytes(8) + (count * 46).to_bytes(4, "little") + bytes(4) + bytes(2)
    data = entry * count + end
    tracemalloc.start()
    try:
        with pytest.raises(CodeArchiveError, match=f"1000000 entries; {MAX_FILES} are allowed"):
            _check(data)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
