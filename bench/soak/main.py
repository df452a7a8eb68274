"""Random faults for minutes on a cluster of four nodes, then checks of losses, ledgers and leftovers.

    python bench/soak/main.py [--minutes 10] [--seed 1] [--mean-s 8] [--hosts] [--faults worker,node,...]
                              [--not-deterministic] [--log build/soak-seed-1.log]

Two jobs train through the faults. The same seed gives the same order of faults. After each fault that is alone, its
incidents must keep to the bound on lost steps. The checks at the end: losses against those of undisturbed runs, the sum
of the goodput ledger, growth of processes, and leftovers. The exit status is 1 on any violation; the log and those of
the server are then kept. With --hosts the nodes are network namespaces whose links can be cut (needs root).
`make soak` runs it.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from choices import some_of
from kit.guard.guard import guard_this_process
from kit.processes.hosts import Hosts, why_not
from kit.processes.os_processes import adopt_orphans, end_all, is_alive, started_at
from measurements.machine import describe
from shoal_api.client import ApiError, Client, Disconnected
from shoal_server import ShoalServer
from shoal_workers.contract.job import JobState
from soak import jobs, leaks
from soak.faults import Strikes, fault_names
from soak.timeline import Timeline

_NUM_NODES = 4
_CPUS_PER_NODE = 2
_PATIENCE_S = 120.0
_CASCADE = 0.25
"""Probability that the next fault does not wait until training continues."""
_LEDGER_TOLERANCE = 1e-3


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up like Ctrl-C
    guard_this_process()
    adopt_orphans()
    timeline = Timeline(arguments.log)
    machine = describe()
    timeline.say("machine", f"{machine['cpu']}, {machine['memory']}; seed {arguments.seed}")
    is_clean = False
    with tempfile.TemporaryDirectory(prefix="shoal-soak-", ignore_cleanup_errors=True) as folder:
        state_dir = Path(folder) / "state"
        try:
            with _cluster(arguments, Path(folder), state_dir) as (server, cluster):
                Soak(arguments, timeline, server, state_dir, cluster).run()
            is_clean = not timeline.violations
        finally:
            end_all()
            if not is_clean:
                kept = arguments.log.with_suffix("")
                shutil.copytree(state_dir, kept, dirs_exist_ok=True, ignore=_all_but_logs)
                timeline.say("kept", f"{arguments.log}, and the logs of the server in {kept}")
    print(f"\n{len(timeline.violations)} violations" + "".join(f"\n  {text}" for text in timeline.violations))
    sys.exit(1 if timeline.violations else 0)


@contextmanager
def _cluster(
    arguments: argparse.Namespace, folder: Path, state_dir: Path
) -> Iterator[tuple[ShoalServer, Hosts | None]]:
    """A server with its embedded cluster, or one on a cluster of hosts."""
    if not arguments.hosts:
        options = [f"--num-cpus={_NUM_NODES * _CPUS_PER_NODE}", f"--nodes={_NUM_NODES}", "--leave-dead-nodes"]
        server = ShoalServer(state_dir, options)
        try:
            server.start()
            yield server, None
        finally:
            server.nodes.end_added()
            server.end()
        return
    cluster = Hosts(folder / "hosts", num_hosts=_NUM_NODES, cpus_per_host=_CPUS_PER_NODE)
    try:
        cluster.start()
        server = ShoalServer(state_dir, cluster.serve_options, cluster.environment)
        try:
            server.start()
            yield server, cluster
        finally:
            server.end()
    finally:
        cluster.end()


def _all_but_logs(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(".log") and not (Path(directory) / name).is_dir()]


class Soak:
    def __init__(
        self,
        arguments: argparse.Namespace,
        timeline: Timeline,
        server: ShoalServer,
        state_dir: Path,
        hosts: Hosts | None,
    ) -> None:
        """`hosts`: the cluster, if it is not the server's embedded one."""
        self._hosts = hosts
        self._arguments = arguments
        self._timeline = timeline
        self._server = server
        self._state_dir = state_dir
        self._plan = random.Random(arguments.seed)
        """Which faults, and when: it depends on nothing but the seed."""
        self._chance = random.Random(arguments.seed)
        """Victims and durations, which depend on what is alive."""
        self._supervisors: Callable[[], list[int]] = list
        self._watch = leaks.Watch()
        self._job_ids: dict[str, str] = {}
        self._processes: set[tuple[int, int]] = set()
        """Pid and start of each worker's process: pids are used again."""

    def run(self) -> None:
        deterministic = not self._arguments.not_deterministic
        self._server.wait_for_cpus(_NUM_NODES * _CPUS_PER_NODE)
        with self._server.client as client:
            submitted = jobs.submit_disturbed(client, deterministic=deterministic)
            self._job_ids = {name: job.id for name, job in submitted.items()}
            self._wait_for_progress(client, dict.fromkeys(self._job_ids.values(), 5))
            self._timeline.say("begin", "both jobs train")
            self._strike(client)
            reached = self._end_jobs(client)
            self._check_leftovers()
            self._compare(client, reached, deterministic=deterministic)

    def _strike(self, client: Client) -> None:
        job_ids = list(self._job_ids.values())
        strikes = Strikes(
            self._server, self._state_dir, job_ids, self._chance, num_cpus=_CPUS_PER_NODE, hosts=self._hosts
        )
        self._supervisors = strikes.supervisors
        since_progress: list[str] = []
        end_s = self._timeline.elapsed_s + 60 * self._arguments.minutes
        while self._timeline.elapsed_s < end_s:
            time.sleep(self._plan.expovariate(1 / self._arguments.mean_s))
            fault = self._plan.choice(self._arguments.faults)
            is_cascade = self._plan.random() < _CASCADE
            self._sample(client)
            before = self._steps(client)
            since_progress.append(fault)
            self._timeline.say(fault, strikes.do(fault))
            if not is_cascade:
                self._wait_for_progress(client, {job_id: step + 2 for job_id, step in before.items()})
                alone = fault if len(since_progress) == 1 else None
                self._timeline.show_incidents(client, self._job_ids, alone)
                self._timeline.show_jobs(client, self._job_ids)
                since_progress = []

    def _wait_for_progress(self, client: Client, goals: dict[str, int]) -> None:
        """Wait until every job reaches its goal. A job that does not is a violation and ends the soak."""
        deadline = time.monotonic() + _PATIENCE_S
        while any(self._steps(client)[job_id] < goal for job_id, goal in goals.items()):
            for name, job_id in self._job_ids.items():
                status = self._job(client, job_id).status
                if status.state.ended:
                    self._timeline.violation(f"{name} ended {status.state}: {status.reason}: {status.message}")
                    raise SystemExit(1)
            if time.monotonic() > deadline:
                self._timeline.show_jobs(client, self._job_ids)
                self._timeline.violation(f"no progress within {_PATIENCE_S:.0f} s: {self._describe(client)}")
                raise SystemExit(1)
            time.sleep(0.2)

    def _end_jobs(self, client: Client) -> dict[str, int]:
        """Cancel the jobs and check their events, incidents and ledgers; returns the last step of each job."""
        reached = {}
        for name, job_id in self._job_ids.items():
            client.cancel(job_id)
            job = client.wait(job_id, timeout_s=_PATIENCE_S)
            if job.status.state is not JobState.CANCELLED:
                self._timeline.violation(f"{name} ended {job.status.state}, not CANCELLED")
            reached[name] = max(
                point.step for point in client.series(job_id)
            )  # the newest step may be below an earlier one after a rollback
            events = [event.seq for event in client.events(job_id)]
            if events != list(range(1, len(events) + 1)):
                self._timeline.violation(f"{name}: an event is missing")
            for incident in client.incidents(job_id):
                if not incident.closed:
                    self._timeline.say("note", f"{name}: incident {incident.id} ({incident.cause}) was never closed")
            self._check_ledger(name, client, job_id)
        return reached

    def _check_ledger(self, name: str, client: Client, job_id: str) -> None:
        job = client.job(job_id)
        goodput = job.status.goodput
        if goodput is None:
            self._timeline.violation(f"{name} has no goodput ledger")
            return
        booked = sum(goodput.seconds.values())
        assert job.ended_at is not None
        wall = (job.ended_at - job.created_at) * job.spec.elasticity.max_workers
        shares = ", ".join(
            f"{cause} {seconds / booked:.1%}" for cause, seconds in goodput.seconds.items() if seconds > booked / 1000
        )
        self._timeline.say("goodput", f"{name}: {booked:.1f} worker-seconds: {shares}")
        for what, expected in (("its own total", goodput.total), ("wall-clock x workers", wall)):
            if abs(booked - expected) > _LEDGER_TOLERANCE * expected:
                self._timeline.violation(f"{name}: the ledger's sum {booked:.2f} s is not {what} {expected:.2f} s")

    def _check_leftovers(self) -> None:
        deadline = time.monotonic() + 30
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if alive:
            self._timeline.violation(f"processes are still alive: {alive}")
        nodes = self._server.nodes if self._hosts is None else self._hosts
        while (left := leaks.left_in_ray(nodes.address, nodes.environment)) and time.monotonic() < deadline:
            time.sleep(1.0)
        for kind, names in left.items():
            self._timeline.violation(f"{kind} are left in Ray: {', '.join(names)}")
        for path in leaks.left_on_disk(self._state_dir, self._job_ids.values()):
            self._timeline.violation(f"a file is left: {path}")
        lines, violations = self._watch.report()
        for line in lines:
            self._timeline.say("growth", line)
        for text in violations:
            self._timeline.violation(text)

    def _alive(self) -> list[int]:
        return [pid for pid, start in self._processes if is_alive(pid) and started_at(pid) == start]

    def _compare(self, client: Client, reached: dict[str, int], *, deterministic: bool) -> None:
        references = {
            name: jobs.submit_reference(client, name, steps, deterministic=deterministic)
            for name, steps in reached.items()
        }
        for name, reference in references.items():
            job = client.wait(reference.id, timeout_s=60 + 60 * self._arguments.minutes)
            if job.status.state is not JobState.SUCCEEDED:
                self._timeline.violation(f"the undisturbed run of {name} ended {job.status.state}")
                continue
            parity = client.parity(self._job_ids[name], reference.id, tolerance=jobs.TOLERANCE)
            self._timeline.say(
                "parity",
                f"{name}: {parity.steps_compared} steps, largest relative difference {parity.max_rel_diff} "
                f"at step {parity.max_rel_diff_step}, first over {jobs.TOLERANCE:g} at step "
                f"{parity.first_step_over_tolerance}, bit-identical: {parity.bit_identical}",
            )
            if parity.steps_only_in_job or parity.steps_only_in_against:
                self._timeline.violation(f"{name}: steps are missing in one of the two runs")
            if (parity.first_step_over_tolerance or math.inf) <= jobs.PROMISED_STEPS:
                promise = f"within {jobs.PROMISED_STEPS} steps"
                self._timeline.violation(f"{name}: losses differ by more than {jobs.TOLERANCE:g} {promise}")
            if deterministic and name == "exact" and not parity.bit_identical:
                self._timeline.violation(f"{name} is deterministic, and its losses are not bit-identical")

    def _sample(self, client: Client) -> None:
        workers = [one for job_id in self._job_ids.values() for one in client.workers(job_id) if one.pid]
        for one in workers:
            if (start := started_at(one.pid)) is not None:
                self._processes.add((one.pid, start))
        now_s = self._timeline.elapsed_s
        self._watch.sample("workers", [one.pid for one in workers], now_s)
        self._watch.sample("supervisors", self._supervisors(), now_s)
        self._watch.sample("control plane", [self._server.pid], now_s)

    def _steps(self, client: Client) -> dict[str, int]:
        return {job_id: self._job(client, job_id).status.step for job_id in self._job_ids.values()}

    def _job(self, client: Client, job_id: str):  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return client.job(job_id)
            except (Disconnected, ApiError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _describe(self, client: Client) -> str:
        return "; ".join(
            f"{name}: {status.state} {status.reason} {status.message}"
            for name, job_id in self._job_ids.items()
            if (status := self._job(client, job_id).status)
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of faults; the reference runs follow")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mean-s", type=float, default=8.0, help="mean seconds between faults")
    parser.add_argument("--hosts", action="store_true", help="nodes in network namespaces, with the fault `cut`")
    every = sorted({*fault_names(), *fault_names(on_hosts=True)})
    parser.add_argument("--faults", type=some_of(every), metavar="A,B", help=f"of {', '.join(every)} (all possible)")
    parser.add_argument("--not-deterministic", action="store_true", help="do not require bit-identical losses")
    parser.add_argument(
        "--log", type=Path, help="default build/soak-seed-SEED.log, with --hosts build/soak-hosts-seed-SEED.log"
    )
    arguments = parser.parse_args()
    possible = fault_names(on_hosts=arguments.hosts)
    arguments.faults = arguments.faults or possible
    if impossible := [name for name in arguments.faults if name not in possible]:
        where = "with" if arguments.hosts else "without"
        parser.error(f"{', '.join(impossible)}: not possible {where} --hosts; possible are {', '.join(possible)}")
    if arguments.hosts and (reason := why_not()) is not None:
        parser.error(f"--hosts: {reason}")
    kind = "hosts-" if arguments.hosts else ""
    arguments.log = arguments.log or Path("build") / f"soak-{kind}seed-{arguments.seed}.log"
    return arguments


if __name__ == "__main__":
    main()
