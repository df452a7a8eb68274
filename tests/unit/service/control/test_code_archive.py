"""Archives of code: hostile ones are refused in little time and memory, and .shoalignore is read as git reads it."""

import hashlib
import io
import os
import stat
import struct
import subprocess
import time
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal_service.control.code_archive import MAX_FILES, CodeArchiveError, check, parse_ignore_rules

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


_EMPTY_ENTRY = b"PK\x01\x02" + bytes(42)


def _end(size: int, *, comment: bytes = b"") -> bytes:
    """The end of a directory of `size` bytes."""
    return b"PK\x05\x06" + bytes(8) + struct.pack("<IIH", size, 0, len(comment)) + comment


def _zip64(directory: bytes) -> bytes:
    """The same as ZIP64, whose records Python reads whenever they are there; the end itself names one entry only."""
    record = struct.pack("<4sQ4xLLQQQQ", b"PK\x06\x06", 44, 0, 0, 0, 0, len(directory), 0)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(directory), 1)
    return directory + record + locator + _end(46)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(_EMPTY_ENTRY * 1_000_000 + _end(46_000_000), f"more than {MAX_FILES} entries", id="plain"),
        pytest.param(_EMPTY_ENTRY * 120_000 + _end(5_520_000, comment=b"c" * 99), "more than", id="with a comment"),
        pytest.param(_zip64(_EMPTY_ENTRY * 120_000), "ZIP64", id="ZIP64"),
        pytest.param(_EMPTY_ENTRY * 120_000 + _end(46) + b"x", "not a valid zip", id="something behind its end"),
        pytest.param(_EMPTY_ENTRY * 2 + b"x" * 46 + _end(138), "not a valid zip", id="something between its entries"),
        pytest.param(_EMPTY_ENTRY + _end(47), "not a valid zip", id="a directory that begins before the archive"),
    ],
)
def test_many_entries_are_refused_before_they_are_read(data: bytes, words: str) -> None:
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(CodeArchiveError, match=words):
            _check(data)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 2.0


def test_the_comment_of_another_program_is_accepted() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.py", b"x = 1")
        archive.comment = b"0123456789abcdef"
    _check(buffer.getvalue())


def test_content_that_entries_share_is_refused() -> None:
    """Each would be read anew: 20,000 entries of one byte may each have 64 MiB of deflated nothing."""
    nothing = b"\x00\x00\x00\xff\xff" * 200_000
    content = nothing + zlib.compressobj(wbits=-15).flush()
    local = struct.pack("<4s5HLLLHH", b"PK\x03\x04", 20, 0, 8, 0, 33, 0, len(content), 0, 1, 0)
    first = local + b"a" + content
    directory = b"".join(
        struct.pack("<4s6HLLL5HLL", b"PK\x01\x02", 20, 20, 0, 8, 0, 33, 0, len(content), 0, 5, 0, 0, 0, 0, 0, 0)
        + b"a%04d" % number
        for number in range(3)
    )
    with pytest.raises(CodeArchiveError, match="share their content"):
        _check(first + directory + _end(len(directory)))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_slow_compression_is_refused(method: int) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a.py", b"x = 1")
    with pytest.raises(CodeArchiveError, match="neither stored nor deflated"):
        _check(buffer.getvalue())


def test_a_check_that_takes_too_long_ends() -> None:
    with pytest.raises(CodeArchiveError, match=r"took longer than 0 s"):
        check(hashlib.sha256(data := _archive(("a.py", b"x = 1"))).hexdigest(), data, within_s=0.0)


FILES = (
    *("train.py", "model.pt", "a.log", "b.log", "#odd", "!odd", "end ", "x[1]", "data/a.bin", "data/b/c.bin"),
    *(
        "pkg/data/a.bin",
        "pkg/model.pt",
        "pkg/deep/er/model.pt",
        "runs/1/out.txt",
        "pkg/runs/1/out.txt",
        "f1",
        "f2",
        "fa",
    ),
)


def _kept(text: str) -> list[str]:
    """What a packer keeps that does not enter ignored directories."""
    rules = parse_ignore_rules(text)

    def is_kept(path: str) -> bool:
        folders = [path[:at] for at, character in enumerate(path) if character == "/"]
        return not any(rules.match_file(name) for name in (path, *(f"{folder}/" for folder in folders)))

    return sorted(filter(is_kept, FILES))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# comment\n\n*.pt\n",
        "data\n",
        "data/\n",
        "/data\n",
        "pkg/data\n",
        "/pkg/data/\n",
        "runs/*/out.txt",
        "**/runs",
        "pkg/**",
        "pkg/**/model.pt",
        "**/*.pt",
        "*\n!train.py\n",
        "*.log\n!b.log\n",
        "data/\n!data/a.bin\n",
        "data/*\n!data/a.bin\n",
        "\\#odd\n\\!odd\n",
        "end\\ ",
        "end   ",
        "f[0-9]",
        "f[!0-9]",
        "f[]a]",
        "f?",
        "x\\[1\\]",
        "f[z-a]",
        "/*\n!/pkg\n",
        "train.py/",
        "a.log\r\n",
    ],
)
def test_the_same_files_are_left_out_as_by_git(text: str, tree: Path) -> None:
    (tree / ".git" / "patterns").write_bytes(text.encode())
    command = ["git", "ls-files", "--others", "-z", "--exclude-from=.git/patterns"]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    listed = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True).stdout
    assert _kept(text) == sorted(filter(None, listed.split("\0")))
