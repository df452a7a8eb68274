"""Three workers of one node and a slow preparation: it is done once, and all of them show its progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.processes.fleet import RemoteWorker
from shoal_workers.contract.messages import ExitKind


def started(make_job: Callable[..., Any], gate: Path) -> tuple[Any, list[RemoteWorker]]:
    """Three workers whose first generation begins with the preparation."""
    gate.mkdir()
    job = make_job(memory=True, task="tiny_tasks:Slow", data={"gate": str(gate)}, stop={"steps": 2})
    workers = job.workers(3)
    job.start(workers)
    return job, workers


def begun(gate: Path) -> list[int]:
    return [int(path.name.removeprefix("begun-")) for path in gate.glob("begun-*")]


def wait_until_shown(workers: list[RemoteWorker]) -> None:
    """Each of them shows the progress of the worker that prepares."""
    for worker in workers:
        while worker.call("note") != "another worker of this node prepares: half way":
            assert not worker.gone.is_set()


def test_a_node_prepares_once_and_its_other_workers_show_the_progress(make_job: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    _, workers = started(make_job, gate)
    while not begun(gate):
        pass
    [first] = begun(gate)
    wait_until_shown([worker for worker in workers if worker.pid != first])
    (gate / "go").touch()
    assert [worker.exit().kind for worker in workers] == [ExitKind.FINISHED] * 3
    assert begun(gate) == [first], "prepared once"


def test_another_worker_prepares_if_the_first_one_dies(make_job: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job, workers = started(make_job, gate)
    while not begun(gate):
        pass
    [first] = begun(gate)
    others = [worker for worker in workers if worker.pid != first]
    wait_until_shown(others)
    next(worker for worker in workers if worker.pid == first).kill()
    while len(begun(gate)) < 2:
        pass
    (gate / "go").touch()
    job.interrupt(others)
    job.start(others, world_size=2)
    assert [worker.exit().kind for worker in others] == [ExitKind.FINISHED] * 2
    assert len(begun(gate)) == 2, "by the first one, and by one of the others"
