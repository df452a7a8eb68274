"""An attempt that the release before has started: its supervisor is called, and does not dial home."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

from doubles.driver_bench import DriverBench
from doubles.event_loop import run
from doubles.fake_cluster import FakeSupervisor
from shoal_service.core.access import hash_of
from shoal_service.home import AttemptCaller, HomeReport
from shoal_service.store import histories, supervisor_links
from shoal_service.store.store import Store
from shoal_service.store.supervisor_links import Arrived
from shoal_service.supervisor.reporting.outbox import Outbox
from shoal_workers.contract.job import EndReason, JobState

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "wire-1"


def sent(name: str) -> Any:
    """A message of wire version 1, as Ray carried it."""
    document = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
    return pickle.loads(base64.b64decode(document["pickle"]))


def test_an_attempt_that_was_not_drained_is_ended_and_its_job_goes_on_from_its_checkpoint(store: Store) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        bench.cluster.old_release = True
        bench.cluster.supervisors[bench.job_id, 1] = FakeSupervisor(sent("config"), Outbox(1))
        bench.start()
        await bench.clock.advance(1.0)
        await bench.task
        status = store.get_job(bench.job_id).status
        assert (status.state, status.reason) == (JobState.QUEUED, EndReason.SUPERVISOR_LOST)
        assert "a release whose supervisors do not report by themselves has started it" in status.message
        [requeued] = [
            one.data for one in store.reading(histories.read_events)(bench.job_id) if one.data.get("to") == "QUEUED"
        ]
        assert requeued["message"] == status.message
        assert bench.cluster.reaped == [(bench.job_id, 1)]

    run(main())


def test_the_reports_of_an_older_release_are_stored(store: Store) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        store.writing(supervisor_links.keep_token, bench.epoch)(bench.job_id, 1, "token")
        caller = AttemptCaller(bench.job_id, 1, hash_of("token"))
        reports = sent("reports")
        [receipt] = store.writing(supervisor_links.take_reports)(
            [Arrived(caller, HomeReport(life=1, after=0, reports=reports), 2.0)]
        )
        assert receipt.released and receipt.acknowledged == reports.seq
        view = store.get_job(bench.job_id)
        assert (view.status.state, view.status.step) == (JobState.SUCCEEDED, 12)
        assert [incident.worker_ids for incident in store.reading(histories.read_incidents)(bench.job_id)] == [("b",)]
        assert [point.step for point in store.reading(histories.read_series)(bench.job_id)] == [4]

    run(main())
