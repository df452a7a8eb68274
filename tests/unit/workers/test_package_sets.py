"""Sets of packages on a node: never removed while a process uses them, however it ends, and found again when old."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shoal_workers.package_sets import hold, remove, unused

DAY = 86_400.0
USED, OLD, FORMER = "a" * 32, "b" * 32, "c" * 32
_HOLDER = """
import sys
from pathlib import Path
from shoal_workers.package_sets import hold
file = hold(Path(sys.argv[1]), sys.argv[2], print)
print("holds", flush=True)
sys.stdin.read()
"""


def installed(root: Path, key: str, *, days_ago: float | None) -> Path:
    """`days_ago` None: by a release that noted no use; the directory is 50 days old."""
    (root / key / "module").mkdir(parents=True)
    (root / key / "module" / "__init__.py").write_text("x = 1\n")
    if days_ago is not None:
        hold(root, key, lambda _: None).close()
    aged = root / (key if days_ago is None else f"{key}.use")
    at = time.time() - (50.0 if days_ago is None else days_ago) * DAY
    os.utime(aged, (at, at))
    return root / key


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_only_what_was_not_used_for_long_is_found_the_longest_unused_first(tmp_path: Path) -> None:
    installed(tmp_path, USED, days_ago=3)
    installed(tmp_path, OLD, days_ago=40)
    installed(tmp_path, FORMER, days_ago=None)
    (tmp_path / "notes.txt").write_text("not ours")
    for _ in range(2):  # to look is no use
        found = unused(tmp_path, for_s=30 * DAY)
        assert [(one.name, round(one.unused_s / DAY), one.num_bytes) for one in found] == [
            (FORMER, 50, 6),
            (OLD, 40, 6),
        ]
    assert unused(tmp_path / "nowhere", for_s=0) == []


def test_a_removal_leaves_nothing_of_the_set_and_all_of_the_others(tmp_path: Path) -> None:
    installed(tmp_path, USED, days_ago=3)
    installed(tmp_path, OLD, days_ago=40)
    for suffix in (".lock", ".progress"):
        (tmp_path / f"{OLD}{suffix}").touch()
    (tmp_path / f"{OLD}.deleting").mkdir()
    (tmp_path / f"{OLD}.installing" / "target").mkdir(parents=True)
    assert remove(tmp_path, OLD, for_s=30 * DAY)
    assert names(tmp_path) == {USED, f"{USED}.use"}
    assert not remove(tmp_path, USED, for_s=30 * DAY)
    assert names(tmp_path) == {USED, f"{USED}.use"}


def test_a_process_that_uses_a_set_keeps_it_until_it_ends_by_whatever(tmp_path: Path) -> None:
    installed(tmp_path, OLD, days_ago=40)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path), OLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        at = time.time() - 40 * DAY
        os.utime(tmp_path / f"{OLD}.use", (at, at))  # a worker that has trained for so long
        assert unused(tmp_path, for_s=30 * DAY) == []
        assert not remove(tmp_path, OLD, for_s=30 * DAY) and (tmp_path / OLD).is_dir()
        holder.kill()
    assert remove(tmp_path, OLD, for_s=30 * DAY)


def test_who_uses_a_set_again_meanwhile_has_it(tmp_path: Path) -> None:
    installed(tmp_path, OLD, days_ago=40)
    [found] = unused(tmp_path, for_s=30 * DAY)
    hold(tmp_path, OLD, lambda _: None).close()
    assert not remove(tmp_path, found.name, for_s=30 * DAY) and (tmp_path / OLD).is_dir()


def test_a_process_that_waits_for_a_removal_locks_the_file_that_is_there_afterwards(tmp_path: Path) -> None:
    installed(tmp_path, OLD, days_ago=40)
    removing = (tmp_path / f"{OLD}.use").open("ab")
    fcntl.flock(removing, fcntl.LOCK_EX)
    waits, files = threading.Event(), []
    user = threading.Thread(target=lambda: files.append(hold(tmp_path, OLD, lambda _: waits.set())))
    user.start()
    assert waits.wait(60)
    (tmp_path / f"{OLD}.use").unlink()
    removing.close()
    user.join(60)
    assert os.path.samestat(os.fstat(files[0].fileno()), (tmp_path / f"{OLD}.use").stat())
    assert not remove(tmp_path, OLD, for_s=0)
    files[0].close()


@pytest.mark.parametrize("name", ["..", "a" * 31, "A" * 32, f"{'a' * 32}/x", ""])
def test_another_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a valid name of a set"):
        remove(tmp_path, name, for_s=0)
