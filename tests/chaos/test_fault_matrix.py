"""Every fault at every moment: the job ends, its losses are those of an undisturbed run, and no process is left.

`fault_matrix.yaml` defines the cells. Processes take long to start, so `make test-slow` runs a fixed sample in chains:
a job that goes through one cell after the other. `make test-all` also runs the rare chains and every cell in a job of
its own.
Moments are addressed by (rank, step, phase): the worker is held at that point while the fault happens.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.processes.os_processes import is_alive
from kit.processes.storage_faults import absent, hanging, locked
from shoal_api.client import Client
from shoal_service.core.attempt.placement import buddies
from shoal_service.views import JobView, WorkerView
from shoal_workers.contract.job import JobState
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import WorkerInfo

MATRIX = yaml.safe_load((Path(__file__).parent / "fault_matrix.yaml").read_text())
WORKERS = 3
STEPS = 12
"""Steps that one cell trains."""
_BUILT_IN = "struck:BuiltIn"
_LAST = ("finishing", "committing")
"""Moments after the last step."""
_PATIENCE_S = 120.0


def _every_cell() -> list[Any]:
    return [
        pytest.param([(fault, moment)], id=f"{fault}-{moment}", marks=pytest.mark.matrix)
        for fault in MATRIX["faults"]
        for moment in MATRIX["moments"]
        if moment not in MATRIX["never"].get(fault, {})
    ]


def _sample() -> list[Any]:
    return [
        pytest.param(cells, id=name, marks=pytest.mark.matrix if name in MATRIX["rare"] else ())
        for name, cells in MATRIX["sample"].items()
    ]


@pytest.fixture
def client(arena: Any) -> Iterator[Client]:
    """A client of the repaired cluster. A fixture, so that a job which a failed test leaves behind is still
    cancelled."""
    arena.mend()
    with arena.server.client as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed_built_in(submit_for_module: Any) -> Callable[[], dict[int, float]]:
    """Losses by step of a run without faults that trains with the built-in optimizer. The first call runs the job."""

    @cache
    def losses() -> dict[int, float]:
        run = submit_for_module(task=_BUILT_IN, workers=2, steps=72)
        run.finish()
        found: dict[int, float] = run.losses()
        return found

    return losses


@pytest.mark.cells(len(MATRIX["sample"]))
@pytest.mark.parametrize("cells", [*_sample(), *_every_cell()])
def test_a_fault_costs_no_job_and_changes_no_loss(
    cells: list[tuple[str, str]], client: Client, submit: Any, arena: Any, undisturbed_built_in: Any
) -> None:
    chain = Chain(arena, cells, submit, undisturbed_built_in)
    chain.run()

    job = chain.job.finish()
    chain.assert_few_steps_are_lost(job)
    chain.job.assert_undisturbed_losses()
    chain.assert_nothing_is_left()


@pytest.mark.first
def test_every_cell_is_run_or_has_a_reason() -> None:
    faults, moments = set(MATRIX["faults"]), set(MATRIX["moments"])
    assert len(faults) == 11 and len(moments) == 9
    for section in ("never", "steps_lost"):
        assert set(MATRIX[section]) <= faults, section
        assert all(set(cells) <= moments for cells in MATRIX[section].values()), section
    assert all(len(reason) > 30 for cells in MATRIX["never"].values() for reason in cells.values())
    sampled = [cell for cells in MATRIX["sample"].values() for cell in cells]
    assert {fault for fault, _ in sampled} == faults, "the sample has every fault"
    assert {moment for _, moment in sampled} == moments, "and every moment"
    for cells in MATRIX["sample"].values():
        assert len({bool(MATRIX["moments"][moment].get("copies")) for _, moment in cells}) == 1, "one task for a chain"
        inner = [moment for _, moment in cells[1:]]
        assert not {"start_up", "re_forming"} & set(inner), "these two are counted from the job's start: first only"
        assert not set(_LAST) & {moment for _, moment in cells[:-1]}


def _most_steps_lost(fault: str, moment: str) -> int:
    found = MATRIX["steps_lost"].get(fault, {}).get(moment, MATRIX["faults"][fault]["steps_lost"])
    assert isinstance(found, int)
    return found


@dataclass(frozen=True)
class Held:
    """A worker process that is held at its moment."""

    name: str
    pid: int


@dataclass(frozen=True)
class Cell:
    """One fault at one moment of one step of the job."""

    fault: str
    moment: str
    offset: int

    @property
    def hold(self) -> dict[str, Any]:
        return self._shifted(MATRIX["moments"][self.moment]["hold"])

    @property
    def first(self) -> dict[str, Any] | None:
        """Where a process is killed to bring the moment about."""
        found = MATRIX["moments"][self.moment].get("first")
        return self._shifted(found) if found else None

    @property
    def later(self) -> dict[str, Any] | None:
        """The second hold of the job, during which the cluster is repaired."""
        return None if self.moment in _LAST else self._shifted({"phase": "forward", "n": 10, "rank": 0})

    @property
    def copies(self) -> bool:
        """The state has to be copied after every step, for the moment to come about."""
        return bool(MATRIX["moments"][self.moment].get("copies"))

    @property
    def standbys(self) -> int:
        """How many the job must have, for one to be left when the moment comes: none is started while a group forms."""
        return 0 if self.fault != "standby" else 1 if self.first is None else 2

    @property
    def is_training(self) -> bool:
        return self.moment in ("forward", "backward", "optimizer", "snapshot", "durable_save")

    @property
    def holds(self) -> list[dict[str, Any]]:
        return [hold for hold in (self.first, self.hold, self.later) if hold is not None]

    def _shifted(self, hold: dict[str, Any]) -> dict[str, Any]:
        return hold if hold["phase"] in ("preparing", "building") else {**hold, "n": hold["n"] + self.offset}


class Chain:
    """One job that goes through several cells, one after the other."""

    def __init__(
        self,
        arena: Any,
        cells: list[tuple[str, str]],
        submit: Callable[..., Any],
        undisturbed_built_in: Callable[[], dict[int, float]],
    ) -> None:
        self._arena = arena
        self._cells = [Cell(fault, moment, STEPS * number) for number, (fault, moment) in enumerate(cells)]
        self._checkpoints = arena.server.state_dir / "checkpoints"
        kind: dict[str, Any] = (
            {"task": "struck:Struck", "snapshot": {"budget": 1.0}}
            if self._cells[0].copies
            else {"task": _BUILT_IN, "snapshot": {}, "reference": undisturbed_built_in}
        )
        self.job = submit(
            workers=WORKERS,
            steps=STEPS * len(cells),
            **kind,
            holds=[hold for cell in self._cells for hold in cell.holds],
            parallelism={"dp_shard": "auto"},  # whole states need no buddy
            elasticity={"standby": max(cell.standbys for cell in self._cells)},
            health={"probation_s": 1.0},
            timeouts={"save_s": 10.0},  # storage that answers does so within it, also on a busy machine
        )
        self._lost_before = self._num_incidents = 0

    def run(self) -> None:
        """Run all cells; afterwards the job only has to finish."""
        for cell in self._cells:
            self._live_through(cell)

    def _live_through(self, cell: Cell) -> None:
        if cell.first is not None:
            os.kill(self._wait_at(cell.first).pid, signal.SIGKILL)
        held = self._wait_at(cell.hold)
        with self._struck(cell, held):
            self.job.release(held.name)
            if cell.is_training and cell.later is not None:
                self._wait_at(cell.later)
        if cell.later is not None:
            later = self._wait_at(cell.later)
            if cell is not self._cells[-1]:
                _until(self._is_at_full_strength, "the group is to be whole again")
                self._assert_few_steps_were_lost_in(cell, self.job.now())
            self.job.release(later.name)

    def _is_at_full_strength(self) -> bool:
        """All live workers are in the group, or are warm and the group is about to switch. While a supervisor is dead,
        the service returns its last report."""
        workers = [one for one in self.job.client.workers(self.job.id) if is_alive(one.pid)]
        if sum(one.state in ("warm", "training") for one in workers) < WORKERS:
            return False
        in_group = sum(one.rank is not None for one in workers)
        return in_group == WORKERS or self.job.now().status.state is JobState.RESIZING

    def assert_few_steps_are_lost(self, job: JobView) -> None:
        """In the last cell; in the others it was asserted when the group was whole again."""
        self._assert_few_steps_were_lost_in(self._cells[-1], job)

    def _assert_few_steps_were_lost_in(self, cell: Cell, job: JobView) -> None:
        """Cell by cell, since a sum would let one cell lose what another one saves."""
        lost, self._lost_before = job.status.steps_lost - self._lost_before, job.status.steps_lost
        incidents = self.job.client.incidents(self.job.id)
        new, self._num_incidents = incidents[self._num_incidents :], len(incidents)
        # A lost node costs what had not reached its buddy: the incident says how many steps, by the measured cost.
        said = [one.node_loss.at_most or 0 for one in new if one.node_loss is not None]
        most = max(_most_steps_lost(cell.fault, cell.moment), *said, 0)
        assert lost <= most, f"{cell}\n{self.job.incident_lines()}"

    def assert_nothing_is_left(self) -> None:
        started = {event.data["pid"]: event.data["worker_id"] for event in self.job.events("worker.started")}
        _until(
            lambda: not any(map(is_alive, started)),
            "all processes of the job are gone",
            lambda: {name: _look_of(pid) for pid, name in started.items() if is_alive(pid)},
        )
        for actor in ("WorkerActor", "SupervisorActor"):
            _until(lambda actor=actor: not self._arena.nodes.pids_of(actor), f"no {actor} is left")
        _until(self._is_every_cpu_free, "every CPU is free again")
        names = [path.name for path in self._checkpoints.rglob("*")]
        assert [name for name in names if name.endswith(".writing") or name.startswith("write-probe")] == []
        memory = list(Path("/dev/shm").glob(f"shoal-*/{self.job.id}-*"))
        _until(lambda: not any(path.exists() for path in memory), "its shared memory is gone")

    def _is_every_cpu_free(self) -> bool:
        seen = self.job.client.cluster()
        return seen.connected and seen.cpus_free == seen.cpus_total

    @contextmanager
    def _struck(self, cell: Cell, held: Held) -> Iterator[None]:
        """The fault happens on entry; what has to come back comes back on leaving."""
        nodes, server = self._arena.nodes, self._arena.server
        match cell.fault:
            case "worker":
                os.kill(held.pid, signal.SIGKILL)
                yield
            case "two_workers":
                other = next(pid for pid in self._pids() if pid != held.pid and is_alive(pid))
                os.kill(other, signal.SIGKILL)
                os.kill(held.pid, signal.SIGKILL)
                yield
            case "buddy":
                # until the next report, the list of workers may still name a worker that the last cell killed
                _until(lambda: all(is_alive(one.pid) for one in self._ranked()), "every worker of the group is alive")
                os.kill(self._buddy_of(held.pid).pid, signal.SIGKILL)
                yield
            case "node":
                ip = nodes.ip_of(held.pid)
                nodes.kill_raylet(ip)
                _until(lambda: not is_alive(held.pid), "the node's processes die of it")
                nodes.remove(ip)
                yield
            case "head":
                nodes.kill_head()  # the control plane restarts it within seconds, during which training continues
                if not cell.is_training:
                    _until(nodes.is_head_alive, "the head is back")
                yield
                _until(nodes.is_head_alive, "the head is back")
            case "supervisor":
                [supervisor] = nodes.pids_of("SupervisorActor")
                os.kill(supervisor, signal.SIGKILL)
                yield
            case "control_plane":
                server.kill()
                try:
                    yield
                finally:
                    server.start().wait_for_cluster()
            case "standby":
                _until(lambda: self._standby() is not None, "there is a warm standby")
                standby = self._standby()
                assert standby is not None
                os.kill(standby.pid, signal.SIGKILL)
                yield
            case "storage":
                with absent(self._checkpoints):
                    yield
                    self.job.wait_for_event("checkpoint.failed")
            case "storage_hangs":
                with hanging(self._next_part(cell), patience_s=_PATIENCE_S):
                    yield
                    self.job.wait_for_event("checkpoint.failed")
            case "database":
                with locked(server.state_dir / "shoal.db"):
                    yield
            case fault:
                raise AssertionError(f"{fault} is not a fault of the matrix")

    def _wait_at(self, hold: dict[str, Any]) -> Held:
        """Does not call the service, which may be the target of the fault."""
        name = "-".join(str(hold[key]) for key in ("phase", "n", "rank") if key in hold)
        reached = self.job.gate / f"{name}.reached"
        _until(reached.exists, f"{self.job.id} reaches {name}")
        return Held(name, int(reached.read_text()))

    def _pids(self) -> list[int]:
        """Pids of all processes of the job that are known by now; in start-up they are not warm yet."""
        return [int(path.read_text()) for path in sorted(self.job.gate.glob("process-*.pid"))]

    def _ranked(self) -> list[WorkerView]:
        ranked = [one for one in self.job.client.workers(self.job.id) if one.rank is not None]
        return sorted(ranked, key=lambda one: one.rank or 0)

    def _buddy_of(self, pid: int) -> WorkerView:
        ranked = self._ranked()
        infos = [
            WorkerInfo(
                worker_id=one.worker_id,
                node_id=one.node_id,
                node_ip=one.node_ip,
                pid=one.pid,
                store_port=1,
                device="cpu",
                snapshot_port=one.pid,
            )
            for one in ranked
        ]
        endpoint = next(
            buddy
            for buddy, one in zip(buddies(infos, fully_sharded(len(infos))), ranked, strict=True)
            if one.pid == pid
        )
        assert endpoint is not None, "the group is on one node"
        return next(one for one in ranked if one.pid == endpoint.port)

    def _next_part(self, cell: Cell) -> Path:
        """Rank 1's file in the next checkpoint while it is written."""
        step = cell.offset + (STEPS if cell.moment == "finishing" else 8)
        name = str(CheckpointName(step, 1, max(1, self.job.now().status.generation)))
        return self._checkpoints / self.job.id / name / "shard-00001.bin.writing"

    def _standby(self) -> WorkerView | None:
        """A worker that the group does not need."""
        workers = [one for one in self.job.client.workers(self.job.id) if is_alive(one.pid)]
        if sum(one.rank is not None for one in workers) < WORKERS:
            return None
        return next((one for one in workers if one.rank is None and one.state == "warm"), None)


def _until(condition: Callable[[], Any], what: str, explain: Callable[[], Any] = lambda: "") -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {_PATIENCE_S:.0f} s {explain()}"
        time.sleep(0.02)


def _look_of(pid: int) -> list[str]:
    """The command line of a process that should have ended."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return [title, *(line for line in status if line.startswith(("State", "PPid", "Threads", "Sig")))]
