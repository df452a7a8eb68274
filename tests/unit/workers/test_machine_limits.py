"""The cores and the memory that a process may use: the least of what the machine has and its control groups allow."""

import os
from pathlib import Path

import pytest

from shoal_workers.machine_limits import allowed_cores, available_bytes, total_bytes

MIB = 1 << 20


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def _machine(tmp_path: Path, group: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(group)
    for name, content in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(content)
    return proc, mount


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/a/b\n", {}, 64),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n", "a/cpu.max": "400000 100000\n"}, 2),
        ("0::/a/b\n", {"cpu.max": "50000 100000\n"}, 1),
        (
            "4:cpu,cpuacct:/job\n3:memory:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "300000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        ("4:cpu:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 64),
    ],
    ids=["no limit", "group above", "own group", "half a core", "v1", "v1 without limit"],
)
def test_the_smallest_quota_counts(group: str, files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert allowed_cores(*_machine(tmp_path, group, files)) == expected


def test_the_affinity_of_this_process_counts(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert allowed_cores(*_machine(tmp_path, "0::/\n", {})) == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= allowed_cores() <= len(before)


@pytest.fixture
def system(tmp_path: Path) -> tuple[Path, Path]:
    """A machine with 1,000 MiB left, whose process is in the group /pod/worker of cgroup v2."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {1000 << 10} kB\n")
    (proc / "self" / "cgroup").write_text("0::/pod/worker\n")
    cgroups.mkdir()
    return proc, cgroups


def group(path: Path, limit: int | str, used: int, inactive: int = 0, *, v1: bool = False) -> None:
    path.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, used), strict=True):
        (path / name).write_text(f"{value}\n")
    (path / "memory.stat").write_text(f"anon 1\n{'total_' if v1 else ''}inactive_file {inactive}\n")


def test_without_a_limit_it_is_what_the_machine_has(system: tuple[Path, Path]) -> None:
    proc, cgroups = system
    group(cgroups / "pod" / "worker", "max", 5 * MIB)
    assert available_bytes(proc, cgroups) == 1000 * MIB


def test_the_limit_of_the_own_group_counts_without_the_files_that_can_be_dropped(system: tuple[Path, Path]) -> None:
    proc, cgroups = system
    group(cgroups / "pod" / "worker", 200 * MIB, 150 * MIB, 30 * MIB)
    assert available_bytes(proc, cgroups) == 80 * MIB


def test_a_tighter_limit_above_counts(system: tuple[Path, Path]) -> None:
    proc, cgroups = system
    group(cgroups / "pod" / "worker", 200 * MIB, 10 * MIB)
    group(cgroups / "pod", 300 * MIB, 290 * MIB)
    assert available_bytes(proc, cgroups) == 10 * MIB


def test_in_a_container_the_mount_is_the_own_group(system: tuple[Path, Path]) -> None:
    """The path is that of the host, of which the container sees only its own part."""
    proc, cgroups = system
    group(cgroups, 100 * MIB, 60 * MIB)
    assert available_bytes(proc, cgroups) == 40 * MIB


def test_the_limit_of_version_1_counts(system: tuple[Path, Path]) -> None:
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/pod\n")
    group(cgroups / "memory" / "pod", 64 * MIB, 60 * MIB, 8 * MIB, v1=True)
    group(cgroups / "memory", 2**63 - 4096, 500 * MIB, v1=True)
    assert available_bytes(proc, cgroups) == 12 * MIB


def test_a_group_over_its_limit_has_nothing_left(system: tuple[Path, Path]) -> None:
    proc, cgroups = system
    group(cgroups / "pod", 10 * MIB, 20 * MIB)
    assert available_bytes(proc, cgroups) == 0


def test_this_machine_can_be_read() -> None:
    assert available_bytes() > 0


@pytest.mark.parametrize(("pod", "worker", "least_mib"), [("max", "max", 2000), (900, "max", 900), (900, 700, 700)])
def test_all_processes_together_have_the_least_of_machine_and_limits(
    system: tuple[Path, Path], pod: int | str, worker: int | str, least_mib: int
) -> None:
    proc, cgroups = system
    (proc / "meminfo").write_text(f"MemTotal: {2000 << 10} kB\nMemAvailable: 9 kB\n")
    for path, limit in ((cgroups / "pod", pod), (cgroups / "pod" / "worker", worker)):
        group(path, limit if isinstance(limit, str) else limit * MIB, 5 * MIB)
    assert total_bytes(proc, cgroups) == least_mib * MIB
