"""Every kind of storage behaves the same."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal_workers.checkpoint.storage import join, open_directory


def test_writing_again_replaces(root: str) -> None:
    place = open_directory(root)
    place.create()
    place.write("a", [b"long content"])
    place.write("a", [b"short"])
    assert place.read("a") == b"short"
    assert place.files() == {"a": 5}


def test_a_file_is_created_once(root: str) -> None:
    place = open_directory(root)
    place.create()
    assert place.create_file("a", b"first")
    assert not place.create_file("a", b"second")
    assert place.read("a") == b"first" and place.files() == {"a": 5}


def test_of_many_creators_at_once_one_wins(tmp_path: Path) -> None:
    place = open_directory(f"{tmp_path}/job")
    place.create()
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda number: place.create_file("a", b"%d" % number), range(32)))
    assert won.count(True) == 1 and place.read("a") == b"%d" % won.index(True)
    assert list(place.files()) == ["a"]


def test_a_file_that_goes_while_its_directory_is_listed_is_left_out(tmp_path: Path) -> None:
    """As the draft of a file does that another process writes: the directory is there all the time."""
    names, place = [f"{number}.writing" for number in range(500)], open_directory(str(tmp_path))
    for _ in range(20):
        for name in ["a", *names]:
            (tmp_path / name).touch()
        remover = threading.Thread(target=lambda: [(tmp_path / name).unlink() for name in names])
        remover.start()
        while remover.is_alive():
            assert place.files()["a"] == 0
        remover.join()


def test_write_that_fails_midway_leaves_the_old_content(tmp_path: Path) -> None:
    place = open_directory(f"{tmp_path}/job")
    place.create()
    place.write("a", [b"old"])
    with pytest.raises(OSError, match="out of chunks"):
        place.write("a", _failing_chunks())
    assert place.read("a") == b"old"
    assert place.files() == {"a": 3}


def test_range_is_read_into_a_buffer(root: str) -> None:
    place = open_directory(root)
    place.create()
    place.write("a", [bytes(range(100))])
    buffer = bytearray(10)
    assert place.read_into("a", 30, memoryview(buffer)) == 10
    assert bytes(buffer) == bytes(range(30, 40))


def test_range_beyond_the_end_is_short(root: str) -> None:
    place = open_directory(root)
    place.create()
    place.write("a", [bytes(range(100))])
    assert place.read_into("a", 95, memoryview(bytearray(10))) == 5


def test_missing_file_is_file_not_found(root: str) -> None:
    place = open_directory(root)
    place.create()
    with pytest.raises(FileNotFoundError):
        place.read("a")
    with pytest.raises(FileNotFoundError):
        place.read_into("a", 0, memoryview(bytearray(1)))


def test_removing_a_missing_file_is_not_an_error(root: str) -> None:
    place = open_directory(root)
    place.remove_tree()
    place.create()
    place.remove("a")
    assert place.directories() == []


def test_directories_and_files_are_distinguished(root: str) -> None:
    place = open_directory(root)
    place.create()
    place.write("file", [b"x"])
    child = place.child("below")
    child.create()
    child.write("deep", [b"y"])
    assert place.directories() == ["below"]
    assert place.files() == {"file": 1}
    assert open_directory(join(root, "below")).read("deep") == b"y"
    child.remove_tree()
    assert place.directories() == []
    assert place.read("file") == b"x"


def test_listing_a_missing_directory(root: str) -> None:
    place = open_directory(root)
    assert place.directories() == []
    with pytest.raises(FileNotFoundError):
        place.files()


def test_unknown_protocol_is_an_os_error() -> None:
    with pytest.raises(OSError, match="nosuch"):
        open_directory("nosuch://bucket/x")


def test_opening_a_directory_creates_nothing(tmp_path: Path) -> None:
    open_directory(f"{tmp_path}/a/b")
    assert list(tmp_path.iterdir()) == []


def _failing_chunks() -> Iterator[bytes]:
    yield b"half"
    raise OSError("out of chunks")


@pytest.mark.parametrize(("mode", "expected"), [(0o755, 0o755), (0o2770, 0o2775)])
def test_the_group_that_may_write_a_directory_may_write_those_below_it(
    tmp_path: Path, mode: int, expected: int
) -> None:
    """Workers and the control plane, which deletes checkpoints, are two users of one group."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints").chmod(mode)
    directory = open_directory(str(tmp_path / "checkpoints")).child("job").child("step")
    before = os.umask(0o022)
    try:
        directory.create()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o7777 for path in (tmp_path / "checkpoints" / "job", Path(directory.url))] == [
        expected
    ] * 2
