"""Locks distinguish dead processes from live ones, and only slots of dead processes are swept."""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.snapshot_store.slots.registry import (
    KEEP_S,
    SlotRegistry,
    Sweep,
    machine_id,
    remove_attempts,
    sweep_stale,
)

StartWorker = Callable[..., Any]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., SlotRegistry]]:
    """`join(job_id=, memory_id=, ...)`: a directory of this process, which can have many: locks are per open file."""
    with ExitStack() as stack:

        def make(**changes: Any) -> SlotRegistry:
            names = {"job_id": "job", "attempt": 1, "memory_id": "n", "worker_id": "s", **changes}
            directory = SlotRegistry(tmp_path, **names)
            stack.callback(directory.close)
            return directory

        yield make


def _steps(directory: SlotRegistry) -> list[tuple[int, int]]:
    return sorted((header.generation, header.step) for _, header in directory.parts())


def test_directories_are_for_this_user_only(tmp_path: Path, join: Callable[..., SlotRegistry]) -> None:
    directory = join()
    place = directory.path
    assert place.parent.parent.parent.parent == tmp_path
    while place != tmp_path:
        assert place.stat().st_mode & 0o777 == 0o700
        place = place.parent


def test_directory_that_others_could_write_to_is_refused(tmp_path: Path, join: Callable[..., SlotRegistry]) -> None:
    base = tmp_path / f"shoal-{os.geteuid()}"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(PermissionError, match="not a directory that belongs to this user"):
        join()


def test_a_link_instead_of_the_directory_is_refused(tmp_path: Path, join: Callable[..., SlotRegistry]) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"shoal-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a directory that belongs to this user"):
        join()


@pytest.mark.parametrize("name", ["..", ".", "a/b", ".trash-x", "lock", "ä"])
def test_any_name_is_one_segment(tmp_path: Path, join: Callable[..., SlotRegistry], name: str) -> None:
    directory = join(job_id=name, memory_id=name, worker_id=name)
    assert len(directory.path.relative_to(tmp_path).parts) == 4
    assert not any(part.startswith(".") for part in directory.path.relative_to(tmp_path).parts)
    assert sweep_stale(tmp_path) == []


def test_parts_of_a_killed_process_remain(join: Callable[..., Any], start_process: StartWorker) -> None:
    process = start_process("1:10", "1:11", "1:torn")
    process.kill()
    assert _steps(join()) == [(1, 10), (1, 11)]


def test_parts_of_another_node_are_not_listed(join: Callable[..., Any], start_process: StartWorker) -> None:
    start_process("1:10", node="other")
    assert _steps(join()) == []


def test_a_part_is_opened_where_the_last_scan_saw_it(join: Callable[..., Any], start_process: StartWorker) -> None:
    directory = join()
    directory.scan()
    process = start_process("1:10")
    with directory.open_part(1, 0, 10, scans=False) as part:
        assert part is None, "it came after the scan"
    with directory.open_part(1, 0, 10) as part:
        assert part.header.step == 10
    with directory.open_part(1, 0, 10, scans=False) as part:
        assert part.header.step == 10
    next(process.path.glob("own-*")).unlink()
    with directory.open_part(1, 0, 10) as part:
        assert part is None


def test_another_copy_of_a_part_is_found_when_the_known_one_is_gone(
    join: Callable[..., Any], start_process: StartWorker
) -> None:
    directory = join()
    copies = [start_process("1:10").path / "own-0" for _ in range(2)]
    with directory.open_part(1, 0, 10) as part:
        known = next(path for path in copies if path.samefile(f"/proc/self/fd/{part.fd}"))
    known.unlink()
    with directory.open_part(1, 0, 10) as part:
        assert part.header.step == 10


def test_an_attempt_without_a_live_process_is_swept(tmp_path: Path, start_process: StartWorker) -> None:
    start_process("1:10", job="old", node="a").kill()
    start_process("1:10", job="old", node="b").kill()
    assert sweep_stale(tmp_path) == ["old-a1"]
    assert list(tmp_path.iterdir()) == []


def test_own_attempt_is_not_swept(tmp_path: Path, join: Callable[..., Any], start_process: StartWorker) -> None:
    start_process("1:10").kill()
    directory = join()
    assert sweep_stale(tmp_path) == []
    assert _steps(directory) == [(1, 10)]


def test_another_job_does_not_remove_snapshots_that_a_job_is_about_to_read(
    tmp_path: Path, join: Callable[..., Any], start_process: StartWorker
) -> None:
    start_process("1:10", job="victim").kill()
    assert sweep_stale(tmp_path, Sweep("other", 1, now=1000.0)) == []
    assert sweep_stale(tmp_path, Sweep("other", 1, now=1000.0 + KEEP_S - 1)) == []
    directory = join(job_id="victim")
    assert _steps(directory) == [(1, 10)]
    directory.close()


