"""One real server with one embedded Ray cluster for the tests of `ray/` and `chaos/`, and the jobs that run on it.

It is served from the built wheel, by a virtual environment of its own: what the tests see is what a user installs.
Nothing that it starts may be left at the end, which is asserted. Over 400 lines, because pytest shares fixtures
between two folders only from the file above them, and tests do not import each other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shoal_api.client import Client
from shoal_service.views import EventView, JobView, SeriesPoint
from shoal_workers.contract.job import JobState

ROOT = Path(__file__).parent.parent
TASKS = Path(__file__).parent / "ray" / "tasks"
NUM_CPUS = 8
PATIENCE_S = 120.0
"""Far more than anything takes; a machine that does a lot else must not fail a test."""
_MAIN = "from shoal_api.cli.main import main; main()"
_LIST_LEFT = """
import json, sys, ray
from ray.experimental import internal_kv
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
journal = internal_kv._internal_kv_list(b"", namespace=b"shoal-journal")
groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
print(json.dumps([ray.util.list_named_actors(all_namespaces=True), groups, [key.decode() for key in journal]]))
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in ("ray", "chaos"):
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.timeout(3 * PATIENCE_S))
        if folder == "chaos":
            item.add_marker(pytest.mark.chaos)


def until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Ask somebody else's process or file system, which nothing here can be told by."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.02)
    return found


