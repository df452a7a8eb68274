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
from shoal_api.cli.render.progress import LiveScreen, PlainScreen, Screen
from shoal_api.cli.session import Output
from shoal_api.client import ApiError, Client
from shoal_api.client.credentials import read_token_file
from shoal_api.demo.processes import ServerProcess, await_ready
from shoal_api.demo.report import (
    DemoOutcome,
    add_detection_time,
    find_failed_checks,
    find_layouts,
    find_world_sizes,
    read_losses,
    read_run,
    render_report,
)
from shoal_service.cluster.connects import find_free_port
from shoal_service.core.access import ADMIN_TOKEN_FILE
from shoal_service.core.parity import compare
from shoal_service.core.quantities import count_text
from shoal_service.views import JobPatch, JobView
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
            return Script({**spec, "parallelism": {"dp_shard": "auto"}}, ())
        case Scenario.RELAYOUT:
            changes: dict[str, Any] = {"name": "relayout", "parallelism": {"pp": 2, "tp": 2}}
            return Script({**spec, **changes}, ("pp2 x tp2", "fsdp3", "pp2 x tp2"))


def run_demo(output: Output, scenario: Scenario, *, steps: int | None, keep: bool) -> bool:
    """Run the demo; return True if all checks passed. Server, cluster and files are removed, except with `keep`."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    kept = False
    server: ServerProcess | None = None
    with _sigterm_as_interrupt():
        try:
            url = f"http://127.0.0.1:{find_free_port()}"
            output.note(f"serving on {url}, with an embedded Ray cluster of {WORKERS} logical CPUs", "dim")
            server = ServerProcess(_serve_command(url, folder), _environment(keep), folder / "serve.log", outlive=keep)
            await_ready(server, url, output)
            # with the token of this server's owner, whatever else is in the environment
            with Client(url, token=read_token_file(folder / "state" / ADMIN_TOKEN_FILE)) as client:
                passed = _show(output, server, client, make_script(scenario, steps))
            kept = keep
            if keep:
                output.note(
                    f"the server keeps running at {url} (API: {url}/docs). List its jobs: "
                    f"SHOAL_STATE_DIR={folder / 'state'} shoal jobs --url {url}",
                )
                output.note(f"stop what runs: kill {server.pid} && rm -r {folder}")
            return passed
        finally:
            if not kept:
                scratch = _ray_scratch(folder)
                if server is not None:
                    output.note("stopping the server and its cluster", "dim")
                    server.stop()
                for leftover in (scratch, folder):
                    if leftover is not None:
                        shutil.rmtree(leftover, ignore_errors=True)


def _show(output: Output, server: ServerProcess, client: Client, script: Script) -> bool:
    spec = script.spec
    killer = _WorkerKiller(server, client, spec["stop"]["steps"])
    disturbed = _train(output, client, spec, on_tick=killer.on_tick)
    same_steps = {"stop": {"steps": killer.steps}}
    undisturbed = _train(output, client, {**spec, **same_steps, "name": f"{spec['name']}-undisturbed"})
    runs = [read_run(client, job) for job in (disturbed, undisturbed)]
    outcome = DemoOutcome(
        state=disturbed.status.state,
        steps=disturbed.status.step,
        world_sizes=find_world_sizes(client.events(disturbed.id)),
        layouts=find_layouts(client.events(disturbed.id)),
        survivors=killer.survivors,
        incidents=add_detection_time(client.incidents(disturbed.id), killer.killed_at),
        comparison=compare(*map(read_losses, runs), tolerance=TOLERANCE),
        val_bits_per_byte=disturbed.status.val_bits_per_byte,
        tokens_per_s=runs[0].tokens_per_s,
    )
    broken = find_failed_checks(outcome, workers=WORKERS, tolerance=TOLERANCE, layouts=script.layouts)
    if output.as_json:
        for line in broken:
            output.say(line, "bad")
        output.line(outcome.document(), "")
    else:
        output.document(
            None, render_report(outcome, runs[0], runs[1], broken, url=client.base_url, tolerance=TOLERANCE)
        )
    return not broken


def _train(
    output: Output,
    client: Client,
    spec: dict[str, Any],
    on_tick: Callable[[Screen], Callable[[JobView], None]] | None = None,
) -> JobView:
    job = client.submit(spec)
    output.note(f"\njob {job.id}: {spec['name']}, {WORKERS} workers, {count_text(spec['stop']['steps'], 'step')}")
    screen: Screen = LiveScreen(output.stdout) if output.live else PlainScreen(output.note)
    return follow_job(client, job.id, screen, on_tick=on_tick(screen) if on_tick else None)


class _WorkerKiller:
    """Kills one worker, once, when the job has reported KILL_AT_STEP, and lets the job go on until a new one has
    joined."""

    def __init__(self, server: ServerProcess, client: Client, steps: int) -> None:
        self._server = server
        self._client = client
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
        group = [worker for worker in self._client.workers(job.id) if worker.rank is not None]
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
        now = {worker.pid for worker in self._client.workers(job.id) if worker.rank is not None}
        self.survivors = tuple(sorted(self._before & now))

    def _await_new_worker(self, job: JobView, screen: Screen) -> None:
        """Give the job more steps if it could end before the new worker joins: steps may be fast, or processes start
        slowly."""
        has_joined = job.status.generation > self._generation and job.status.workers == WORKERS
        if has_joined or job.status.state.ended or job.status.step < self.steps * 3 // 4:
            return
        steps = self.steps * 3 // 2
        with suppress(ApiError):  # it has just ended
            self._client.patch(job.id, JobPatch(stop=StopSpec(steps=steps)))
            self.steps = steps
            screen.notice(f"          the new worker has not joined yet: {count_text(steps, 'step')} instead", "warn")


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
