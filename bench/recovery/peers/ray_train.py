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
from measurements.trial import Emit, Event, System, strike_all
from recovery.peers.run import PeerRun, kill_raylet, start_peer, strike_in_turn, wait_for_growth
from recovery.workload import WORKERS
from shoal_service.cluster.embedded_cluster import EmbeddedCluster

EVENTS = (Event.WORKER_KILL, Event.WORKER_STOP, Event.RAYLET_KILL, Event.CAPACITY)
_NODE_EVENTS = {Event.RAYLET_KILL, Event.CAPACITY}
_MOST_RAYLET_KILLS = 1


def run_events(events: set[Event], folder: Path, *, kills: int, seed: int, emit: Emit) -> None:
    """Run on the kind of cluster that Shoal embeds, so that Ray is the same for both. Node events get a node per
    worker."""
    chance = random.Random(seed)

    def strike_workers(remaining: list[Event]) -> None:
        with _running(folder / f"one-node-{remaining[0]}", num_nodes=1) as run:
            strike_in_turn(run, remaining, kills, chance, emit)

    def strike_nodes(remaining: list[Event]) -> None:
        place = folder / f"nodes-{remaining[0]}"
        with _running(place, num_nodes=WORKERS) as run:
            _strike_nodes(run, Nodes(place), set(remaining), kills, chance, emit)

    strike_all(System.RAY_TRAIN, [event for event in EVENTS if event in events - _NODE_EVENTS], emit, strike_workers)
    strike_all(System.RAY_TRAIN, [event for event in EVENTS if event in events & _NODE_EVENTS], emit, strike_nodes)


@contextmanager
def _running(folder: Path, *, num_nodes: int) -> Iterator[PeerRun]:
    cluster = EmbeddedCluster(folder, num_cpus=WORKERS, num_nodes=num_nodes)
    try:
        cluster.start()
        run = _start(folder)
        try:
            yield run
        finally:
            run.end()
    finally:
        cluster.stop()


def _start(folder: Path) -> PeerRun:
    nodes = Nodes(folder)
    environment = {**os.environ, **nodes.environment}
    command = [sys.executable, str(Path(__file__).parent / "ray_train_driver.py"), str(folder), nodes.address]
    return start_peer(System.RAY_TRAIN, folder, command, environment)


def _strike_nodes(
    run: PeerRun, nodes: Nodes, events: set[Event], kills: int, chance: random.Random, emit: Emit
) -> None:
    """Kill the raylet of a node with a worker but without head and controller; then add a node and measure the growth.

    `kills` is bounded: before each further kill the node must be back, which takes more than a minute.
    """
    try:
        for _ in range(min(kills, _MOST_RAYLET_KILLS)):
            run.wait_for_random_moment(chance)
            ip, victim = chance.choice(_victims(run, nodes))
            kill_raylet(run, nodes, ip, victim, emit)
            nodes.remove(ip)
            if Event.CAPACITY in events:
                joined_at = nodes.add(ip, num_cpus=1)
                wait_for_growth(run, joined_at, WORKERS, emit)
            else:
                break  # 3 workers are left, and Ray Train would wait a minute before it grew
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
