"""A harness for real groups: shard processes forked from a zygote, driven over sockets as an actor would drive them."""

from __future__ import annotations

import json
import os
import queue
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, get_args

import pytest

from shoal_workers.checkpoint.commit import newest_committed, write_marker
from shoal_workers.contract.layout import Layout, fully_sharded
from shoal_workers.contract.marker import CommitMarker
from shoal_workers.contract.memory import Endpoint, MemorySource
from shoal_workers.contract.messages import (
    Assignment,
    ExitKind,
    SavedPart,
    ShardExit,
    ShardNews,
    StepReport,
    ValidationReport,
)
from shoal_workers.memory.tier import RamTier

HERE = Path(__file__).parent
PATIENCE_S = 60.0
_KINDS = ("reply", "exit", "reached", "dumped")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.dist)


class Shard:
    """The test's end of one shard process."""

    def __init__(
        self,
        connection: Connection,
        pid: int,
        spec: dict[str, Any],
        root: str,
        has_exit: threading.Event,
        memory: tuple[str, str] | None = None,
    ) -> None:
        """`memory`: directory of the snapshots and node id; None: no RAM tier."""
        self.pid = pid
        self.news: list[ShardNews] = []
        self._seq = 0
        self._connection = connection
        self._inbox: dict[str, queue.Queue[Any]] = {kind: queue.Queue() for kind in _KINDS}
        self._calling = threading.Lock()
        self.gone = threading.Event()
        """The process is dead."""
        self.has_exit = has_exit
        threading.Thread(target=self._receive, daemon=True).start()
        self.node_id = memory[1] if memory else ""
        self.store_port, self.memory_port = self.call("create", spec, root, memory)

    def call(self, name: str, *arguments: Any) -> Any:
        with self._calling:
            self._connection.send((name, arguments))
            return self._inbox["reply"].get(timeout=PATIENCE_S)

    def strike(self, phase: str, step: int, action: str, *, count: int = 1) -> None:
        """`action`: kill, stop, hold or dump, as `phase` is entered the `count`-th time after `step` steps."""
        self.call("strike", phase, step, action, count)

    def reached(self) -> Any:
        return self._inbox["reached"].get(timeout=PATIENCE_S)

    def dumped(self) -> Any:
        """Its part of the state where a strike said `dump`."""
        return self._inbox["dumped"].get(timeout=PATIENCE_S)

    def exit(self, timeout_s: float = PATIENCE_S) -> ShardExit:
        answer = self._inbox["exit"].get(timeout=timeout_s)
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, ShardExit)
        return answer

    def poll(self) -> list[ShardNews]:
        """Everything told so far."""
        answer = self.call("poll", self._seq)
        self._seq = answer.seq
        self.news.extend(answer.news)
        return self.news

    def kill(self, signum: int = signal.SIGKILL) -> None:
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            pass

    def _receive(self) -> None:
        try:
            while True:
                kind, value = self._connection.recv()
                self._inbox[kind].put(value)
                if kind == "exit":
                    self.has_exit.set()
        except (EOFError, OSError):
            self.gone.set()


