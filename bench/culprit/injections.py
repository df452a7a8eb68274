"""Faults of seven kinds on one rank of a running job, and controls, in which nothing is done to it.

cpu          the rank's process is bound to a CPU that busy programs use as well. The other ranks are bound to the other
             CPUs: all hosts of this test share one machine, and on the busy CPU each of them would be starved. It also
             gets the lowest scheduling class, because other programs move away from the busy CPU to the others
data         its data loader takes 0.4 s for each sample
storage      the file of its next checkpoint part is a pipe that nobody reads
loss, delay  its host loses 15 % of its packets, or sends them 60 ms late (netem). Where there is no netem, a token
             bucket of 2 Mbit/s does it: with a short queue it drops packets, with a long one it delays them
stop         SIGSTOP
nan          its loss is not a number
control      nothing, for as long as the longest of the others takes; right if no rank is suspected

A task that calls a collective which the others do not call is not among them: it is refused before the call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kit.processes.hosts import Hosts
from kit.processes.storage_faults import hanging
from shoal_api.client import Client
from shoal_service.views import EventView
from shoal_workers.checkpoint.index import payload_name
from shoal_workers.checkpoint.local import TEMPORARY_SUFFIX
from shoal_workers.contract.marker import CheckpointName

PATIENCE_S = 40.0
EVERY_STEPS = 5
"""Steps between two checkpoints."""
_HOGS = 10


@dataclass
class Target:
    """The job under test."""

    client: Client
    job_id: str
    gate: Path
    hosts: Hosts

    def worker(self, rank: int) -> Any:
        return next(worker for worker in self.client.workers(self.job_id) if worker.rank == rank)

    def last_event(self) -> int:
        return max((event.seq for event in self.client.events(self.job_id)), default=0)


@dataclass(frozen=True)
class Kind:
    inject: Callable[[Target, int], AbstractContextManager[None]]
    event: str
    """The event that names the suspect."""


@contextmanager
def _cpu(target: Target, rank: int) -> Iterator[None]:
    cpus = set(range(os.cpu_count() or 1))
    pids = {worker.rank: worker.pid for worker in target.client.workers(target.job_id) if worker.rank is not None}
    own = rank % len(cpus)
    # The kernel shares a CPU between sessions, and then between the processes of each.
    hog = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(hog, start_new_session=True) for _ in range(_HOGS)]
    try:
        for one in hogs:
            os.sched_setaffinity(one.pid, {own})
        for other, pid in pids.items():
            _bind(pid, {own} if other == rank else cpus - {own} or cpus)
        _schedule(pids[rank], os.SCHED_IDLE)
        yield
    finally:
        for one in hogs:
            one.kill()
            one.wait()
        for pid in pids.values():
            _bind(pid, cpus)
            _schedule(pid, os.SCHED_OTHER)


def _schedule(pid: int, policy: int) -> None:
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(thread, policy, os.sched_param(0))


def _bind(pid: int, cpus: set[int]) -> None:
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cpus)


def _threads(pid: int) -> list[int]:
    try:
        return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        return []


@contextmanager
def _data(target: Target, rank: int) -> Iterator[None]:
    switch = target.gate / f"slow-data-{rank}"
    switch.touch()
    try:
        yield
    finally:
        switch.unlink()


@contextmanager
def _storage(target: Target, rank: int) -> Iterator[None]:
    job = target.client.job(target.job_id)
    step = (job.status.step // EVERY_STEPS + 3) * EVERY_STEPS
    name = CheckpointName(step, job.status.attempt, job.status.generation)
    file = _folder(target) / str(name) / f"{payload_name(rank)}{TEMPORARY_SUFFIX}"
    with hanging(file, patience_s=PATIENCE_S):
        deadline = time.monotonic() + PATIENCE_S
        while target.client.job(target.job_id).status.step < step + EVERY_STEPS and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(2.0)  # the fault itself
    yield


def _folder(target: Target) -> Path:
    return Path(target.client.checkpoints(target.job_id)[0].url.removeprefix("file://")).parent


CONTROL = "control"
_CONTROL_S = 15.0
NETEM = {"loss": ("netem", "loss", "15%"), "delay": ("netem", "delay", "60ms")}
TOKEN_BUCKET = {
    "loss": ("tbf", "rate", "2mbit", "burst", "16kb", "limit", "24kb"),
    "delay": ("tbf", "rate", "2mbit", "burst", "16kb", "limit", "400kb"),
}


def link_tool(hosts: Hosts) -> str:
    """Says which means `loss` and `delay` use on this machine."""
    if has_netem(hosts):
        return "`loss` and `delay` are netem's."
    return "The kernel has no netem: `loss` and `delay` are token buckets of 2 Mbit/s with a short and a long queue."


@cache
def has_netem(hosts: Hosts) -> bool:
    space = hosts.namespace(hosts.ips[0])
    device = ("ip", "netns", "exec", space, "tc", "qdisc")
    tried = subprocess.run([*device, "add", "dev", "lo", "root", *NETEM["delay"]], capture_output=True)
    if tried.returncode == 0:
        subprocess.run([*device, "del", "dev", "lo", "root"], check=True)
    return tried.returncode == 0


def _link(name: str) -> Callable[[Target, int], AbstractContextManager[None]]:
    @contextmanager
    def inject(target: Target, rank: int) -> Iterator[None]:
        space = target.hosts.namespace(target.worker(rank).node_ip)
        device = ("ip", "netns", "exec", space, "tc", "qdisc")
        discipline = NETEM[name] if has_netem(target.hosts) else TOKEN_BUCKET[name]
        subprocess.run([*device, "add", "dev", "eth0", "root", *discipline], check=True)
        try:
            yield
        finally:
            subprocess.run([*device, "del", "dev", "eth0", "root"], check=True)

    return inject


@contextmanager
def _stop(target: Target, rank: int) -> Iterator[None]:
    pid = target.worker(rank).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _nan(target: Target, rank: int) -> Iterator[None]:
    (target.gate / f"nan-{rank}").touch()
    yield
    (target.gate / f"nan-{rank}").unlink(missing_ok=True)


KINDS = {
    "cpu": Kind(_cpu, "worker.slow"),
    "data": Kind(_data, "worker.slow"),
    "storage": Kind(_storage, "worker.slow"),
    "loss": Kind(_link("loss"), "worker.slow"),
    "delay": Kind(_link("delay"), "worker.slow"),
    "stop": Kind(_stop, "incident.suspected"),
    "nan": Kind(_nan, "step.skipped"),
}


@dataclass(frozen=True)
class Outcome:
    """The result of one injection."""

    kind: str
    rank: int
    named: tuple[int, ...] | None
    """The ranks of the first suspect; None: nobody was named in time."""
    resource: str
    after_s: float | None
    """Seconds from the injection to the suspect."""
    innocent: tuple[int, ...]
    """Ranks that were suspected until the end of the injection, or whose node was, without being guilty."""
    words: str

    @property
    def is_right(self) -> bool:
        return not self.innocent if self.kind == CONTROL else self.named == (self.rank,)


def run(target: Target, kind: str, rank: int) -> Outcome:
    if kind == CONTROL:
        return _control(target)
    how, begun, after = KINDS[kind], time.time(), target.last_event()
    ranks = _ranks_of_nodes(target)
    with how.inject(target, rank):
        found = _first(target, how.event, after)
    innocent = tuple(sorted(_suspected_since(target, after, ranks) - {rank}))
    if found is None:
        return Outcome(kind, rank, None, "", None, innocent, "no rank was named")
    suspect = found.data.get("suspect") or {}
    return Outcome(
        kind=kind,
        rank=rank,
        named=_suspects(found),
        resource=suspect.get("resource", "numbers" if kind == "nan" else ""),
        after_s=found.at - begun,
        innocent=innocent,
        words=found.message,
    )


def _control(target: Target) -> Outcome:
    after, ranks = target.last_event(), _ranks_of_nodes(target)
    end_mono = time.monotonic() + _CONTROL_S
    while (left_s := end_mono - time.monotonic()) > 0:
        target.client.events_page(target.job_id, after=target.last_event(), wait_s=min(2.0, left_s))
    suspected = tuple(sorted(_suspected_since(target, after, ranks)))
    words = "no rank was suspected" if not suspected else "suspected without a fault"
    return Outcome(CONTROL, -1, suspected or None, "", None, suspected, words)


def _ranks_of_nodes(target: Target) -> dict[str, int]:
    return {worker.node_id: worker.rank for worker in target.client.workers(target.job_id) if worker.rank is not None}


def _suspected_since(target: Target, after: int, ranks: dict[str, int]) -> set[int]:
    """Ranks that were suspected, or whose node was."""
    events = list(target.client.events(target.job_id, after=after))
    nodes = {ranks.get(event.data["node_id"], -1) for event in events if event.type == "node.suspected"}
    return {rank for event in events for rank in _suspects(event) or ()} | nodes


def wait_until_steady(target: Target, steps: int) -> None:
    """Waits until that many further steps are done, without a slow one: the pace of a new group is known then, and what
    other programs did to it is over."""
    begin, group = target.client.job(target.job_id).status.step, 0
    deadline = time.monotonic() + 3 * PATIENCE_S
    while time.monotonic() < deadline:
        status = target.client.job(target.job_id).status
        if status.generation != group or status.workers < 3:
            group, begin = status.generation, status.step
        elif status.step >= begin + steps:
            last = [one.step_s for one in target.client.series(target.job_id, after_step=status.step - steps)]
            if max(last) < 2 * statistics.median(last):
                return
            begin = status.step
        time.sleep(0.1)
    raise RuntimeError(f"the job does not go on: {target.client.job(target.job_id).status}")


def _first(target: Target, type_: str, after: int) -> EventView | None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        page = target.client.events_page(target.job_id, after=after, wait_s=2.0)
        for event in page.items:
            if event.type == type_:
                return event
        after = page.next_after
    return None


def _suspects(event: EventView) -> tuple[int, ...] | None:
    """The suspects that an event names; None: it names none."""
    if event.type == "step.skipped":
        return tuple(event.data["ranks"])
    suspect = event.data.get("suspect")
    return tuple(suspect["ranks"]) if suspect else None
