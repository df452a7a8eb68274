"""What the service reports of a job that lost a worker: the goodput ledger, and unchanged losses."""

from __future__ import annotations

import pytest

from shoal_api.client import Client
from shoal_service.core.goodput import Category


@pytest.mark.matrix
def test_every_worker_second_is_booked_and_the_losses_are_those_of_another_run(
    submit, client: Client, undisturbed_job
) -> None:
    run = submit(workers=3, strikes=[{"at": "step", "rank": 2, "n": 7, "do": "kill"}])
    job = run.finish()
    [incident] = client.incidents(run.id)

    goodput = job.status.goodput
    assert goodput is not None and job.ended_at is not None
    asked = job.spec.elasticity.max_workers
    assert goodput.total == pytest.approx((job.ended_at - job.created_at) * asked, rel=1e-3)
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.total, rel=1e-6)
    assert set(goodput.recovering) == {"worker_died"}, "what the suspicion cost has its verdict's name"
    until_formed_s = incident.recovery_s - incident.first_step_s
    assert goodput.seconds[Category.RECOVERING] >= 0.95 * until_formed_s * asked
    assert goodput.seconds[Category.PRODUCTIVE] > 0 and goodput.seconds[Category.STARTING] > 0
    assert (goodput.seconds[Category.RECOMPUTED] > 0) == (incident.steps_lost > 0)
    assert goodput.max_step == job.status.step

    report = client.parity(run.id, undisturbed_job.id)
    assert report.within_tolerance and report.steps_compared == job.status.step
    assert {difference.path.partition(".")[0] for difference in report.differs_in} <= {"data", "stop"}
