"""Seconds until a passive control plane acts, after the active one was killed or stopped in order.

    python bench/recovery/takeover.py [--trials 5] [--databases sqlite,postgres] [--hosts]

Two `shoal serve` with state directories of their own share one database and one Ray cluster. In turns the one that
holds the lease is killed with SIGKILL or stopped with SIGTERM; the clock runs from the signal until the other one
holds the lease. Then the first is started again as the passive one. With `--hosts` each server has a PID namespace of
its own, so it cannot see the other's process, as on two hosts (PostgreSQL; needs `unshare` and root; killed only). The
last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from kit.postgres import running_postgres
from kit.processes.server import Server, until
from measurements.machine import describe
from shoal_service.store import Store

_POLL_S = 0.005
_LONGEST_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5, help="of each kind")
    parser.add_argument("--databases", default="sqlite,postgres")
    parser.add_argument("--hosts", action="store_true", help="the servers cannot see each other's processes")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {}
    for name in arguments.databases.split(","):
        with tempfile.TemporaryDirectory(prefix="shoal-takeover-") as folder, _database(name, Path(folder)) as url:
            _measure(name, url, Path(folder), arguments.trials, arguments.hosts, found)
    rows = {
        key: {"min": min(values), "median": statistics.median(values), "max": max(values), "trials": len(values)}
        for key, values in found.items()
    }
    print(json.dumps({"machine": describe(), "seconds": rows}))


def _measure(name: str, url: str, folder: Path, trials: int, hosts: bool, found: dict[str, list[float]]) -> None:
    python = Path(sys.executable)
    if hosts:
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec unshare --pid --fork --kill-child {sys.executable} "$@"\n')
        python.chmod(0o755)
    first = Server(Path(sys.executable), folder / "a", ["--num-cpus=1", "--keep-cluster", f"--database-url={url}"])
    first.start().wait_for_cluster()
    assert first.note is not None
    options = [f"--ray-address={first.note['address']}", f"--database-url={url}"]
    servers = [Server(python, folder / name, options, first.ray_environment) for name in "bc"]
    store = Store.open(url)
    try:
        first.stop()  # its cluster stays
        for server in servers:
            server.start().wait_for_cluster()
            until(store.read_lease, "a server has the lease", _LONGEST_S)
        for number in range(trials if hosts else 2 * trials):
            way = (signal.SIGKILL, signal.SIGTERM)[0 if hosts else number // 2 % 2]
            active, passive = servers[number % 2], servers[1 - number % 2]
            took_s = _strike(active, way, store)
            kind = "killed" if way is signal.SIGKILL else "stopped"
            key = f"{name}{', two hosts' if hosts else ''}, {kind}"
            found.setdefault(key, []).append(took_s)
            print(f"{key}: {took_s:.2f} s", flush=True)
            active.start().wait_for_cluster()
            assert passive.process is not None and passive.process.poll() is None
    finally:
        store.close()
        for server in (*servers, first):
            if server.process is not None and server.process.poll() is None:
                server.process.kill()
            server.sweep()


def _strike(active: Server, way: signal.Signals, store: Store) -> float:
    """Kills the owner of the lease. Returns the seconds until the other one has the lease."""
    before = store.read_lease()
    assert before is not None and active.process is not None
    began = time.monotonic()
    active.process.send_signal(way)
    while (lease := store.read_lease()) is None or lease.epoch == before.epoch:
        assert time.monotonic() - began < _LONGEST_S, "nobody takes the lease"
        time.sleep(_POLL_S)
    took_s = time.monotonic() - began
    active.process.wait()
    return took_s


@contextlib.contextmanager
def _database(name: str, folder: Path) -> Iterator[str]:
    if name == "sqlite":
        yield f"sqlite:///{folder}/shared.db"
        return
    with running_postgres() as server:
        yield server.url("postgres")


if __name__ == "__main__":
    main()