def test_an_abandoned_attempt_is_removed_after_a_while_and_a_process_that_joins_it_restarts_the_time(
    tmp_path: Path, start_process: StartWorker
) -> None:
    start_process("1:10", job="victim").kill()
    assert sweep_stale(tmp_path, Sweep("other", 1, now=1000.0)) == []
    start_process("1:11", job="victim").kill()
    assert sweep_stale(tmp_path, Sweep("other", 1, now=1000.0 + KEEP_S)) == []
    assert sweep_stale(tmp_path, Sweep("other", 1, now=1000.0 + 2 * KEEP_S)) == ["victim-a1"]


def test_a_later_attempt_of_the_job_removes_what_earlier_ones_left(tmp_path: Path, start_process: StartWorker) -> None:
    start_process("1:10", job="job").kill()
    start_process("1:10", job="job-a1-x").kill()
    assert sweep_stale(tmp_path, Sweep("job", 1, now=1000.0)) == []
    assert sweep_stale(tmp_path, Sweep("job", 2, now=1000.0)) == ["job-a1"]


def test_attempts_are_removed_once_their_killed_processes_have_released_their_locks(tmp_path: Path) -> None:
    lock = tmp_path / f"shoal-{os.geteuid()}" / "job-a1" / ".lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as dying:
        fcntl.flock(dying, fcntl.LOCK_SH)
        remove_attempts([("job", 1), ("other", 1)], tmp_path, wait_s=0.0)
        assert lock.exists(), "a live process keeps its own"
        remover = threading.Thread(target=remove_attempts, args=([("job", 1)], tmp_path), kwargs={"wait_s": 60.0})
        remover.start()
    remover.join()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_sweeper_left_is_swept(tmp_path: Path, start_process: StartWorker) -> None:
    process = start_process("1:10")
    process.kill()
    attempt = process.path.parent.parent
    attempt.rename(attempt.with_name(".trash-job-a1-00"))
    assert sweep_stale(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_concurrent_sweeps_and_starts_do_not_interfere(tmp_path: Path) -> None:
    """Processes of one attempt start and end in a loop while others sweep: a live process keeps its slots."""
    over = threading.Event()
    wrong: list[object] = []

    def sweep() -> None:
        while not over.is_set():
            sweep_stale(tmp_path)

    def start(shard: str) -> None:
        try:
            for _ in range(40):
                directory = SlotRegistry(tmp_path, job_id="job", attempt=1, memory_id="n", worker_id=shard)
                (directory.path / "own-1").touch()
                if not (directory.path / "own-1").exists():
                    wrong.append(directory.path)
                directory.close()
        except Exception as error:
            wrong.append(error)

    starters = [threading.Thread(target=start, args=(f"s{number}",)) for number in range(3)]
    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in starters + sweepers:
        thread.start()
    for thread in starters:
        thread.join()
    over.set()
    for thread in sweepers:
        thread.join()
    assert wrong == []
    sweep_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_old_parts_of_dead_processes_are_removed(join: Callable[..., Any], start_process: StartWorker) -> None:
    dead = start_process("1:10", "2:20", "2:torn")
    dead.kill()
    directory = join()
    directory.remove_dead_slots(2)
    assert _steps(directory) == [(2, 20)]
    assert [path.name for path in dead.path.iterdir() if path.name != "owner"] == ["own-1"]
    directory.remove_dead_slots(3)
    assert not dead.path.exists()


def test_old_parts_of_live_processes_are_kept(join: Callable[..., Any], start_process: StartWorker) -> None:
    start_process("1:10")
    directory = join()
    directory.remove_dead_slots(5)
    assert _steps(directory) == [(1, 10)]


def test_a_removed_attempt_is_deleted_also_on_nodes_without_its_processes(
    tmp_path: Path, join: Callable[..., Any], start_process: StartWorker
) -> None:
    start_process("1:10").kill()
    start_process("1:11")
    start_process("1:12", node="other").kill()
    here = join()
    here.remove_attempt()
    assert _steps(here) == []
    assert list(tmp_path.iterdir()) == []


def test_the_last_process_to_close_deletes_everything_also_of_dead_processes(
    tmp_path: Path, join: Callable[..., Any], start_process: StartWorker
) -> None:
    start_process("1:10").kill()
    first, second = join(), join()
    first.close()
    assert not first.path.exists()
    assert _steps(second) == [(1, 10)]
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_unusable_root_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        SlotRegistry(tmp_path / "nosuch", job_id="j", attempt=1, memory_id="n", worker_id="s")


def test_the_id_is_of_this_boot_and_of_the_file_system() -> None:
    assert machine_id(Path("/dev/shm")) == machine_id(Path("/dev/shm"))
    assert machine_id(Path("/dev/shm")) != machine_id(Path("/proc"))


def test_a_machine_without_shared_memory_has_none(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such place"):
        machine_id(tmp_path / "no such place")
