"""Growth of long-lived processes, and leftovers in Ray, on disk and in shared memory.

Growth is per process: from its first sample after _SETTLED_S seconds to its last sample. A restarted process starts
over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kit.processes.os_processes import is_alive

_SETTLED_S = 30.0
MOST_THREADS = 8
MOST_FDS = 40
MOST_RSS_MIB = 150.0
"""Growth of one process beyond these limits is a violation. Allocators keep freed memory, hence the high limit."""
_LIST_LEFT = """
import json, sys, ray
from ray.experimental import internal_kv
from ray._private.internal_api import memory_summary
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
journal = internal_kv._internal_kv_list(b"", namespace=b"shoal-journal")
groups = [key for key, group in ray.util.placement_group_table().items() if group["state"] != "REMOVED"]
objects = [line for line in memory_summary(sys.argv[1], stats_only=True).splitlines() if "Plasma memory usage" in line]
actors = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
print(json.dumps({"named actors": actors, "placement groups": groups, "journal entries": [k.decode() for k in journal],
                  "objects": [line for line in objects if " 0 objects" not in line]}))
"""


@dataclass(frozen=True, slots=True)
class Size:
    threads: int
    fds: int
    rss_mib: float


@dataclass(slots=True)
class _History:
    role: str
    first_seen_s: float
    settled: Size | None = None
    last: Size | None = None


class Watch:
    """Samples processes and computes the growth of each."""

    def __init__(self) -> None:
        self._histories: dict[int, _History] = {}

    def sample(self, role: str, pids: Iterable[int], now_s: float) -> None:
        for pid in pids:
            size = size_of(pid)
            if size is None:
                continue
            history = self._histories.setdefault(pid, _History(role, now_s))
            if history.settled is None and now_s - history.first_seen_s >= _SETTLED_S:
                history.settled = size
            history.last = size

    def report(self) -> tuple[list[str], list[str]]:
        """One line with the largest growth of each role, and the violations."""
        lines, violations = [], []
        for role in sorted({history.role for history in self._histories.values()}):
            grown = [
                (
                    history.last.threads - history.settled.threads,
                    history.last.fds - history.settled.fds,
                    history.last.rss_mib - history.settled.rss_mib,
                )
                for history in self._histories.values()
                if history.role == role and history.settled is not None and history.last is not None
            ]
            if not grown:
                lines.append(f"{role}: no process lived long enough to measure growth")
                continue
            threads, fds, rss_mib = (max(column) for column in zip(*grown, strict=True))
            most = f"{threads} threads, {fds} fds, {rss_mib:.0f} MiB"
            text = f"{role}: {len(grown)} long-lived processes, growth at most {most}"
            lines.append(text)
            if threads > MOST_THREADS or fds > MOST_FDS or rss_mib > MOST_RSS_MIB:
                violations.append(f"leak: {text}")
        return lines, violations


def size_of(pid: int) -> Size | None:
    """Memory of a process; None if it is gone."""
    if not is_alive(pid):
        return None
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        return None
    return Size(int(fields["Threads"]), fds, int(fields["VmRSS"].split()[0]) / 1024)


def left_in_ray(address: str, environment: dict[str, str]) -> dict[str, list[str]]:
    """Named actors, placement groups, journal entries and objects that Ray still has, by kind."""
    done = subprocess.run(
        [sys.executable, "-c", _LIST_LEFT, address],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"errors of the query": [done.stderr[-500:]]}
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return {kind: names for kind, names in found.items() if names}


def left_on_disk(state_dir: Path, job_ids: Iterable[str]) -> list[str]:
    """Unfinished files of checkpoints, and shared memory of the jobs."""
    names = [str(path) for path in (state_dir / "checkpoints").rglob("*")]
    unfinished = [name for name in names if name.endswith((".writing", ".tmp")) or "write-probe" in name]
    in_memory = [str(path) for job_id in job_ids for path in Path("/dev/shm").glob(f"shoal-*/*{job_id}*")]
    return unfinished + in_memory
