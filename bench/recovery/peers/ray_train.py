"""Ray Train V2 elastic: a failure ends all workers, and the controller starts a new group from the last checkpoint.

Called by recovery/main.py.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.processes.os_processes import session_members
from kit.processes.ray_nodes import HEAD, Nodes
from measurements.stamps import WorkerStart
from measurements.trial import Emit, Event, Size, System, Victim, strike_all
from recovery.cells import Cells
from recovery.peers.run import PeerRun, emit_watched, kill_raylet, start_peer, strike_in_turn, wait_for_growth
from recovery.workload import WORKERS
from shoal_service.cluster.embedded_cluster import EmbeddedCluster

EVENTS = (Event.CONTROL, Event.WORKER_KILL, Event.WORKER_STOP, Event.RAYLET_KILL, Event.CAPACITY)
_HEALTH_CHECK_S = "0.1"
"""Ray Train's controller polls its workers this often; its default is 2 s."""
_NODE_EVENTS = {Event.RAYLET_KILL, Event.CAPACITY}


def run_events(events: set[Event], folder: Path, cells: Cells, emit: Emit) -> None:
    """Run on the kind of cluster that Shoal embeds, so that Ray is the same for both. Node events get a node per
    worker."""
    chance = random.Random(cells.seed)

    def strike_workers(remaining: list[Event]) -> None:
        with _running(folder / f"one-node-{remaining[0]}", cells.params, num_nodes=1) as run:
            strike_in_turn(run, remaining, cells, chance, emit)

    def strike_nodes(remaining: list[Event]) -> None:
        place = folder / f"nodes-{remaining[0]}"
        with _running(place, cells.params, num_nodes=WORKERS) as run:
            _strike_nodes(run, Nodes(place), cells, chance, emit)

    strike_all(System.RAY_TRAIN, [event for event in EVENTS if event in events - _NODE_EVENTS], emit, strike_workers)
    strike_all(System.RAY_TRAIN, [event for event in EVENTS if event in events & _NODE_EVENTS], emit, strike_nodes)


@contextmanager
def _running(folder: Path, params: Size, *, num_nodes: int) -> Iterator[PeerRun]:
    cluster = EmbeddedCluster(folder, num_cpus=WORKERS, num_nodes=num_nodes)
    try:
        cluster.start()
        run = _start(folder, params)
        try:
            yield run
        finally:
            run.end()
    finally:
        cluster.stop()


def _start(folder: Path, params: Size) -> PeerRun:
    nodes = Nodes(folder)
    environment = {**os.environ, **nodes.environment, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": _HEALTH_CHECK_S}
    command = [sys.executable, str(Path(__file__).parent / "ray_train_driver.py"), str(folder), nodes.address]
    return start_peer(System.RAY_TRAIN, folder, params, command, environment)


def _strike_nodes(run: PeerRun, nodes: Nodes, cells: Cells, chance: random.Random, emit: Emit) -> None:
    """Kill the raylet of a node with a worker but without head and controller; then add a node and measure the growth.

    A kill takes about three minutes: before the next one the node must be back.
    """
    try:
        for _ in range(cells.left(System.RAY_TRAIN, Event.RAYLET_KILL, Victim.AWAY)):
            run.wait_for_random_moment(chance)
            ip, victim = chance.choice(_victims(run, nodes))
            trial, at = kill_raylet(run, nodes, ip, victim)
            nodes.remove(ip)
            joined_at = nodes.add(ip, num_cpus=1)
            wait_for_growth(run, joined_at, WORKERS, emit)
            emit_watched(run, trial, at, cells.window_s, emit)
    finally:
        nodes.end_added()


def _victims(run: PeerRun, nodes: Nodes) -> list[tuple[str, WorkerStart]]:
    found = []
    for ip in nodes.ips():
        processes = {
            pid: command for session in nodes.sessions(ip) for pid, command in session_members(session).items()
        }
        if ip != HEAD and not any("TrainController" in command for command in processes.values()):
            found += [(ip, worker) for worker in run.group() if worker.pid in processes]
    return found
