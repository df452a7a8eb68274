"""What this worker takes of its machine: CPU, memory, /dev/shm, disk, network and GPU, what its training thread spends
its time on, and how long it had to wait for a CPU.

Hidden here: where Linux and the driver say that, and that they may not answer. A network filesystem or a driver may
hang for minutes. Then only the meter's own thread waits: the control threads send the last measurement, whose time
stands still. UseMeter is made by the worker's actor, CpuWait by the trainer.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal_workers.contract.messages import StepPart, WorkerUse

_EVERY_S = 5.0
_SHARES_EVERY_S = 120.0
_MAX_GROWTH = 0.1
"""Share of a process's memory by which it may change before its shared pages are counted again."""
_SHM = "/dev/shm"


class _Counters(NamedTuple):
    """What only grows, at one moment. None means not known."""

    at_mono: float
    cpu_s: float
    received_bytes: int | None
    sent_bytes: int | None
    read_bytes: int | None
    written_bytes: int | None


class UseMeter:
    """`latest` may be read by any thread."""

    def __init__(
        self,
        checkpoint_root: str,
        *,
        has_gpu: bool,
        every_s: float = _EVERY_S,
        also: Callable[[], None] = lambda: None,
    ) -> None:
        """`also`: measured on the same thread, at the same pace."""
        self.processes: Callable[[], Collection[int]] = tuple
        """Other processes that are the worker's too: those of its script."""
        self._also = also
        self._disk = _local_path(checkpoint_root)
        self._has_gpu = has_gpu
        self._every_s = every_s
        self._shares = Shares()
        self._before: _Counters | None = None
        """Those of the measurement before."""
        self.part_seconds: Callable[[], Mapping[StepPart, float]] = dict
        """What the training thread has spent its time on so far; empty: not known."""
        self._parts_before: Mapping[StepPart, float] = {}
        self._stop = threading.Event()
        self.mapped_bytes: Callable[[], int] = int
        """Resident memory of this process that belongs to other workers, and is not counted as this one's."""
        self.latest: WorkerUse | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="shoal-use", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def measure(self) -> WorkerUse:
        """Measures now. Blocks as long as the filesystems do."""
        others = self.processes()
        now, before = _counters(others), self._before
        self._before = now
        shm_bytes, shm_free_bytes = _space(_SHM)
        disk_bytes, disk_free_bytes = _space(self._disk)
        return WorkerUse(
            at=time.time(),
            cpu_cores=_rate(before, now, "cpu_s"),
            resident_bytes=max(0, resident_bytes("self") - self.mapped_bytes()) + self._shares.of(others, now.at_mono),
            shm_bytes=shm_bytes,
            shm_free_bytes=shm_free_bytes,
            disk_bytes=disk_bytes,
            disk_free_bytes=disk_free_bytes,
            received_bytes_s=_rate(before, now, "received_bytes"),
            sent_bytes_s=_rate(before, now, "sent_bytes"),
            read_bytes_s=_rate(before, now, "read_bytes"),
            written_bytes_s=_rate(before, now, "written_bytes"),
            phases=self._phases(),
            **(_gpu() if self._has_gpu else {}),
        )

    def _phases(self) -> dict[StepPart, float]:
        """Shares of the time that was booked since the measurement before. Batches are booked after the phase in which
        they were made, so a difference may be negative: it counts as 0."""
        now = self.part_seconds()
        spent = {part: max(0.0, seconds - self._parts_before.get(part, 0.0)) for part, seconds in now.items()}
        total = sum(spent.values())
        if total <= 0:
            return {}
        self._parts_before = now
        return {part: seconds / total for part, seconds in spent.items()}

    def _run(self) -> None:
        while not self._stop.is_set():
            self.latest = self.measure()
            self._also()
            self._stop.wait(self._every_s)


class Shares:
    """How much memory other processes have, where pages that several of them share count as a part for each. To find
    that out, the kernel walks over all pages of a process, for tens of milliseconds, and the process waits for it
    when it needs new pages. So it is asked once in a while. In between what is resident tells how much was added,
    which is rarely shared."""

    def __init__(
        self,
        resident: Callable[[int], int] | None = None,
        share: Callable[[int], int] | None = None,
    ) -> None:
        """Both give bytes of a process; default: those that the kernel knows."""
        self._resident = resident or resident_bytes
        self._share = share or share_of_memory
        self._known: dict[int, tuple[float, int, int]] = {}
        """For each process: the time at which the kernel was asked, and both numbers of bytes."""

    def of(self, pids: Collection[int], now: float) -> int:
        """Bytes of all of them together. `now`: monotonic."""
        self._known = {pid: known for pid, known in self._known.items() if pid in pids}
        return sum(self._of(pid, now) for pid in pids)

    def _of(self, pid: int, now: float) -> int:
        resident = self._resident(pid)
        known = self._known.get(pid)
        if known is None or now - known[0] >= _SHARES_EVERY_S or abs(resident - known[1]) > _MAX_GROWTH * known[1]:
            known = self._known[pid] = now, resident, self._share(pid)
        return max(0, known[2] + resident - known[1])


