from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.node_loss import NodeLossBound, Protection
from shoal_service.queue_views import ProjectRules
from shoal_service.store import Lease, Store
from shoal_service.telemetry.collector import ShoalCollector, build_registry
from shoal_service.telemetry.metric_names import ALL
from shoal_service.telemetry.request_metrics import RequestMetrics
from shoal_service.views import CheckpointView, Goodput, IncidentView
from shoal_workers.contract.job import EndReason, IncidentCause, JobState

Submit = Callable[..., str]
Begin = Callable[..., Any]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _scrape(store: Store, owner: str = "owner-1", requests: RequestMetrics | None = None) -> Samples:
    registry = build_registry(store, owner=owner, requests=requests or RequestMetrics())
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def test_a_running_job_is_shown_and_an_ended_one_vanishes(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(elasticity={"max_workers": 4})
    queued = submit()
    attempt = begin(job_id, workers=4)
    checkpoints = tuple(
        CheckpointView(
            step=step, url="/c", state=state, bytes=step * 10, seconds=2.0, committed_at=1.0, attempt=1, generation=1
        )
        for step, state in ((10, "committed"), (20, "committed"), (30, "damaged"))
    )
    attempt.report(
        status_workers=3,
        status_step=30,
        status_loss=1.5,
        status_tokens_per_s=99.0,
        status_steps_lost=2,
        checkpoints=checkpoints,
        status_snapshot_share=0.004,
        status_snapshot_every_steps=2,
        status_node_loss=NodeLossBound(
            protection=Protection.GRADIENT_LOG, at_most=1, now=0, log_lag_steps=0, log_share=0.01
        ),
        status_goodput=Goodput(at=9.0, seconds={"productive": 30.0, "queued": 10.0}, total=40.0, ratio=0.75),
    )
    samples = _scrape(store)
    assert _value(samples, "shoal_jobs", state="RUNNING") == 1
    assert _value(samples, "shoal_jobs", state="QUEUED") == 1
    assert _value(samples, "shoal_jobs", state="FAILED") == 0
    expected = {
        "shoal_job_workers": 3,
        "shoal_job_desired_workers": 4,
        "shoal_job_step": 30,
        "shoal_job_loss": 1.5,
        "shoal_job_tokens_per_second": 99,
        "shoal_job_steps_lost_total": 2,
        "shoal_checkpoint_bytes": 200,
        "shoal_job_goodput_ratio": 0.75,
        "shoal_job_snapshot_share": 0.004,
        "shoal_job_snapshot_every_steps": 2,
        "shoal_job_node_loss_steps": 0,
        "shoal_job_node_loss_max_steps": 1,
        "shoal_job_gradient_log_lag_steps": 0,
        "shoal_job_gradient_log_share": 0.01,
    }
    assert _value(samples, "shoal_job_goodput_seconds", job_id=job_id, category="productive") == 30
    assert _value(samples, "shoal_job_goodput_seconds", job_id=job_id, category="queued") == 10
    for name, value in expected.items():
        assert _value(samples, name, job_id=job_id) == value, name
        assert _value(samples, name, job_id=queued) is None
    assert _value(samples, "shoal_checkpoint_seconds_count") == 3
    assert _value(samples, "shoal_checkpoint_seconds_bucket", le="1.0") == 0
    assert _value(samples, "shoal_checkpoint_seconds_bucket", le="2.5") == 3

    attempt.report(end=AttemptEnd(reason=EndReason.FINISHED, message="", step=30))
    after = _scrape(store)
    assert not any(("job_id", job_id) in labels for _, labels in after)
    assert _value(after, "shoal_checkpoint_seconds_count") == 3


def test_recoveries_are_counted_by_cause_and_phase(store: Store, submit: Submit, begin: Begin) -> None:
    attempt = begin(submit())

    def incident(number: int, cause: IncidentCause, **fields: Any) -> IncidentView:
        return IncidentView(
            id=number, cause=cause, witness="w", ranks=(), worker_ids=(), generation=1, at=1.0, from_workers=2, **fields
        )

    attempt.report(
        incidents=(
            incident(
                1,
                IncidentCause.WORKER_DIED,
                closed=True,
                detect_s=0.02,
                recovery_s=2.0,
                steps_lost=0,
                bytes_moved=2**20,
            ),
            incident(2, IncidentCause.WORKER_DIED, closed=True, detect_s=0.2, recovery_s=4.0, steps_lost=6),
            incident(3, IncidentCause.WORKER_DIED, detect_s=0.2, steps_lost=100),
            incident(4, IncidentCause.STUCK),
        )
    )
    samples = _scrape(store)
    assert _value(samples, "shoal_incidents_total", cause="worker_died") == 3
    assert _value(samples, "shoal_incidents_total", cause="stuck") == 1
    assert _value(samples, "shoal_incidents_total", cause="node_died") == 0
    whole = {"cause": "worker_died", "phase": "recovery"}
    assert _value(samples, "shoal_recovery_seconds_count", **whole) == 2
    assert _value(samples, "shoal_recovery_seconds_sum", **whole) == 6
    assert _value(samples, "shoal_recovery_seconds_bucket", **whole, le="2.5") == 1
    assert _value(samples, "shoal_recovery_seconds_bucket", **whole, le="+Inf") == 2
    detect = {"cause": "worker_died", "phase": "detect"}
    assert _value(samples, "shoal_recovery_seconds_bucket", **detect, le="0.05") == 1
    assert _value(samples, "shoal_recovery_seconds_count", cause="stuck", phase="recovery") is None
    died = {"cause": "worker_died"}
    assert _value(samples, "shoal_incident_steps_lost_count", **died) == 2
    assert _value(samples, "shoal_incident_steps_lost_sum", **died) == 6
    assert _value(samples, "shoal_incident_steps_lost_bucket", **died, le="0.0") == 1
    assert _value(samples, "shoal_incident_bytes_moved_count", **died) == 1
    assert _value(samples, "shoal_incident_bytes_moved_bucket", **died, le="1048576.0") == 1
    assert _value(samples, "shoal_incident_steps_lost_count", cause="stuck") is None


def test_the_owner_of_the_lease_is_the_leader(store: Store, lease: Lease) -> None:
    samples = _scrape(store)
    assert _value(samples, "shoal_lease_epoch") == 1
    assert _value(samples, "shoal_control_plane_leader") == 0  # it expired long ago: the test's clock began at 0
    for owner, now, leads in (("owner-1", 1.0, 1), ("owner-1", 2e9, 0), ("owner-2", 1.0, 0)):
        collector = ShoalCollector(store, owner=owner, requests=RequestMetrics(), clock=lambda now=now: now)
        values = {family.name: family.samples for family in collector.collect()}
        assert values["shoal_control_plane_leader"][0].value == leads


def test_requests_and_dropped_reports_are_shown(store: Store, submit: Submit, begin: Begin) -> None:
    requests = RequestMetrics()
    requests.observe("GET", "/v1/jobs/{job_id}", 200, 0.003)
    attempt = begin(submit())
    attempt.report(JobState.SUCCEEDED)
    samples = _scrape(store, requests=requests)
    route = {"method": "GET", "route": "/v1/jobs/{job_id}"}
    assert _value(samples, "shoal_http_requests_total", **route, status="2xx") == 1
    assert _value(samples, "shoal_http_request_seconds_bucket", **route, le="0.0025") == 0
    assert _value(samples, "shoal_http_request_seconds_bucket", **route, le="0.005") == 1
    assert _value(samples, "shoal_reports_dropped_total", reason="refused_state") == 1


def test_every_declared_metric_is_exported_and_no_other(store: Store) -> None:
    collector = ShoalCollector(store, owner="o", requests=RequestMetrics())
    exported = [family.name for family in collector.collect()]
    declared = [metric.name.removesuffix("_total") for metric in ALL]
    assert sorted(exported) == sorted(declared)
    assert len(set(exported)) == len(exported)


def test_scrapes_within_a_second_share_one_snapshot(store: Store, submit: Submit) -> None:
    now = 0.0
    collector = ShoalCollector(store, owner="o", requests=RequestMetrics(), clock_mono=lambda: now)

    def queued() -> float:
        jobs = next(iter(collector.collect()))
        return next(sample.value for sample in jobs.samples if sample.labels["state"] == "QUEUED")

    assert queued() == 0
    submit()
    now = 0.9
    assert queued() == 0
    now = 2.0
    assert queued() == 1


@pytest.mark.parametrize("desired", [Desired.PAUSE, Desired.CANCEL])
def test_a_job_without_an_attempt_has_no_series(store: Store, submit: Submit, desired: Desired) -> None:
    job_id = submit()
    store.request(job_id, desired, now=2.0)
    assert not any(("job_id", job_id) in labels for _, labels in _scrape(store))


def test_queue_wait_moves_and_shares_of_projects_are_shown(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    store.put_project("vision", ProjectRules())
    first = submit(project="vision", elasticity={"max_workers": 4})  # at 1.0; an attempt begins at 5.0
    begin(first, workers=2)
    begin(submit(project="unknown"), workers=1)
    submit(project="unknown")
    change = {"epoch": lease.epoch, "now": 6.0}
    store.set_grant(first, workers=4, reason="more", **change)
    store.set_grant(first, workers=4, reason="the same", **change)
    store.set_grant(first, workers=3, reason="fewer", **change)
    samples = _scrape(store)
    assert _value(samples, "shoal_queue_wait_seconds_count") == 2
    assert _value(samples, "shoal_queue_wait_seconds_sum") == 8.0
    assert _value(samples, "shoal_queue_wait_seconds_bucket", le="2.5") == 0
    assert _value(samples, "shoal_queue_wait_seconds_bucket", le="5.0") == 2
    moves = {"start": 2, "grow": 1, "shrink": 1, "preempt": 0}
    assert {kind: _value(samples, "shoal_scheduler_moves_total", kind=kind) for kind in moves} == moves
    assert _value(samples, "shoal_project_workers", project="vision") == 3
    assert _value(samples, "shoal_project_share", project="default") == 0.25
    assert _value(samples, "shoal_project_queued_jobs", project="default") == 1
    assert _value(samples, "shoal_project_workers", project="unknown") is None
    store.preempt(first, reason="urgent", beneficiary="x", **change)
    assert store.moves()["preempt"] == 1