@dataclass
class Server:
    """A `shoal serve` process. Stopping it is orderly; killing it is not, and leaves the embedded cluster behind."""

    python: Path
    state_dir: Path
    options: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    sessions: set[int] = field(default_factory=set)
    """Every session that this server ever led or whose note it wrote: all its processes are in one of them."""

    def start(self) -> Server:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        log_path = self.state_dir / f"server-{len(self.sessions)}.log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SHOAL_", "PYTHON"))}
        options = [f"--port={self.port}", f"--state-dir={self.state_dir}", *self.options]
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [self.python, "-c", _MAIN, "serve", *options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.state_dir,
                env={**inherited, "OMP_NUM_THREADS": "1", **self.environment},
            )  # fmt: skip
        self.sessions.add(self.process.pid)

        def listening() -> str | None:
            assert self.process is not None and self.process.poll() is None, log_path.read_text()
            lines = [line for line in log_path.read_text().splitlines() if line.startswith("listening on ")]
            return lines[0].rpartition(":")[2] if lines else None

        self.port = int(until(listening, "the server listens"))
        return self

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}")

    def wait_for_cluster(self) -> None:
        with self.client as client:
            until(lambda: client.cluster().connected and client.cluster().cpus_total, "the cluster is up")
        self._learn_sessions()

    def wait_until_free(self) -> None:
        """Until nobody holds a CPU of the cluster, and no shard is left."""
        with self.client as client:
            until(lambda: client.cluster().cpus_free == NUM_CPUS, "all CPUs are free")
        until(lambda: not self.actors("ShardActor"), "all shards are gone")

    def _learn_sessions(self) -> None:
        if self.note is not None:
            self.sessions.update(self.note["pids"])

    @property
    def note(self) -> dict[str, Any] | None:
        """What the server has written down of its embedded cluster."""
        path = self.state_dir / "embedded-cluster.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def ray_environment(self) -> dict[str, str]:
        """What a driver of the embedded cluster needs."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.state_dir / "ray-token"),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes the host's own address for 127.0.0.1
        }

    def kill(self) -> None:
        assert self.process is not None
        self._learn_sessions()
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Its exit status."""
        assert self.process is not None
        self._learn_sessions()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=40)

    def processes(self) -> dict[int, str]:
        """Every process that this server or its cluster started, by pid: its command line."""
        found = {}
        for directory in Path("/proc").iterdir():
            try:
                if not directory.name.isdigit() or os.getsid(int(directory.name)) not in self.sessions:
                    continue
                if (directory / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue  # dead; its parent has not asked yet
                command = (directory / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[int(directory.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def actors(self, kind: str) -> list[int]:
        """Pids of the actors of a class."""
        return [pid for pid, command in self.processes().items() if command.startswith(f"ray::{kind}")]

    def whats_left(self) -> tuple[Any, ...]:
        """Named actors, placement groups and journal entries of the cluster."""
        assert self.note is not None
        left = subprocess.run(
            [self.python, "-c", _LIST_LEFT, self.note["address"]],
            env={**os.environ, **self.ray_environment}, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return tuple(json.loads(left.stdout.splitlines()[-1]))

    def sweep(self) -> dict[int, str]:
        """SIGKILL for whatever is left; what it was."""
        left = self.processes()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return left


@dataclass
class Run:
    """One job of the tiny task, and the gate that its strikes wait at."""

    client: Client
    job: JobView
    gate: Path
    reference: Callable[[], dict[int, float]]

    @property
    def id(self) -> str:
        return self.job.id

    def wait_at(self, name: str, *, with_service: bool = True) -> None:
        """Until a hold or mark strike is reached. Asks the service, if it runs, whether the job still lives."""
        reached = self.gate / f"{name}.reached"
        until(lambda: reached.exists() or (with_service and self._ended()), f"{self.id} reaches {name}")
        assert reached.exists(), self.now().status

    def release(self, name: str) -> None:
        (self.gate / f"{name}.go").touch()

    def now(self) -> JobView:
        return self.client.job(self.id)

    def _ended(self) -> bool:
        return self.now().status.state.ended

    def wait_for(self, state: JobState) -> JobView:
        job = self.client.wait(self.id, until=[state], timeout_s=PATIENCE_S)
        assert job.status.state is state, job.status
        return job

    def finish(self, state: JobState = JobState.SUCCEEDED) -> JobView:
        job = self.wait_for(state)
        events = list(self.client.events(self.id))
        assert [event.seq for event in events] == list(range(1, len(events) + 1)), "an event is missing"
        self.job = job
        return job

    def events(self, type_: str) -> list[EventView]:
        return [event for event in self.client.events(self.id) if event.type == type_]

    def wait_for_step(self, step: int) -> None:
        """Until the service has heard that a step is done."""
        until(lambda: self.now().status.step >= step or self._ended(), f"{self.id} has done step {step}")
        assert self.now().status.step == step

    def wait_for_message(self, text: str) -> str:
        """The message of the job's status, once it says something."""
        until(lambda: text in self.now().status.message or self._ended(), f"{self.id} says {text!r}")
        message = self.now().status.message
        assert text in message
        return message

    def wait_for_event(self, type_: str, count: int = 1) -> EventView:
        """The `count`-th event of a type."""
        after, seen = 0, 0
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            page = self.client.events_page(self.id, after=after, wait_s=5.0)
            for event in page.items:
                seen += event.type == type_
                if seen == count and event.type == type_:
                    return event
            assert page.items or not self._ended(), f"{type_} never came: {self.now().status}"
            after = page.next_after
        raise AssertionError(f"{count} {type_} did not come: {self.now().status}")

    def pids(self) -> dict[int, int]:
        """Of the group's members, by rank."""
        return {worker.rank: worker.pid for worker in self.client.workers(self.id) if worker.rank is not None}

    def world_sizes(self) -> list[int]:
        return [event.data["workers"] for event in self.events("generation.formed")]

    def losses(self) -> dict[int, float]:
        return {point.step: point.loss for point in self.client.series(self.id)}

    def assert_undisturbed_losses(self) -> None:
        """Every step is there, with the loss that a run without any accident has."""
        losses, reference = self.losses(), self.reference()
        assert list(losses) == list(range(1, self.job.spec.stop.steps + 1))
        assert losses == pytest.approx({step: reference[step] for step in losses}, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="session")
def points() -> Callable[[dict[int, float]], tuple[SeriesPoint, ...]]:
    """`points({1: 0.5, 2: 0.4})`: the series of a job with these losses by step."""

    def make(losses: dict[int, float]) -> tuple[SeriesPoint, ...]:
        fixed = {"at": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 1.0, "step_s": 1.0}
        return tuple(
            SeriesPoint(step=step, loss=loss, world_size=2, generation=1, **fixed) for step, loss in losses.items()
        )

    return make


@pytest.fixture(scope="session")
def wheel_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a virtual environment with the built wheel in it; the dependencies are those of this one."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(ROOT)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")], check=True)
    [site_packages] = (place / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        wheel.extractall(site_packages)
    # A plain path: the .pth files in there, that of the editable install among them, are not followed.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "venv" / "bin" / "python"


@pytest.fixture(scope="session")
def shoal_server(wheel_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of the session, with a Ray cluster of 8 logical CPUs."""
    # By default Ray gives its workers niceness 15: next to anything else that runs here they would starve.
    environment = {"RAY_worker_niceness": "0"}
    server = Server(wheel_python, tmp_path_factory.mktemp("server"), [f"--num-cpus={NUM_CPUS}"], environment)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends pytest ends what it started
    try:
        server.start().wait_for_cluster()
        yield server
        assert_nothing_is_left(server)
        note = server.note
        assert note is not None
        assert server.stop() == 0
        assert server.processes() == {}, "an orderly stop leaves processes behind"
        assert not Path(note["temp_dir"]).exists()
    finally:
        signal.signal(signal.SIGTERM, previous)
        if server.process is not None and server.process.poll() is None:
            server.kill()
        note = server.note
        server.sweep()
        if note is not None:
            shutil.rmtree(note["temp_dir"], ignore_errors=True)


def assert_nothing_is_left(server: Server) -> None:
    """Every job has ended: the cluster is as empty as before the first, and so is the storage of what is unfinished."""
    with server.client as client:
        assert all(job.state.ended for job in client.jobs())
    server.wait_until_free()
    until(lambda: not server.actors("SupervisorActor"), "all supervisors are gone")
    assert server.whats_left() == ([], [], [])
    names = [path.name for path in (server.state_dir / "checkpoints").rglob("*")]
    assert [name for name in names if name.endswith(".writing") or name.startswith("write-probe")] == []


@pytest.fixture
def join_cluster(shoal_server: Server) -> Iterator[Callable[..., Server]]:
    """`join_cluster(state_dir, options, environment)`: another control plane, not started, for the same cluster."""
    servers: list[Server] = []

    def make(state_dir: Path, options: list[str], environment: dict[str, str]) -> Server:
        note = shoal_server.note
        assert note is not None
        options = [f"--ray-address={note['address']}", *options]
        servers.append(Server(shoal_server.python, state_dir, options, {**shoal_server.ray_environment, **environment}))
        return servers[-1]

    yield make
    for server in servers:
        if server.process is not None and server.process.poll() is None:
            assert server.stop() == 0
        assert server.sweep() == {}


@pytest.fixture
def client(shoal_server: Server) -> Iterator[Client]:
    with shoal_server.client as client:
        yield client


@pytest.fixture(scope="session")
def undisturbed_job(shoal_server: Server, tmp_path_factory: pytest.TempPathFactory) -> JobView:
    """A run that nothing happens to. The learning rate is constant: shorter runs are its prefix."""
    with shoal_server.client as client:
        run = submit_tiny(client, tmp_path_factory.mktemp("undisturbed"), dict, workers=2, steps=72)
        return run.finish()


@pytest.fixture(scope="session")
def undisturbed(shoal_server: Server, request: pytest.FixtureRequest) -> Callable[[], dict[int, float]]:
    """Its losses by step; it runs when somebody asks for the first time."""

    @cache
    def losses() -> dict[int, float]:
        job: JobView = request.getfixturevalue("undisturbed_job")
        with shoal_server.client as client:
            return {point.step: point.loss for point in client.series(job.id)}

    return losses


@dataclass
class Submit:
    """`submit(workers=3, strikes=[...], **spec)`: a job of the tiny task; `to`: another service than the session's."""

    client: Client
    directory: Path
    reference: Callable[[], dict[int, float]]
    runs: list[Run] = field(default_factory=list)

    def __call__(self, *, to: Client | None = None, **settings: Any) -> Run:
        gate = self.directory / f"gate-{len(self.runs)}"
        gate.mkdir()
        self.runs.append(submit_tiny(to or self.client, gate, self.reference, **settings))
        return self.runs[-1]

    def cancel_all(self) -> None:
        for run in self.runs:
            if not run.job.status.state.ended and not run.now().status.state.ended:
                run.client.cancel(run.id)
                run.client.wait(run.id, timeout_s=PATIENCE_S)


@pytest.fixture
def submit(client: Client, tmp_path: Path, undisturbed: Callable[[], dict[int, float]]) -> Iterator[Submit]:
    """Jobs that a test leaves are cancelled."""
    submit = Submit(client, tmp_path, undisturbed)
    yield submit
    submit.cancel_all()


@pytest.fixture(scope="module")
def submit_for_module(
    shoal_server: Server, tmp_path_factory: pytest.TempPathFactory, undisturbed: Callable[[], dict[int, float]]
) -> Iterator[Submit]:
    """The same, for jobs that several tests look at."""
    with shoal_server.client as client:
        submit = Submit(client, tmp_path_factory.mktemp("gates"), undisturbed)
        yield submit
        submit.cancel_all()


def submit_tiny(
    client: Client,
    gate: Path,
    reference: Callable[[], dict[int, float]],
    *,
    workers: int = 2,
    min_workers: int = 1,
    steps: int = 20,
    strikes: list[dict[str, Any]] | None = None,
    step_s: float = 0.0,
    waves: Sequence[int] | None = None,
    holds: list[dict[str, Any]] | None = None,
    **spec: Any,
) -> Run:
    elasticity = {"min_workers": min_workers, "max_workers": workers, **spec.pop("elasticity", {})}
    document = {
        "name": "tiny",
        "task": "tiny:Tiny",
        "code": {"working_dir": str(TASKS)},
        "data": {
            "gate": str(gate),
            "strikes": strikes or [],
            "step_s": step_s,
            "waves": waves or [workers],
            "holds": holds or [],
        },
        "batch": {"global_size": 10, "micro_size": 2},
        "optimizer": {"lr": 0.01},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "stop": {"steps": steps},
        "elasticity": elasticity,
        "checkpoint": {"every_steps": 4},
        "snapshot": {"budget": 1.0},  # after each step, however short it is
        **spec,
        # whoever is held waits for others, who may be slow: it is no hang unless a test says so
        "health": {"hang_floor_s": 600.0, **spec.get("health", {})},
    }
    return Run(client, client.submit(document), gate, reference)
