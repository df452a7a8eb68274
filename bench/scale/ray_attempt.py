"""One attempt over Ray for bench/scale/ray_actors.py: the shipped supervisor, and workers that only answer.

A driver of a running cluster. The supervisor is started as the control plane starts it, and a thread stores its reports
as the control plane does. Prints the figures of each number of workers as a line of JSON.

    python bench/scale/ray_attempt.py ADDRESS FOLDER NODES WORKERS,... TRAIN_S KILLS AGENTS_FROM
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

import ray
from kit.processes.os_processes import cpu_seconds, send
from ray import cloudpickle
from scale import thin_actors
from scale.control_plane import ControlPlane
from scale.thin_actors import FORMED, TOTAL_STEPS, SupervisorActorOfThinWorkers, notes_of
from shoal_service.cluster import gcs
from shoal_service.gateway.ray_cluster import RayCluster
from shoal_service.reports import SupervisorReports
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.ids import NAMESPACE, supervisor_name
from shoal_workers.contract.spec import JobSpec

_PATIENCE_S = 300.0
_LOOK_S = 0.01
_SILENT = "node.silent"
_AGENTS_S = 15.0
"""Time until agents poll the workers."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of bench/scale/ray_actors.py."""

    train_s: float
    num_kills: int
    agents_from: int


def main(address: str, folder: str, num_nodes: int, numbers: list[int], options: Options) -> None:
    cloudpickle.register_pickle_by_value(thin_actors)  # the nodes of the cluster do not have it
    cluster = RayCluster(SupervisorActorOfThinWorkers)
    cluster.connect(address)
    with Attempt(cluster, Path(folder), num_nodes, 0) as first:  # the nodes start their fork servers now
        first.until_whole(0, num_nodes)
    for number in numbers:
        with Attempt(cluster, Path(folder), number, options.agents_from) as attempt:
            print(json.dumps(_figures(attempt, options)), flush=True)
    cluster.disconnect()