def _local_path(url: str) -> str:
    """The path of a checkpoint directory on a filesystem; that of temporary files if it is elsewhere."""
    path = url.removeprefix("file://")
    return tempfile.gettempdir() if "://" in path else path


def _space(path: str) -> tuple[int, int]:
    """Bytes and free bytes of the filesystem that holds the path, or the nearest parent of it that exists."""
    for part in (Path(path), *Path(path).parents):
        with contextlib.suppress(OSError):
            space = os.statvfs(part)
            return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    return 0, 0


def _lines_of(path: str) -> list[str]:
    """The lines of a file of the kernel; none if the process has ended, or the system is not Linux."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def resident_bytes(pid: int | str) -> int:
    """Bytes of a process that are in memory, shared pages included. 0: not known."""
    fields = " ".join(_lines_of(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def _cpu_s(pid: int) -> float:
    """CPU time of another process and of its children that have ended; 0: it has ended."""
    fields = "\n".join(_lines_of(f"/proc/{pid}/stat")).rpartition(") ")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def share_of_memory(pid: int) -> int:
    """Bytes of another process; pages that several processes share count as a part for each. 0: not known."""
    shares = (line.split()[1] for line in _lines_of(f"/proc/{pid}/smaps_rollup") if line.startswith("Pss:"))
    return int(next(shares, 0)) << 10


def _counters(others: Collection[int]) -> _Counters:
    """`others`: processes that count as this one's, too."""
    received, sent = network_bytes()
    disk = [_disk_bytes("self"), *map(_disk_bytes, others)]
    return _Counters(
        at_mono=time.monotonic(),
        cpu_s=sum(os.times()[:2]) + sum(map(_cpu_s, others)),
        received_bytes=received,
        sent_bytes=sent,
        read_bytes=sum(counters[0] for counters in disk if counters) if disk[0] else None,
        written_bytes=sum(counters[1] for counters in disk if counters) if disk[0] else None,
    )


def _rate(before: _Counters | None, now: _Counters, name: str) -> float | None:
    """Growth of a counter per second; None means not known. 0 if it fell, because a process that counted has ended."""
    if before is None or now.at_mono <= before.at_mono:
        return None
    first, last = getattr(before, name), getattr(now, name)
    return None if first is None or last is None else max(0.0, last - first) / (now.at_mono - before.at_mono)


def network_bytes(path: str = "/proc/self/net/dev") -> tuple[int | None, int | None]:
    """Bytes that all interfaces but the loopback have received and sent, as this process's network namespace counts
    them."""
    lines = _lines_of(path)[2:]
    if not lines:
        return None, None
    rows = [(name.strip(), rest.split()) for name, _, rest in (line.partition(":") for line in lines)]
    rows = [row for row in rows if row[0] != "lo" and len(row[1]) >= 9]
    return sum(int(fields[0]) for _, fields in rows), sum(int(fields[8]) for _, fields in rows)


def _disk_bytes(pid: int | str) -> tuple[int, int] | None:
    """Bytes that a process has made the disks read and write; None if it has ended, or the kernel does not tell."""
    fields = dict(line.split(": ") for line in _lines_of(f"/proc/{pid}/io"))
    return (int(fields["read_bytes"]), int(fields["write_bytes"])) if "write_bytes" in fields else None


def _gpu() -> dict[str, Any]:
    """The fields of `WorkerUse` of the current device, once the training thread has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    free, size = torch.cuda.mem_get_info()
    busy, celsius, milliwatts = map(
        _from_driver, (torch.cuda.utilization, torch.cuda.temperature, torch.cuda.power_draw)
    )
    return {
        "gpu_bytes": size,
        "gpu_free_bytes": free,
        "gpu_busy": None if busy is None else busy / 100,
        "gpu_celsius": celsius,
        "gpu_watts": None if milliwatts is None else milliwatts / 1000,
    }


def _from_driver(ask: Callable[[], float]) -> float | None:
    try:
        return float(ask())
    except Exception:  # the driver's library or its Python package is missing, or the GPU does not tell
        return None


class CpuWait:
    """How long this thread was ready to run and had no CPU: the evidence that other programs use its cores.

    Made and read on the thread that it measures. Where the kernel does not tell (no Linux), it is always 0.
    """

    def __init__(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        self._taken = self.seconds()

    def take(self) -> float:
        """Seconds since the last call, or since it was made."""
        before, self._taken = self._taken, self.seconds()
        return self._taken - before

    def seconds(self) -> float:
        """Seconds since the thread began."""
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
