"""Runs the demo: start a server, train a job, kill a worker, train the same job undisturbed, compare, report, clean up.

With `--json` the report is one line on standard output, and everything else goes to standard error. The jobs
are code, not files, so that a wheel has them: examples/byte-lm.yaml with more frequent checkpoints; a test compares the
two.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal_api.cli.follow import follow_job
from shoal_api.cli.output import Output
from shoal_api.cli.render.progress import LiveScreen, PlainScreen, Screen
from shoal_api.client import Client
from shoal_api.client.credentials import read_token_file
from shoal_api.client.errors import ApiError
from shoal_api.demo.processes import PrometheusProcess, ServerProcess, await_ready, start_prometheus
from shoal_api.demo.report import (
    DemoOutcome,
    Run,
    failed_checks,
    layouts,
    losses,
    mean_tokens_per_s,
    report,
    tokens_per_step,
    with_detection,
    world_sizes,
)
from shoal_service.cluster.connects import find_free_port
from shoal_service.core.access import ADMIN_TOKEN_FILE
from shoal_service.core.parity import compare
from shoal_service.core.quantities import count_text
from shoal_service.views import CheckpointState, JobPatch, JobView
from shoal_workers.contract import StopSpec

if TYPE_CHECKING:
    from types import FrameType

KILL_AT_STEP = 25
"""The worker is killed after the job has reported this step."""
MIN_STEPS = 2 * KILL_AT_STEP
"""The fewest steps with which the kill is noticed and something is trained after it."""
KILL_RANK = 2
"""It is neither the first rank nor the last, so there are survivors with a lower and with a higher rank."""
WORKERS = 4
TOLERANCE = 1e-4
"""Largest allowed difference of the losses (fp32) at any step from those of the undisturbed run."""

DEMO_SPEC: dict[str, Any] = {
    "name": "byte-lm",
    "model": {"dim": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "seq_len": 128},
    "data": {"corpus": "python-stdlib"},
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"lr": 4.0e-3},
    "schedule": {"warmup_steps": 10},
    "stop": {"steps": 120},
    "elasticity": {"min_workers": 2, "max_workers": WORKERS},
    "checkpoint": {"every_steps": 10},
    "validation": {"samples": 128},
}


class Scenario(StrEnum):
    RECOVERY = "recovery"
    """Sharded data parallelism: one of four workers is killed, three continue, a fourth joins them."""
    RELAYOUT = "relayout"
    """The same with pipeline and tensor parallelism: the three survivors continue in another layout; with four workers
    again, the job returns to the first layout."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a scenario trains, and which layouts it must show."""

    spec: dict[str, Any]
    layouts: tuple[str, ...]
    """Layouts that the job must have, in this order, with any others in between. Empty: no layout is checked."""


def make_script(scenario: Scenario, steps: int | None = None) -> Script:
    """Return what a scenario trains. `steps`: how many at least, instead of those of the spec; the learning rate decays
    over them, also if the run goes on until the new worker has joined."""
    steps = steps or DEMO_SPEC["stop"]["steps"]
    spec = {**DEMO_SPEC, "stop": {"steps": steps}, "schedule": {**DEMO_SPEC["schedule"], "steps": steps}}
    match scenario:
        case Scenario.RECOVERY:
            return Script(spec, ())
        case Scenario.RELAYOUT:
            changes: dict[str, Any] = {"name": "relayout", "parallelism": {"pp": 2, "tp": 2}}
            return Script({**spec, **changes}, ("pp2 x tp2", "fsdp3", "pp2 x tp2"))