class Attempt:
    """The first attempt of a job with `num_workers` workers. The context ends all of its actors."""

    def __init__(self, cluster: RayCluster, folder: Path, num_workers: int, agents_from: int) -> None:
        self.num_workers = num_workers
        self._cluster = cluster
        place = folder / uuid.uuid4().hex
        place.mkdir()
        spec = _spec(num_workers)
        self._control_plane = ControlPlane(place, spec, num_workers)
        self.config = SupervisorConfig(
            job_id=self._control_plane.job_id,
            attempt=1,
            spec=spec,
            checkpoint_root=str(place / "checkpoints"),
            granted=num_workers,
            epoch=self._control_plane.epoch,
            spec_version=1,
            snapshot_key="secret",
            agents_from=agents_from,
        )
        self.notes = notes_of(self.config.checkpoint_root)
        self.suspected: set[str] = set()
        self.end = ""
        self.load = 0.0

    def __enter__(self) -> Attempt:
        self.began_at = time.time()
        nodes = [node for node in gcs.nodes() if node.is_alive and node.resources.get("CPU")]
        places = {node.node_id: -(-self.num_workers // len(nodes)) for node in nodes}
        self._cluster.start_supervisor(self.config, avoid_nodes=frozenset(), places=places)
        actor = self._actor = ray.get_actor(supervisor_name(self.config.job_id, 1), namespace=NAMESPACE)
        self._control_plane.follow(self._pull, self._seen)
        self.pid: int = ray.get(actor.pid.remote(), timeout=_PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._control_plane.close()
        self._cluster.reap(self.config.job_id, 1)

    def _pull(self, after: int, wait_s: float) -> SupervisorReports:
        reports: SupervisorReports = ray.get(self._actor.pull.remote(after, wait_s))
        return reports

    def _seen(self, reports: SupervisorReports) -> None:
        self.suspected |= {f"{node.node_id}: {node.reason}" for node in reports.suspects}
        self.suspected |= {f"{event.type}: {event.data}" for event in reports.events if event.type == _SILENT}
        if reports.end is not None:
            self.end = reports.end.message

    def cpu_s(self) -> float:
        """CPU seconds of the supervisor's process."""
        return cpu_seconds(self.pid)

    def until_whole(self, after: int, world_size: int | None = None) -> int:
        """Waits for the first generation after this one in which each rank has got `run`; `world_size`: only one of
        that size."""

        def newer() -> int:
            numbers = sorted(int(path.name) for path in self.notes.iterdir()) if self.notes.exists() else []
            return next((n for n in numbers if n > after and self._is_whole(n, world_size)), 0)

        return int(self._until(newer, f"a group of {world_size or 'any number of'} workers"))

    def until_formed(self, generation: int) -> None:
        self._until((self.notes / str(generation) / FORMED).exists, f"generation {generation} trains")

    def _is_whole(self, generation: int, world_size: int | None) -> bool:
        folder = self.notes / str(generation)
        names = {path.name for path in folder.iterdir()}
        num = sum(name.isdigit() for name in names)
        if "0" not in names or world_size not in (None, num):
            return False
        return num == int(json.loads((folder / "0").read_text())["of"])

    def arrivals(self, generation: int) -> dict[int, dict[str, Any]]:
        """When `run` arrived at each rank, at which worker, and the worker's pid."""
        folder = self.notes / str(generation)
        return {int(path.name): json.loads(path.read_text()) for path in folder.iterdir() if path.name.isdigit()}

    def last_arrival(self, generation: int) -> float:
        return max(arrival["at"] for arrival in self.arrivals(generation).values())

    def _until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := condition()):
            assert not self.end, f"the attempt ended before {what}: {self.end}"
            assert time.monotonic() < deadline, f"not within {_PATIENCE_S:g} s: {what}"
            self.load = max(self.load, os.getloadavg()[0])
            time.sleep(_LOOK_S)  # files of other processes
        return found


def _figures(attempt: Attempt, options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {"workers": attempt.num_workers, "evicted": 0}
    generation = attempt.until_whole(0, attempt.num_workers)
    found["start_s"] = attempt.last_arrival(generation) - attempt.began_at
    found["start_cpu_s"] = attempt.cpu_s()
    attempt.until_formed(generation)
    time.sleep(_AGENTS_S if options.agents_from else 2.0)  # of undisturbed training, as the next one
    began, cpu_s = time.perf_counter(), attempt.cpu_s()
    time.sleep(options.train_s)
    found["train_cpu_share"] = (attempt.cpu_s() - cpu_s) / (time.perf_counter() - began)
    found["supervisor_mib"] = _mib(attempt.pid)
    pids = [arrival["pid"] for arrival in attempt.arrivals(generation).values()]
    found["worker_mib"] = statistics.fmean(_mib(pid) for pid in pids)
    kills = []
    for number in range(options.num_kills):
        before = attempt.arrivals(generation)
        nodes = sorted({arrival["node"] for arrival in before.values()})
        node = nodes[number % len(nodes)]  # another one each time: a node that loses three in a row is suspected
        victim = next(arrival for rank, arrival in before.items() if rank and arrival["node"] == node)
        cpu_s, at = attempt.cpu_s(), send(victim["pid"], signal.SIGKILL)
        next_one = attempt.until_whole(generation)
        kills.append((attempt.last_arrival(next_one) - at, attempt.cpu_s() - cpu_s))
        healthy = {arrival["worker"] for arrival in before.values()} - {victim["worker"]}
        generation = attempt.until_whole(next_one, attempt.num_workers)
        remaining = {arrival["worker"] for arrival in attempt.arrivals(generation).values()}
        found["evicted"] += len(healthy - remaining)
        attempt.until_formed(generation)
        time.sleep(1.0)  # a few steps, of which there are snapshots
    found["kill_s"] = statistics.median(seconds for seconds, _ in kills)
    found["kill_max_s"] = max(seconds for seconds, _ in kills)
    found["kill_cpu_s"] = statistics.median(cpu_s for _, cpu_s in kills)
    found["suspected"] = len(attempt.suspected)
    print("\n".join(attempt.suspected), file=sys.stderr, end="\n" if attempt.suspected else "")
    found["load"] = max(attempt.load, os.getloadavg()[0])
    return found


def _mib(pid: int) -> float:
    """Resident memory; a page that several processes share counts for each of them in part (Linux: Pss)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def _spec(num_workers: int) -> JobSpec:
    return parse_spec(
        {
            "name": "thin-workers",
            "model": {"dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 32},
            "data": {"corpus": "python-stdlib"},
            "batch": {"global_size": num_workers, "micro_size": 1},
            "stop": {"steps": TOTAL_STEPS},
            "elasticity": {"min_workers": 1, "max_workers": num_workers},
            "placement": "spread",
            "retry": {"max_recoveries": 1_000_000},
        }
    )


if __name__ == "__main__":
    address, folder, nodes, workers, train_s, kills, agents_from = sys.argv[1:]
    options = Options(float(train_s), int(kills), int(agents_from))
    main(address, folder, int(nodes), [int(number) for number in workers.split(",")], options)
