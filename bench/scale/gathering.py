"""What an exchange of N ranks costs the rendezvous store of rank 0: CPU seconds, bytes, seconds until all are done.

    python bench/scale/gathering.py [--ranks 64,256,1024] [--rounds 5] [--ways keys,gather,arrive,decide,tree]

    keys     set one's value, wait for the N keys, read the N values: three requests of each rank
    gather   one request of each rank; the store joins the values once and sends all of them N times
    tree     blocks of 32 gather at the store of their first rank, these gather at the root, and hand the values down
    decide   all values go to rank 0, and one text comes back
    arrive   nothing comes back: a barrier

The ranks are threads in two processes that speak the store's protocol over real connections; the stores are threads of
a third process. CPU seconds are of the threads of the stores alone, so the load of the machine hardly changes them. A
figure is the median of the rounds after the first. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.append(str(Path(__file__).parents[2] / "tools"))

from measurements.machine import describe
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import Assignment
from shoal_workers.engine.group.rendezvous import Rendezvous, StoreConnections
from shoal_workers.engine.group.store.client import GenerationStore, StoreConnection
from shoal_workers.engine.group.store.messages import Space
from shoal_workers.engine.group.store.server import StoreServer

HOST = "127.0.0.1"
_KEY = "gathering"
_BLOCK = 32
_PROCESSES = 2
_PATIENCE_S = 600.0
_VALUE = '[["10.0.12.134", 40123]]'
"""A value as long as the address that a rank listens on."""


@dataclass(frozen=True, slots=True)
class Figures:
    done_s: float
    """Seconds until the last rank has its answer."""
    root_s: float
    """CPU seconds of the store of rank 0."""
    stores_s: float
    """Seconds of all stores together."""
    received_bytes: int
    """Bytes that all ranks receive."""


class Rank:
    """One rank with its connections, in all rounds."""

    def __init__(self, rank: int, world: int, ports: list[int]) -> None:
        self.rank, self.world, self.ports = rank, world, ports
        self.connections = StoreConnections(_KEY)
        self._block: StoreConnection | None = None

    def exchange(self, way: str, generation: int, start: threading.Event) -> int:
        """Returns the bytes of the values that it has received."""
        start.wait()
        rendezvous = Rendezvous(self._assignment(generation), self.connections, lambda: None)
        if way == "tree":
            return self._tree(generation, rendezvous)
        rendezvous.connect()
        found: list[str] = []
        match way:
            case "keys":
                keys = [f"x/{rank}" for rank in range(self.world)]
                rendezvous.store.set(keys[self.rank], _VALUE)
                rendezvous.store.wait(keys)
                found = [value.decode() for value in rendezvous.store.multi_get(keys)]
            case "gather":
                found = rendezvous.gather("x", _VALUE)
            case "arrive":
                rendezvous.arrive("x")
            case "decide":
                found = [rendezvous.decide("x", _VALUE, lambda values: str(len(values)))]
        assert len(found) == {"arrive": 0, "decide": 1}.get(way, self.world)
        rendezvous.close()
        return sum(map(len, found))

    def _tree(self, generation: int, rendezvous: Rendezvous) -> int:
        block, place = divmod(self.rank, _BLOCK)
        size = min(_BLOCK, self.world - block * _BLOCK)
        store = self._block_store(self.ports[1 + block], generation)
        limit = timedelta(seconds=_PATIENCE_S)
        if place:
            store.arrive("up", place, size, _VALUE, limit)
            joined = store.get("down").decode()
        else:
            own = json.dumps(store.gather("up", place, size, _VALUE, limit))
            rendezvous.connect()
            num_blocks = len(self.ports) - 1
            joined = json.dumps(rendezvous.store.gather("x", block, num_blocks, own, limit))
            store.set("down", joined)
            rendezvous.close()
        assert sum(len(json.loads(one)) for one in json.loads(joined)) == self.world
        return len(joined)

    def _block_store(self, port: int, generation: int) -> GenerationStore:
        if self._block is None:
            self._block = StoreConnection((HOST, port), _KEY, check=lambda: None, patience_s=_PATIENCE_S)
        limit = timedelta(seconds=_PATIENCE_S)
        return GenerationStore(self._block, Space(generation, "tree"), check=lambda: None, timeout=limit)

    def _assignment(self, generation: int) -> Assignment:
        return Assignment(
            job_id="bench",
            attempt=1,
            generation=generation,
            rank=self.rank,
            layout=fully_sharded(self.world),
            store_host=HOST,
            store_port=self.ports[0],
            restore_from=None,
            store_timeout_s=_PATIENCE_S,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,256,1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default="keys,gather,tree,decide,arrive")
    arguments = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    results: dict[str, Any] = {"machine": describe(), "load_average": os.getloadavg()[0]}
    print("ranks      way   rank 0's store  all stores   received   all done (CPU s, CPU s, MB, s)", flush=True)
    for world in map(int, arguments.ranks.split(",")):
        for way in arguments.ways.split(","):
            found = _measure(way, world, arguments.rounds)
            results[f"{way} {world}"] = found
            line = f"{world:5} {way:>8} {found['root_s']:16.4f} {found['stores_s']:11.4f}"
            print(f"{line} {found['received_bytes'] / 1e6:10.2f} {found['done_s']:10.3f}", flush=True)
    print(json.dumps(results))


def _measure(way: str, world: int, num_rounds: int) -> dict[str, float]:
    """Medians of the rounds after the first, in which the connections are made."""
    num_stores = 1 + (-(-world // _BLOCK) if way == "tree" else 0)
    stores = _forked(lambda end: _serve(end, num_stores))
    ports = stores.recv()
    ends = [
        _forked(lambda end: _run_ranks(end, way, range(n, world, _PROCESSES), world, ports))  # noqa: B023
        for n in range(_PROCESSES)
    ]
    rounds = []
    for generation in range(1, num_rounds + 1):
        before = _asked(stores)
        for end in ends:
            end.send(generation)
        found = [end.recv() for end in ends]
        after = _asked(stores)
        spent = [now - then for now, then in zip(after, before, strict=True)]
        done_s = max(at for _, at in found) - min(began for began, _ in (one[0] for one in found))
        rounds.append(Figures(done_s, spent[0], sum(spent), sum(one[0][1] for one in found)))
    for end in [*ends, stores]:
        end.send(None)
        os.wait()
    return {
        name: statistics.median(getattr(one, name) for one in rounds[1:])
        for name in ("done_s", "root_s", "stores_s", "received_bytes")
    }


def _asked(stores: Connection) -> list[float]:
    stores.send("cpu")
    answer: list[float] = stores.recv()
    return answer


def _forked(run: Callable[[Connection], None]) -> Connection:
    ours, theirs = Pipe()
    if os.fork() == 0:
        code = 1
        try:
            ours.close()
            run(theirs)
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    return ours


def _serve(orders: Connection, num_stores: int) -> None:
    servers = [StoreServer(HOST, _KEY) for _ in range(num_stores)]
    orders.send([server.port for server in servers])
    clocks = [time.pthread_getcpuclockid(server._thread.ident or 0) for server in servers]
    while orders.recv() is not None:
        orders.send([time.clock_gettime(clock) for clock in clocks])


def _run_ranks(orders: Connection, way: str, numbers: range, world: int, ports: list[int]) -> None:
    """Runs the ranks of a process, which begin together. Answers ((when they began, bytes received), when the last one
    was done)."""
    ranks = [Rank(number, world, ports) for number in numbers]
    while (generation := orders.recv()) is not None:
        start = threading.Event()
        with ThreadPoolExecutor(len(ranks)) as threads:
            running = [threads.submit(rank.exchange, way, generation, start) for rank in ranks]
            began = time.monotonic()
            start.set()
            received = sum(one.result() for one in running)
        orders.send(((began, received), time.monotonic()))


if __name__ == "__main__":
    main()