def run_demo(output: Output, scenario: Scenario, *, steps: int | None, keep: bool, prometheus: bool = False) -> bool:
    """Run the demo; return True if all checks passed. Server, cluster and files are removed, except with `keep`.
    `prometheus`: start one that scrapes the server from the beginning, if it is installed."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    kept = False
    server: ServerProcess | None = None
    watcher: PrometheusProcess | None = None
    with _sigterm_as_interrupt():
        try:
            url = f"http://127.0.0.1:{find_free_port()}"
            _print(output, f"serving on {url}, with an embedded Ray cluster of {WORKERS} logical CPUs", "dim")
            server = ServerProcess(_serve_command(url, folder), _environment(keep), folder / "serve.log", outlive=keep)
            await_ready(server, url, output)
            if prometheus:
                watcher = _start_prometheus(output, url, folder)
            at = _Address(url, folder / "state")
            passed = _show(output, server, at, make_script(scenario, steps))
            kept = keep
            if keep:
                _print(
                    output,
                    f"the server keeps running at {url} (API: {url}/docs). List its jobs: "
                    f"SHOAL_STATE_DIR={folder / 'state'} shoal jobs --url {url}",
                )
                if watcher is not None:
                    _print(output, f"Prometheus: {watcher.url}/graph?g0.expr=shoal_job_loss&g0.tab=0")
                pids = f"{server.pid} {watcher.pid}" if watcher is not None else str(server.pid)
                _print(output, f"stop what runs: kill {pids} && rm -r {folder}")
            return passed
        finally:
            if not kept:
                if watcher is not None:
                    watcher.stop()
                scratch = _ray_scratch(folder)
                if server is not None:
                    _print(output, "stopping the server and its cluster", "dim")
                    server.stop()
                for leftover in (scratch, folder):
                    if leftover is not None:
                        shutil.rmtree(leftover, ignore_errors=True)


def _start_prometheus(output: Output, url: str, folder: Path) -> PrometheusProcess | None:
    try:
        started = start_prometheus(url, folder / "prometheus", folder / "state" / ADMIN_TOKEN_FILE)
    except OSError as error:
        _print(output, f"no Prometheus: {error}", "warn")
        return None
    if started is None:
        _print(
            output, "no Prometheus: the program `prometheus` is not installed (Debian: apt install prometheus)", "warn"
        )
    else:
        _print(output, f"Prometheus at {started.url} scrapes {url}/metrics", "dim")
    return started


@dataclass(frozen=True)
class _Address:
    """Where the demo's server answers, and where its files are."""

    url: str
    state_dir: Path

    def client(self) -> Client:
        """Return a client with the token of this server's owner, whatever else is in the environment."""
        return Client(self.url, token=read_token_file(self.state_dir / ADMIN_TOKEN_FILE))


def _show(output: Output, server: ServerProcess, at: _Address, script: Script) -> bool:
    spec = script.spec
    killer = _WorkerKiller(server, at, spec["stop"]["steps"])
    disturbed = _train(output, at, spec, on_tick=killer.on_tick)
    same_steps = {"stop": {"steps": killer.steps}}
    undisturbed = _train(output, at, {**spec, **same_steps, "name": f"{spec['name']}-undisturbed"})
    with at.client() as client:
        runs = [collect(client, job) for job in (disturbed, undisturbed)]
        outcome = DemoOutcome(
            state=disturbed.status.state,
            steps=disturbed.status.step,
            world_sizes=world_sizes(client.events(disturbed.id)),
            layouts=layouts(client.events(disturbed.id)),
            survivors=killer.survivors,
            incidents=with_detection(client.incidents(disturbed.id), killer.killed_at),
            comparison=compare(*map(losses, runs), tolerance=TOLERANCE),
            val_bits_per_byte=disturbed.status.val_bits_per_byte,
            tokens_per_s=runs[0].tokens_per_s,
        )
    broken = failed_checks(outcome, workers=WORKERS, tolerance=TOLERANCE, layouts=script.layouts)
    if output.as_json:
        for line in broken:
            output.say(line, "bad")
        output.line(outcome.document(), "")
    else:
        output.document(None, report(outcome, runs[0], runs[1], broken, url=at.url, tolerance=TOLERANCE))
    return not broken


def _train(
    output: Output,
    at: _Address,
    spec: dict[str, Any],
    on_tick: Callable[[Screen], Callable[[JobView], None]] | None = None,
) -> JobView:
    with at.client() as client:
        job = client.submit(spec)
    _print(output, f"\njob {job.id}: {spec['name']}, {WORKERS} workers, {count_text(spec['stop']['steps'], 'step')}")
    screen: Screen = (
        LiveScreen(output.stdout) if output.live else PlainScreen(lambda text, style: _print(output, text, style))
    )
    return follow_job(at.client, job.id, screen, on_tick=on_tick(screen) if on_tick else None)


