"""No group needs a name server: one that never answers delays neither start, nor re-forming, nor growing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes import silent_resolver
from kit.processes.fleet import Fleet, Job
from kit.processes.warm import Zygote
from shoal_workers.contract.messages import ExitKind

SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 1},
    "stop": {"steps": 6},
    "checkpoint": {"every_steps": 100},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 5},
    "snapshot": {"budget": 1.0},
}


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    """The names that were asked for, one per line."""
    if not silent_resolver.is_permitted():
        pytest.skip("this user may not make network and mount namespaces (root may)")
    path = tmp_path / "queries"
    path.touch()
    return path


@pytest.fixture
def isolated_fleet(tmp_path: Path, queries: Path) -> Iterator[Fleet]:
    """Workers on a host whose name server does not answer."""
    folder = tmp_path / "isolated"
    folder.mkdir()
    zygote = Zygote(silent_resolver.command_prefix(queries))
    fleet = Fleet(folder, zygote)
    yield fleet
    fleet.close()
    zygote.close()


@pytest.mark.slow
def test_start_kill_and_grow_ask_no_name_server(isolated_fleet: Fleet, queries: Path, tmp_path: Path) -> None:
    memory_root = tmp_path / "memory"
    memory_root.mkdir()
    job = Job(isolated_fleet, SPEC, tmp_path / "job", memory_root)
    workers = job.workers(4)
    victim, survivors = workers[1], [workers[0], *workers[2:]]
    victim.strike("backward", 2, "kill")
    job.start(workers)
    assert victim.died()
    exits = job.interrupt(survivors)
    survivors[0].strike("forward", 4, "hold")
    generation = job.start(survivors, restore_snapshot=job.in_memory(exits, survivors))
    survivors[0].reached()
    survivors[1].call("request_yield", generation, False)
    survivors[0].call("go")
    exits = [worker.exit() for worker in survivors]
    larger = survivors + job.workers(2)
    ends = job.run(larger, restore_snapshot=job.in_memory(exits, larger))
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * 5
    assert queries.read_text() == ""


def test_the_silent_name_server_records_what_it_is_asked(queries: Path) -> None:
    program = "import socket\ntry: socket.getaddrinfo('somebody.example', 80)\nexcept OSError as error: print(error)"
    asked = subprocess.run(
        [*silent_resolver.command_prefix(queries), sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Temporary failure in name resolution" in asked.stdout
    assert "somebody.example" in queries.read_text()
