"""Runs Shoal through the events: a real `shoal serve` for each combination of cluster and job that they need.

Called by recovery/main.py. The strikes themselves are in strikes.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.processes import hosts
from measurements.trial import Emit, Event, System, Trial, strike_all
from recovery.cells import Cells
from recovery.shoal import strikes
from recovery.shoal.run import ShoalRun
from recovery.shoal.snapshot_cost import compare_snapshots
from recovery.workload import WORKERS
from shoal_server import ShoalServer

_HANG = {"hang_factor": 5.0, "hang_floor_s": 3.0}
"""Small thresholds, so that the figure shows the cost of recovery and not the wait before a hang is declared."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Events that share a cluster and a job."""

    name: str
    events: tuple[Event, ...]
    options: tuple[str, ...]
    settings: dict[str, Any]


_SIZES = (WORKERS - 1, WORKERS)
_ONE_NODE = (f"--num-cpus={WORKERS}",)
_STANDBY_NODE = (f"--num-cpus={WORKERS + 1}",)
_NODES = (f"--num-cpus={WORKERS}", f"--nodes={WORKERS}", "--leave-dead-nodes")
PLANS = (
    Plan(
        "kill",
        (Event.CONTROL, Event.WORKER_KILL, Event.SHRINK, Event.SUPERVISOR_KILL, Event.CONTROL_PLANE_KILL),
        _ONE_NODE,
        {},
    ),
    Plan("standby", (Event.WORKER_KILL_STANDBY,), _STANDBY_NODE, {"elasticity": {"standby": 1}}),
    Plan("hang", (Event.WORKER_STOP,), _ONE_NODE, {"health": _HANG}),
    Plan("nodes", (Event.RAYLET_KILL, Event.CAPACITY, Event.DRAIN, Event.HEAD_KILL), _NODES, {}),
    Plan("hosts", (Event.HOST_CUT,), (), {}),
    Plan("snapshots", (Event.SNAPSHOT_COST,), _ONE_NODE, {}),
)
EVENTS = tuple(event for plan in PLANS for event in plan.events)


def run_events(events: set[Event], folder: Path, cells: Cells, emit: Emit) -> None:
    for plan in PLANS:
        desired = [event for event in plan.events if event in events]
        chance = random.Random(cells.seed)

        def strike(remaining: list[Event], plan: Plan = plan, chance: random.Random = chance) -> None:
            place = folder / f"{plan.name}-{remaining[0]}"
            if remaining == [Event.HOST_CUT]:
                _cut_hosts(plan, place, cells, chance, emit)
            else:
                _run(plan, remaining, place, cells, chance, emit)

        strike_all(System.SHOAL, desired, emit, strike)


def _run(plan: Plan, remaining: list[Event], folder: Path, cells: Cells, chance: random.Random, emit: Emit) -> None:
    """Runs a plan, and removes each event from `remaining` when it is done. `capacity` is measured within
    `raylet_kill`."""
    server = ShoalServer(folder, plan.options)
    try:
        server.start()
        server.wait_for_cpus(WORKERS)
        if Event.SNAPSHOT_COST in remaining:
            compare_snapshots(server, cells.params, emit)
            return
        with _job(server, plan, cells) as run:
            run.calibrate(*_SIZES)
            arena = strikes.Arena(server, run, cells, chance, emit)
            perform: dict[Event, Callable[[], None]] = {
                Event.CONTROL: lambda: strikes.watch_undisturbed(arena),
                Event.WORKER_KILL: lambda: strikes.kill_workers(arena),
                Event.WORKER_KILL_STANDBY: lambda: strikes.kill_workers(arena, standbys=1),
                Event.WORKER_STOP: lambda: strikes.stop_workers(arena),
                Event.RAYLET_KILL: lambda: strikes.kill_raylets(arena),
                Event.DRAIN: lambda: strikes.drain_nodes(arena),
                Event.HEAD_KILL: lambda: strikes.kill_head(arena),
                Event.SHRINK: lambda: strikes.shrink(arena),
                Event.SUPERVISOR_KILL: lambda: strikes.kill_supervisor(arena),
                Event.CONTROL_PLANE_KILL: lambda: strikes.kill_control_plane(arena),
            }
            while remaining:
                perform.get(remaining[0], lambda: None)()
                remaining.pop(0)
    finally:
        server.nodes.end_added()
        server.end()


def _cut_hosts(plan: Plan, folder: Path, cells: Cells, chance: random.Random, emit: Emit) -> None:
    reason = hosts.why_not()
    if reason is not None:
        emit(Trial(System.SHOAL, Event.HOST_CUT, note=f"not run on this machine: {reason}"))
        return
    cluster = hosts.Hosts(folder / "hosts", num_hosts=WORKERS + 1, cpus_per_host=1)
    try:
        cluster.start()
        # The hosts are namespaces of one machine: survivors shall not read the memory of a host that is cut off.
        environment = {**cluster.environment, "SHOAL_SNAPSHOT_SCOPE": "node"}
        server = ShoalServer(folder, cluster.serve_options, environment)
        try:
            server.start()
            server.wait_for_cpus(WORKERS + 1)
            with _job(server, plan, cells) as run:
                run.calibrate(*_SIZES)
                strikes.cut_hosts(cluster, strikes.Arena(server, run, cells, chance, emit))
        finally:
            server.end()
    finally:
        cluster.end()


@contextmanager
def _job(server: ShoalServer, plan: Plan, cells: Cells) -> Iterator[ShoalRun]:
    with server.client as client:
        run = ShoalRun(client, cells.params, **plan.settings)
        yield run
        run.cancel()
