"""One real server with one embedded Ray cluster for `browser/`, `ray/` and `chaos/`, and the jobs that run on it.

The server runs from the built wheel in a virtual environment of its own, so the tests see what a user installs.
A check at the end asserts that nothing it started is left.
"""

import faulthandler
import inspect
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from doubles.event_loop import run
from kit.cells import leave_out_most
from kit.databases import MigratedDatabases
from kit.guard.guard import DUMPS_S, LAST_S, guard_this_process, left_behind, stacks
from kit.postgres import MISSING, PostgresServer, is_installed, running_postgres
from kit.processes.server import NUM_CPUS, PATIENCE_S, SERVICE_SECRETS, Server, assert_nothing_is_left
from kit.requirements import missing
from kit.worlds.tiny_jobs import Submit, submit_tiny
from run_tests import AFTERWARDS
from shoal_api.client import Client
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.views import JobView
from shoal_workers.package_sets import remove, root_of_node

ROOT = Path(__file__).parent.parent
_LAST_THREADS_S = 60.0

# Properties are about results, not about speed: a busy machine must not fail them. `make test` checks the same examples
# in every run, so that a change is judged by what it changed; `make test-all` looks for new ones.
for name, is_same, examples in (("same", True, 30), ("explore", False, 60)):
    settings.register_profile(
        name, deadline=None, max_examples=examples, derandomize=is_same, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("same")


_STDERR = pytest.StashKey[int]()
"""The descriptor of this process's standard error, which is captured otherwise."""
_LEFT: list[str] = []
"""What the tests of this process have left behind, once they have ended."""


def pytest_configure(config: pytest.Config) -> None:
    guard_this_process()
    config.stash[_STDERR] = os.dup(sys.__stderr__.fileno())  # pytest captures nothing until the tests are collected


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End this process, with its stacks, if its limit does not end a test: native code that waits takes no signal."""
    marker = item.get_closest_marker("timeout")
    limit_s = marker.args[0] if marker is not None else float(item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + LAST_S, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: as its class says, else on the event loop without threads."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    getattr(pyfuncitem.instance, "run", run)(test)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that took too long shows what the processes that it waits for do, beside its own threads."""
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        faulthandler.dump_traceback_later(2 * DUMPS_S, exit=True, file=item.config.stash[_STDERR])  # a limit anew
        report.sections.append(("stacks of the processes of this run", stacks()))
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Processes that are left fail the run. Fixtures of the session have ended theirs by now."""
    _LEFT.extend(left_behind())
    if _LEFT and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if _LEFT and _FAILED:
        with Path(_FAILED).open("a", encoding="utf-8") as names:
            names.write(f"{AFTERWARDS}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _LEFT:
        terminalreporter.section("processes that the tests have left behind", red=True)
        terminalreporter.write_line("\n".join(_LEFT))


def pytest_unconfigure() -> None:
    """A thread that a failed test has left would keep this process, and with it `make test`, from ending for ever."""
    faulthandler.dump_traceback_later(_LAST_THREADS_S, exit=True, file=sys.__stderr__)


_FAILED = os.environ.pop("SHOAL_FAILED_TESTS", "")
"""Where tools/run_tests.py reads which tests have failed. Not for what tests start."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and _FAILED:
        with Path(_FAILED).open("a", encoding="utf-8") as names:
            names.write(f"{AFTERWARDS if report.when == 'teardown' else report.nodeid}\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    in_folders = [(item.path.relative_to(ROOT / "tests").parts[0], item) for item in items]
    leave_out_most(in_folders)
    for folder, item in in_folders:
        if folder in ("browser", "ray", "chaos"):
            item.add_marker(pytest.mark.ray)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(3 * PATIENCE_S))
        if folder == "chaos":
            item.add_marker(pytest.mark.chaos)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for all tests; each takes a schema or a database of its own."""
    if not is_installed():
        missing("postgres", MISSING)
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> MigratedDatabases:
    return MigratedDatabases(tmp_path_factory.mktemp("migrated"), lambda: request.getfixturevalue("postgres"))


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
    """Python of a virtual environment with the wheel in it that is built from the sdist; the dependencies are those of
    this one. Both files are two folders above.

    A test that runs pytest itself passes its own (SHOALTEST_WHEEL_PYTHON)."""
    if given := os.environ.get("SHOALTEST_WHEEL_PYTHON"):
        return Path(given)
    shared = os.environ.get("SHOALTEST_SHARED")  # a folder of all processes of tools/run_tests.py
    place = Path(shared, "wheel") if shared else tmp_path_factory.mktemp("wheel")
    python = place / "venv" / "bin" / "python"
    with FileLock(f"{place}.lock"):
        if not python.exists():
            building = place.with_name("wheel-in-the-making")
            _build_environment(building)
            building.rename(place)
    return python


def _build_environment(place: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(ROOT)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")], check=True)
    [site_packages] = (place / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        wheel.extractall(site_packages)
    compiles = [sys.executable, "-m", "compileall", "-q", str(site_packages)]  # as pip does: else each process would
    subprocess.run(compiles, check=True)
    # A plain path: the .pth files in there, that of the editable install among them, are not followed.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (place / "venv" / "bin" / "py-spy").symlink_to(Path(sys.executable).with_name("py-spy"))


@pytest.fixture(scope="session")
def _no_directories_of_jobs_are_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Those of jobs whose storage is below the temporary directory of this run."""
    yield
    jobs = root_of_node().parent / "jobs"
    for note in jobs.glob("*.json"):
        if json.loads(note.read_text())["root"].startswith(str(tmp_path_factory.getbasetemp())):
            remove(jobs, note.stem, for_s=0)


@pytest.fixture(scope="session")
def shoal_server(
    _no_directories_of_jobs_are_left: None, wheel_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The server of the session, with a Ray cluster of 8 logical CPUs."""
    # By default Ray gives its workers niceness 15: next to anything else that runs here they would starve.
    environment = {"RAY_worker_niceness": "0", **SERVICE_SECRETS}
    server = Server(wheel_python, tmp_path_factory.mktemp("server"), [f"--num-cpus={NUM_CPUS}"], environment)
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
        server.end()


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
    """A run without faults. Its learning rate is constant, so shorter runs are a prefix of it."""
    with shoal_server.client as client:
        run = submit_tiny(client, tmp_path_factory.mktemp("undisturbed"), dict, workers=2, steps=72)
        return run.finish()


@pytest.fixture(scope="session")
def undisturbed(shoal_server: Server, request: pytest.FixtureRequest) -> Callable[[], dict[int, float]]:
    """Its losses by step. The first call runs the job."""

    @cache
    def losses() -> dict[int, float]:
        job: JobView = request.getfixturevalue("undisturbed_job")
        with shoal_server.client as client:
            return {point.step: point.loss for point in client.series(job.id)}

    return losses


@pytest.fixture
def submit(client: Client, tmp_path: Path, undisturbed: Callable[[], dict[int, float]]) -> Iterator[Submit]:
    """Jobs that are still running when the test ends are cancelled."""
    submit = Submit(client, tmp_path, undisturbed)
    yield submit
    submit.cancel_all()


@pytest.fixture(scope="module")
def submit_for_module(
    shoal_server: Server, tmp_path_factory: pytest.TempPathFactory, undisturbed: Callable[[], dict[int, float]]
) -> Iterator[Submit]:
    """The same, for jobs that several tests use."""
    with shoal_server.client as client:
        submit = Submit(client, tmp_path_factory.mktemp("gates"), undisturbed)
        yield submit
        submit.cancel_all()
