"""A control plane of this release reattaches to a supervisor that a release before it started, and that still runs."""

from __future__ import annotations

import base64
import inspect
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

from doubles.event_loop import run
from doubles.fake_clock import FakeClock
from doubles.fake_cluster import FakeCluster, FakeSupervisor
from shoal_service.control.config import ControlConfig
from shoal_service.control.driver import Driver
from shoal_service.control.supervisors.report_writer import ReportWriter
from shoal_service.reports import SupervisorReports
from shoal_service.signing.calls import SignedCall
from shoal_service.store.store import Store
from shoal_service.supervisor.actor import SupervisorActor
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.reporting.outbox import Outbox
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "wire-1"
CALLS = {
    "pull": ["self", "after", "wait_s", "epoch"],
    "direct": ["self", "directive"],
    "release": ["self", "epoch"],
}
"""What a control plane calls on a running supervisor, in every release since wire version 1."""


def sent(name: str) -> Any:
    """A message of wire version 1, as Ray carried it."""
    document = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
    return pickle.loads(base64.b64decode(document["pickle"]))


class OldSupervisor(FakeSupervisor):
    """Answers with what a supervisor of wire version 1 has sent."""

    async def pull(self, after: int, wait_s: float, epoch: int, signed: SignedCall | None = None) -> SupervisorReports:
        assert signed is None, "its actor has no method for signed calls"
        reports: SupervisorReports = sent("reports")
        return reports


def test_the_reports_of_a_running_supervisor_of_the_release_before_are_stored(store: Store) -> None:
    async def main() -> None:
        clock, cluster = FakeClock(), FakeCluster()
        lease = store.acquire_lease("me", ttl_s=600, now=clock.time())
        assert lease is not None
        spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 12}})
        job, _ = store.create_job(spec, idempotency_key=None, now=clock.time())
        store.begin_attempt(job.id, workers=2, epoch=lease.epoch, now=clock.time())
        [row] = store.jobs_to_drive()
        config: SupervisorConfig = sent("config")
        cluster.supervisors[job.id, 1] = OldSupervisor(config, Outbox(1))
        plane = ControlConfig(owner="me", lease_ttl_s=600.0, checkpoint_url="/checkpoints")
        await Driver(
            store,
            cluster,
            clock,
            plane,
            row,
            epoch=lease.epoch,
            numbers=itertools.count(1),
            writer=ReportWriter(store, clock),
        ).run()
        view = store.get_job(job.id)
        assert (view.status.state, view.status.step) == (JobState.SUCCEEDED, 12)
        assert [incident.worker_ids for incident in store.incidents(job.id)] == [("b",)]
        assert [point.step for point in store.series(job.id)] == [4]
        assert sent("reports").version == 1

    run(main())


def test_the_calls_to_a_supervisor_have_kept_their_form() -> None:
    for name, parameters in CALLS.items():
        assert list(inspect.signature(getattr(SupervisorActor, name)).parameters) == parameters
