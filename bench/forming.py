"""Seconds to form a gloo group of bare processes: with Shoal's rendezvous store, and with torch's TCPStore.

    python bench/forming.py [--worlds 4,16,32] [--rounds 5]

Each world is a set of forked processes; rank 0 hosts the store. Every round forms a group in the same processes: reach
the store, wait until all ranks have arrived, connect all pairs, one all-reduce. The first round starts without
connections; in later ones Shoal's ranks keep theirs to the store, and TCPStore's clients connect anew. A round takes as
long as its slowest rank. TCPStore asks the name server for the name of each peer, so its figures depend on the
machine's name server. CPU seconds are of all processes of a round together. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.append(str(Path(__file__).parents[1] / "tools"))

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from measurements.machine import describe
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import Assignment
from shoal_workers.engine.group.gloo import shorten_addresses
from shoal_workers.engine.group.network_interface import choose_interface
from shoal_workers.engine.group.rendezvous import Rendezvous, StoreConnections
from shoal_workers.engine.group.store.server import StoreServer

HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=120)
_KEY = "forming"


class Figures(NamedTuple):
    """Seconds of a round, or of one rank in it."""

    arrived_s: float
    """Seconds until all ranks have arrived at the store."""
    formed_s: float
    """Seconds until the all-reduce is done."""
    cpu_s: float
    """CPU of all processes, until the group is destroyed."""


class Shoal:
    def __init__(self) -> None:
        self._connections = StoreConnections(_KEY)

    @staticmethod
    def serve() -> tuple[object, int]:
        server = StoreServer(HOST, _KEY)
        return server, server.port

    def form(self, rank: int, world: int, port: int, generation: int) -> Figures:
        assignment = Assignment(
            job_id="bench",
            attempt=1,
            generation=generation,
            rank=rank,
            layout=fully_sharded(world),
            store_host=HOST,
            store_port=port,
            restore_from=None,
        )
        start, cpu = time.perf_counter(), time.process_time()
        rendezvous = Rendezvous(assignment, self._connections, lambda: None)
        rendezvous.connect()
        rendezvous.arrive("arrived")
        arrived = time.perf_counter()
        _connect_all(PrefixStore("groups", rendezvous.store), rank, world)
        formed = time.perf_counter()
        rendezvous.arrive("left")  # rank 0 hosts the store
        dist.destroy_process_group()
        rendezvous.close()
        return Figures(arrived - start, formed - start, time.process_time() - cpu)


class Torch:
    @staticmethod
    def serve() -> tuple[object, int]:
        server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return server, server.port

    @staticmethod
    def form(rank: int, world: int, port: int, generation: int) -> Figures:
        start, cpu = time.perf_counter(), time.process_time()
        client = TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
        store = PrefixStore(str(generation), client)
        _gather(store, "arrived", rank, world)
        arrived = time.perf_counter()
        _connect_all(PrefixStore("groups", store), rank, world)
        formed = time.perf_counter()
        _gather(store, "left", rank, world)
        dist.destroy_process_group()
        return Figures(arrived - start, formed - start, time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="4,16,32")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    choose_interface(HOST, 1)
    shorten_addresses()
    results: dict[str, Any] = {"machine": describe()}
    print(
        "world          store       first: arrived  formed   CPU    later: arrived  formed   CPU  (seconds)", flush=True
    )
    for world in map(int, arguments.worlds.split(",")):
        for name, way in (("TCPStore", Torch), ("Shoal", Shoal)):
            rounds = _measure(way, world, arguments.rounds)
            first, rest = rounds[0], rounds[1:] or rounds
            later = Figures(*(statistics.median(values) for values in zip(*rest, strict=True)))
            results[f"{name} {world}"] = {"first": first._asdict(), "later": later._asdict()}
            line = f"{world:5}  {name:>12}  {first.arrived_s:20.3f} {first.formed_s:7.3f} {first.cpu_s:6.2f}"
            line += f" {later.arrived_s:16.3f} {later.formed_s:7.3f} {later.cpu_s:6.2f}"
            print(line, flush=True)
    print(json.dumps(results))


def _measure(way: Callable[[], Any], world: int, num_rounds: int) -> list[Figures]:
    """Measures rounds: the times of the slowest rank, and the CPU seconds of all."""
    ends = [_fork(way, rank, world) for rank in range(world)]
    port = ends[0].recv()
    rounds = []
    for generation in range(1, num_rounds + 1):
        for end in ends:
            end.send((port, generation))
        found = [end.recv() for end in ends]
        arrived, formed, cpu = zip(*found, strict=True)
        rounds.append(Figures(max(arrived), max(formed), sum(cpu)))
    for end in ends:
        end.send(None)
    for _ in ends:
        os.wait()
    return rounds


def _fork(way: Callable[[], Any], rank: int, world: int) -> Connection:
    ours, theirs = Pipe()
    if os.fork() == 0:
        code = 1
        try:
            ours.close()
            _run_rank(way(), rank, world, theirs)
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    return ours


def _run_rank(way: Any, rank: int, world: int, orders: Connection) -> None:
    server: object = None
    if rank == 0:
        server, port = way.serve()
        orders.send(port)
    while (order := orders.recv()) is not None:
        orders.send(way.form(rank, world, *order))
    del server


def _connect_all(store: PrefixStore, rank: int, world: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
    dist.all_reduce(torch.ones(1))


def _gather(store: PrefixStore, what: str, rank: int, world: int) -> None:
    store.set(f"{what}/{rank}", "")
    store.wait([f"{what}/{one}" for one in range(world)])


if __name__ == "__main__":
    main()