class Job:
    """Plays the supervisor for the shards of one job."""

    def __init__(self, fleet: Fleet, spec: dict[str, Any], root: Path, memory_root: Path | None) -> None:
        self._fleet = fleet
        self._memory_root = memory_root
        self.spec = {"task": "tiny_tasks:Counting", **spec}
        self.root = str(root)
        self.generation = 0
        self.committed: list[str] = []

    def shards(self, count: int, node_id: str = "n1") -> list[Shard]:
        memory = (str(self._memory_root), node_id) if self._memory_root else None
        return [self._fleet.start(self.spec, self.root, memory) for _ in range(count)]

    @staticmethod
    def in_memory(exits: list[ShardExit], living: list[Shard]) -> MemorySource:
        """The newest snapshot that is whole in the memory of the nodes on which somebody lives."""
        servers = {shard.node_id: Endpoint(node_id=shard.node_id, host="127.0.0.1", port=shard.memory_port)
                   for shard in living}  # fmt: skip
        held: dict[tuple[int, int, int], dict[int, Endpoint]] = {}
        for holding in (holding for shard_exit in exits for holding in shard_exit.holdings):
            if holding.node_id in servers:
                key = holding.step, holding.generation, holding.world_size
                held.setdefault(key, {})[holding.rank] = servers[holding.node_id]
        step, generation, world_size = max(key for key, parts in held.items() if len(parts) == key[2])
        parts = held[step, generation, world_size]
        return MemorySource(
            generation=generation, world_size=world_size, step=step, parts=tuple(parts[r] for r in range(world_size))
        )

    def start(
        self,
        shards: list[Shard],
        *,
        world_size: int | None = None,
        buddy_of: Callable[[int], Shard] | None = None,
        **changes: Any,
    ) -> int:
        """Send the next generation's assignments; returns its number. The first shard is rank 0."""
        self.generation += 1
        self._fleet.has_exit.clear()
        for rank, shard in enumerate(shards):
            values: dict[str, Any] = {
                "job_id": "job",
                "attempt": 1,
                "generation": self.generation,
                "rank": rank,
                "layout": fully_sharded(world_size or len(shards)),
                "store_host": "127.0.0.1",
                "store_port": shards[0].store_port,
                "restore_from": newest_committed(self.root) if Path(self.root).exists() else None,
                "collective_timeout_s": 30.0,
                **changes,
            }
            if buddy_of is not None:
                buddy = buddy_of(rank)
                values["buddy"] = Endpoint(node_id=buddy.node_id, host="127.0.0.1", port=buddy.memory_port)
            shard.call("run", Assignment(**values))
        return self.generation

    def run(self, shards: list[Shard], **changes: Any) -> list[ShardExit]:
        """A whole generation, with its checkpoints committed afterwards."""
        self.start(shards, **changes)
        exits = [shard.exit() for shard in shards]
        self.commit(shards)
        return exits

    def interrupt(self, shards: list[Shard]) -> tuple[list[ShardExit], float]:
        """Interrupt the current generation everywhere; the exits, and the seconds until the last came."""
        start = time.monotonic()
        for shard in shards:
            shard.call("interrupt", self.generation)
        exits = [shard.exit() for shard in shards]
        return exits, time.monotonic() - start

    def wait_for_an_exit(self) -> None:
        assert self._fleet.has_exit.wait(PATIENCE_S)

    def wait_until_committed(self, shards: list[Shard], step: int) -> None:
        """The parts of a checkpoint are written behind training; nothing here says when they are all there."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(f"step-{step:012d}" in directory for directory in self.committed):
            assert time.monotonic() < deadline
            self.commit(shards)

    def commit(self, shards: list[Shard]) -> None:
        """Write the marker of every checkpoint of which all parts were told."""
        parts = [item for shard in shards for item in shard.poll() if isinstance(item, SavedPart)]
        for directory in sorted({part.directory for part in parts} - set(self.committed)):
            own = {part.rank: part for part in parts if part.directory == directory}
            one = next(iter(own.values()))
            if len(own) == one.world_size:
                marker = CommitMarker(
                    job_id="job",
                    attempt=1,
                    generation=one.generation,
                    step=one.step,
                    world_size=one.world_size,
                    committed_at=0.0,
                    files=tuple(file for rank in sorted(own) for file in own[rank].files),
                )
                write_marker(directory, marker)
                self.committed.append(directory)

    def reports(self, shard: Shard) -> list[StepReport]:
        """Of the newest generation."""
        return [r for r in self.told([shard], StepReport) if r.generation == self.generation]

    @staticmethod
    def losses(shards: list[Shard]) -> dict[int, float]:
        """Loss by step; a step that was done again must give what it gave before."""
        losses: dict[int, float] = {}
        for shard in shards:
            for item in shard.news:
                if isinstance(item, StepReport):
                    assert losses.setdefault(item.step, item.loss) == pytest.approx(item.loss, abs=1e-5)
        return losses

    @staticmethod
    def told(shards: list[Shard], kind: type[Any]) -> list[Any]:
        assert issubclass(kind, get_args(ShardNews))
        return [item for shard in shards for item in shard.poll() if isinstance(item, kind)]


class Fleet:
    """Shard processes, all forked from one zygote; every one is gone when its test is over."""

    def __init__(self, directory: Path) -> None:
        self._shards: list[Shard] = []
        self.has_exit = threading.Event()
        """Some shard has left a generation."""
        self._listener = Listener(str(directory / "shards"), family="AF_UNIX")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._zygote = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._zygote.stdout is not None
        assert self._zygote.stdout.readline() == b"ready\n"

    def start(self, spec: dict[str, Any], root: str, memory: tuple[str, str] | None = None) -> Shard:
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(f"{self._listener.address}\n".encode())
        self._zygote.stdin.flush()
        connection = self._listener.accept()
        shard = Shard(connection, connection.recv()[1], spec, root, self.has_exit, memory)
        self._shards.append(shard)
        return shard

    def kill_all(self) -> None:
        for shard in self._shards:
            shard.kill()
            shard._connection.close()
        self._shards.clear()

    def close(self) -> None:
        self.kill_all()
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.wait(timeout=10)
        self._zygote.stdout.close()
        self._listener.close()


@pytest.fixture(scope="session")
def _zygote_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(_zygote_fleet: Fleet) -> Iterator[Fleet]:
    yield _zygote_fleet
    _zygote_fleet.kill_all()


@pytest.fixture
def make_job(fleet: Fleet, tmp_path: Path) -> Any:
    """`make_job(**spec)`: a job with the tiny task; its checkpoints, and snapshots if `memory`, lie under tmp_path."""

    def make(root: str = "job", *, memory: bool = False, **spec: Any) -> Job:
        memory_root = tmp_path / f"{root}-memory" if memory else None
        if memory_root:
            memory_root.mkdir()
        return Job(fleet, spec, tmp_path / root, memory_root)

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[..., dict[int, float]]:
    """`reference(steps, **spec)`: the losses of the undisturbed run in plain torch, by step."""
    run = runpy.run_path(str(HERE / "reference.py"))["losses"]
    known: dict[str, dict[int, float]] = {}

    def losses(steps: int, **spec: Any) -> dict[int, float]:
        key = json.dumps([steps, spec], sort_keys=True)
        if key not in known:
            known[key] = {step: seen[0] for step, seen in run(spec, steps).items()}
        return known[key]

    return losses


@dataclass(frozen=True)
class Plain:
    """What the undisturbed run in plain torch has seen; steps count from 1."""

    losses: dict[int, float]
    norms: dict[int, float]
    validation: float


@pytest.fixture(scope="session")
def plain_run() -> Callable[[dict[str, Any]], Plain]:
    """`plain_run(spec)`: of a whole spec that says stop.steps and validates."""
    run = runpy.run_path(str(HERE / "reference.py"))["validation_loss"]
    known: dict[str, Plain] = {}

    def plain(spec: dict[str, Any]) -> Plain:
        key = json.dumps(spec, sort_keys=True)
        if key not in known:
            validation, seen = run(spec, spec["stop"]["steps"])
            known[key] = Plain(
                losses={step: values[0] for step, values in seen.items()},
                norms={step: values[1] for step, values in seen.items()},
                validation=validation,
            )
        return known[key]

    return plain


class Crew:
    """Shards of one job that outlive a test: each test is a generation of its own from the seed, under its layout."""

    def __init__(self, fleet: Fleet, spec: dict[str, Any], root: Path) -> None:
        self.spec = spec
        self._fleet = fleet
        self._job = Job(fleet, spec, root, None)
        self._shards: list[Shard] = []

    def train(self, layout: Layout) -> Plain:
        """From the seed to the last step."""
        missing = layout.world_size - len(self._shards)
        self._shards += self._job.shards(missing) if missing > 0 else []
        members = self._shards[: layout.world_size]
        try:
            self._job.start(members, layout=layout, restore_from=None, store_timeout_s=90.0)
            exits = [shard.exit(timeout_s=150.0) for shard in members]  # eight processes on two busy cores are slow
            self._job.commit(members)
            faults = {shard_exit.error.traceback for shard_exit in exits if shard_exit.error}
            assert [one.kind for one in exits] == [ExitKind.FINISHED] * len(members), "\n".join(sorted(faults))
        except BaseException:  # whoever may still hang must not be met by the next test
            self._fleet.kill_all()
            self._shards.clear()
            raise
        shutil.rmtree(self._job.root)
        generation = self._job.generation
        told = [item for item in members[0].poll() if getattr(item, "generation", None) == generation]
        steps = [item for item in told if isinstance(item, StepReport)]
        (validation,) = [item.loss for item in told if isinstance(item, ValidationReport)]
        return Plain({r.step: r.loss for r in steps}, {r.step: r.grad_norm for r in steps}, validation)


@pytest.fixture(scope="module")
def crew_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[dict[str, Any]], Crew]]:
    """`crew_of(spec)`: living shards; those of another spec are gone then."""
    fleet = Fleet(tmp_path_factory.mktemp("crew"))
    crew: Crew | None = None

    def find(spec: dict[str, Any]) -> Crew:
        nonlocal crew
        if crew is None or crew.spec != spec:
            fleet.kill_all()
            crew = Crew(fleet, spec, tmp_path_factory.mktemp("job") / "checkpoints")
        return crew

    yield find
    fleet.close()


@pytest.fixture(scope="session")
def answer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`answer_of("context_attention.py", *arguments)`: what rank 0 of a program of this folder found; see `ranks`."""

    def answer(name: str, *arguments: Any) -> Any:
        store_file = tmp_path_factory.mktemp("store") / "store"
        program = subprocess.Popen(
            [sys.executable, HERE / name, store_file, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            told, errors = program.communicate(timeout=150)
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()
        assert program.returncode == 0, errors
        return json.loads(told.splitlines()[-1])

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
    """RAM tiers of one attempt in this process, on whatever nodes the test wants; all are closed when it is over."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tiers: list[tuple[RamTier, Endpoint]] = []

    def start(self, node_id: str = "a", **changes: Any) -> RamTier:
        names = {"job_id": "job", "attempt": 1, "shard_id": f"s{len(self._tiers)}", "key": "secret", **changes}
        tier = RamTier(node_id=node_id, root=self.root, **names)
        self._tiers.append((tier, Endpoint(node_id=node_id, host="127.0.0.1", port=tier.port)))
        return tier

    def endpoint(self, tier: RamTier) -> Endpoint:
        return next(endpoint for known, endpoint in self._tiers if known is tier)

    def source(self, *tiers: RamTier, step: int, generation: int = 1) -> MemorySource:
        """A snapshot of which rank r's part is asked for at the r-th tier."""
        parts = tuple(self.endpoint(tier) for tier in tiers)
        return MemorySource(generation=generation, world_size=len(parts), step=step, parts=parts)

    def close(self) -> None:
        for tier, _ in self._tiers:
            tier.close()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="shoal-test-", dir="/dev/shm") as folder:
        nodes = Nodes(Path(folder))
        yield nodes
        nodes.close()
        assert list(nodes.root.iterdir()) == [], "something is left in shared memory"
