"""The cores that a process may use: the least of its affinity and of the quotas of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal_workers.cores import allowed_cores


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