class _WorkerKiller:
    """Kills one worker, once, when the job has reported KILL_AT_STEP, and lets the job go on until a new one has
    joined."""

    def __init__(self, server: ServerProcess, at: _Address, steps: int) -> None:
        self._server = server
        self._at = at
        self.steps = steps
        """The number of steps that the job is to complete."""
        self.killed_at: float | None = None
        self._before: frozenset[int] = frozenset()
        self._generation = 0
        self.survivors: tuple[int, ...] = ()
        """Pids that are in the group before the kill and in the group after it."""

    def on_tick(self, screen: Screen) -> Callable[[JobView], None]:
        return lambda job: self._check(job, screen)

    def _check(self, job: JobView, screen: Screen) -> None:
        if self.killed_at is not None:
            self._find_survivors(job)
            self._await_new_worker(job, screen)
            return
        if job.status.step < KILL_AT_STEP or job.status.state.ended:
            return
        with self._at.client() as client:
            group = [worker for worker in client.workers(job.id) if worker.rank is not None]
        victims = [worker for worker in group if worker.rank == KILL_RANK]
        if not victims or not self._server.owns(victims[0].pid):
            return
        self._before = frozenset(worker.pid for worker in group)
        self._generation = job.status.generation
        self.killed_at = time.time()
        os.kill(victims[0].pid, signal.SIGKILL)
        screen.notice(
            f"          SIGKILL worker of rank {KILL_RANK} (pid {victims[0].pid}) at step {job.status.step}", "bad"
        )

    def _find_survivors(self, job: JobView) -> None:
        if self.survivors or job.status.generation == self._generation or job.status.state.ended:
            return
        with self._at.client() as client:
            now = {worker.pid for worker in client.workers(job.id) if worker.rank is not None}
        self.survivors = tuple(sorted(self._before & now))

    def _await_new_worker(self, job: JobView, screen: Screen) -> None:
        """Give the job more steps if it could end before the new worker joins: steps may be fast, or processes start
        slowly."""
        has_joined = job.status.generation > self._generation and job.status.workers == WORKERS
        if has_joined or job.status.state.ended or job.status.step < self.steps * 3 // 4:
            return
        steps = self.steps * 3 // 2
        with self._at.client() as client, suppress(ApiError):  # it has just ended
            client.patch(job.id, JobPatch(stop=StopSpec(steps=steps)))
            self.steps = steps
            screen.notice(f"          the new worker has not joined yet: {count_text(steps, 'step')} instead", "warn")


def collect(client: Client, job: JobView) -> Run:
    """Read from the server what the report needs of an ended job."""
    series = tuple(sorted(client.series(job.id), key=lambda point: point.step))
    committed = [item for item in client.checkpoints(job.id) if item.state is CheckpointState.COMMITTED]
    wall_s = job.ended_at - job.started_at if job.ended_at and job.started_at else None
    return Run(
        job_id=job.id,
        series=series,
        val_bits_per_byte=job.status.val_bits_per_byte,
        tokens_per_s=mean_tokens_per_s(series, tokens_per_step(DEMO_SPEC)),
        wall_s=wall_s,
        checkpoint_url=max(committed, key=lambda checkpoint: checkpoint.step).url if committed else "none",
    )


def _ray_scratch(folder: Path) -> Path | None:
    """Return the directory of the embedded cluster's sockets and logs. The server removes it, unless it is killed."""
    try:
        note = json.loads((folder / "state" / "embedded-cluster.json").read_text())
        return Path(str(note["temp_dir"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _serve_command(url: str, folder: Path) -> list[str]:
    host, _, port = url.removeprefix("http://").partition(":")
    return [
        sys.executable,
        "-m",
        "shoal_api.cli.main",
        "serve",
        "--host",
        host,
        "--port",
        port,
        "--state-dir",
        str(folder / "state"),
        "--num-cpus",
        str(WORKERS),
    ]


def _environment(keep: bool) -> dict[str, str]:
    """Return the environment without the user's settings for server and cluster, so that the demo is always the same.
    Unless the server is kept, its jobs are thrown away with it, so it does not save them when it stops."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_") and key != "RAY_ADDRESS"}
    return {**kept, "PYTHONUNBUFFERED": "1", **({} if keep else {"SHOAL_STOP_S": "0"})}


def _print(output: Output, text: str, style: str = "plain") -> None:
    if output.as_json:
        output.say(text, style)
    else:
        output.line(None, text, style)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the demo with the same clean-up as Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
