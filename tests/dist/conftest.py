"""Fixtures of tests with real groups: the processes are those of tests/kit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes.fleet import Fleet, Job
from kit.processes.warm import close_shared_zygote, warm_python
from kit.processes.worker_pool import Plain, WorkerPool
from kit.worlds import plain_reference
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.snapshot_store.store import SnapshotStore

HERE = Path(__file__).parent
PROGRAMS = HERE.parent / "kit" / "programs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.dist)


@pytest.fixture(scope="session", autouse=True)
def _one_zygote() -> Iterator[None]:
    """The first test that needs it starts it."""
    yield
    close_shared_zygote()


@pytest.fixture(scope="session")
def _zygote_fleet(_one_zygote: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(_zygote_fleet: Fleet) -> Iterator[Fleet]:
    yield _zygote_fleet
    _zygote_fleet.kill_all()


@pytest.fixture
def make_job(fleet: Fleet, tmp_path: Path) -> Any:
    """`make_job(**spec)`: a job with the tiny task; its checkpoints, and snapshots if `memory`, lie under tmp_path.
    `by_axis`: as of `Engine`."""

    def make(root: str = "job", *, memory: bool = False, by_axis: bool | None = None, **spec: Any) -> Job:
        memory_root = tmp_path / f"{root}-memory" if memory else None
        if memory_root:
            memory_root.mkdir()
        return Job(fleet, spec, tmp_path / root, memory_root, by_axis)

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[..., dict[int, float]]:
    """`reference(steps, **spec)`: the losses of the undisturbed run in plain torch, by step."""
    run = plain_reference.losses
    known: dict[str, dict[int, float]] = {}

    def losses(steps: int, **spec: Any) -> dict[int, float]:
        key = json.dumps([steps, spec], sort_keys=True)
        if key not in known:
            known[key] = {step: seen[0] for step, seen in run(spec, steps).items()}
        return known[key]

    return losses


@pytest.fixture(scope="session")
def plain_run() -> Callable[[dict[str, Any]], Plain]:
    """`plain_run(spec)`: losses, norms and validation of the undisturbed run. The spec has stop.steps and
    validation."""
    run = plain_reference.validation_loss
    known: dict[str, Plain] = {}

    def plain(spec: dict[str, Any]) -> Plain:
        key = json.dumps(spec, sort_keys=True)
        if key not in known:
            validation, seen = run(spec, spec["stop"]["steps"])
            known[key] = Plain(
                losses={step: values[0] for step, values in seen.items()},
                norms={step: values[1] for step, values in seen.items()},
                validation=validation,
                metrics={step: values[3] for step, values in seen.items()},
            )
        return known[key]

    return plain


@pytest.fixture(scope="module")
def pool_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[dict[str, Any]], WorkerPool]]:
    """`pool_of(spec)`: live workers for this spec. A call with another spec ends those of the previous one."""
    fleet = Fleet(tmp_path_factory.mktemp("pool"))
    pool: WorkerPool | None = None

    def find(spec: dict[str, Any]) -> WorkerPool:
        nonlocal pool
        if pool is None or pool.spec != spec:
            fleet.kill_all()
            pool = WorkerPool(fleet, spec, tmp_path_factory.mktemp("job") / "checkpoints")
        return pool

    yield find
    fleet.close()


@pytest.fixture(scope="session")
def answer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`answer_of("direct_collectives.py", *arguments)`: what rank 0 of a program of kit/programs found; see `ranks`."""

    def answer(name: str, *arguments: Any) -> Any:
        store_file = tmp_path_factory.mktemp("store") / "store"
        program = subprocess.Popen(
            [warm_python(), PROGRAMS / name, store_file, *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            _, errors = program.communicate(timeout=150)
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()
        assert program.returncode == 0, errors
        return json.loads(Path(f"{store_file}.answer").read_text(encoding="utf-8"))

    return answer


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory of files that a tiny language model reads, the same ones on every machine."""
    folder = tmp_path_factory.mktemp("text") / "files"
    folder.mkdir()
    for number in range(20):
        lines = (f"{a} and {number} make {a + number}, {a} times {number} make {a * number}." for a in range(60))
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return str(folder)


class Nodes:
    """Snapshot stores of one attempt in this process, on the nodes that the test names; closed after the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stores: list[tuple[SnapshotStore, SnapshotServer]] = []

    def start(self, node_id: str = "a", **changes: Any) -> SnapshotStore:
        names = {"job_id": "job", "attempt": 1, "worker_id": f"s{len(self._stores)}", "key": "secret", **changes}
        store = SnapshotStore(node_id=node_id, root=self.root, **names)
        self._stores.append((store, SnapshotServer(node_id=node_id, host="127.0.0.1", port=store.port)))
        return store

    def server(self, store: SnapshotStore) -> SnapshotServer:
        return next(server for known, server in self._stores if known is store)

    def source(self, *stores: SnapshotStore, step: int, generation: int = 1) -> SnapshotSource:
        """A snapshot whose part of rank r is read from the r-th store."""
        parts = tuple(self.server(store) for store in stores)
        return SnapshotSource(generation=generation, world_size=len(parts), step=step, parts=parts)

    def close(self) -> None:
        for store, _ in self._stores:
            store.close()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="shoal-test-", dir="/dev/shm") as folder:
        nodes = Nodes(Path(folder))
        yield nodes
        nodes.close()
        assert list(nodes.root.iterdir()) == [], "something is left in shared memory"
