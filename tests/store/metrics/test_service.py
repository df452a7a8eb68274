import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from doubles.fake_cluster_source import FakeClusterSource
from kit.scrapes import NOW, exposition_of, samples_of, scrape, value_of
from kit.views import incident_view
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.nodes import DrainSource
from shoal_service.fleet_views import ClusterSummary, DrainView, NodeView, ProjectRules
from shoal_service.store import Lease, Store, driving, queueing
from shoal_service.store.backup import mark_backup
from shoal_service.store.driving import MoveKind
from shoal_service.telemetry.exposition import ALL
from shoal_service.telemetry.tallies import RequestMetrics
from shoal_service.views import IncidentView
from shoal_workers.contract.job import EndReason, IncidentCause, JobState

Submit = Callable[..., str]
Begin = Callable[..., Any]
Points = Callable[[dict[int, float]], tuple[SeriesPoint, ...]]
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def _incident(number: int, cause: IncidentCause, **fields: Any) -> IncidentView:
    return incident_view(number, cause=cause, witness="w", ranks=(), worker_ids=(), from_workers=2, **fields)


def test_recoveries_are_counted_by_cause_and_phase(store: Store, submit: Submit, begin: Begin) -> None:
    attempt = begin(submit())
    died = IncidentCause.WORKER_DIED
    attempt.report(
        incidents=(
            _incident(1, died, closed=True, detect_s=0.02, recovery_s=0.7, steps_lost=0, bytes_moved=2**20),
            _incident(2, died, closed=True, detect_s=0.2, recovery_s=4.0, steps_lost=6),
            _incident(3, died, detect_s=0.2, steps_lost=100),
            _incident(4, IncidentCause.STUCK),
        )
    )
    samples = scrape(store)
    assert value_of(samples, "shoal_incidents_total", cause="worker_died") == 2
    assert value_of(samples, "shoal_incidents_open", cause="worker_died") == 1
    assert value_of(samples, "shoal_incidents_open", cause="stuck") == 1
    whole = {"cause": "worker_died", "phase": "recovery"}
    assert value_of(samples, "shoal_recovery_seconds_count", **whole) == 2
    assert value_of(samples, "shoal_recovery_seconds_sum", **whole) == 4.7
    assert value_of(samples, "shoal_recovery_seconds_bucket", **whole, le="0.6") == 0
    assert value_of(samples, "shoal_recovery_seconds_bucket", **whole, le="0.8") == 1
    assert value_of(samples, "shoal_recovery_seconds_bucket", **whole, le="+Inf") == 2
    detect = {"cause": "worker_died", "phase": "detect"}
    assert value_of(samples, "shoal_recovery_seconds_bucket", **detect, le="0.05") == 1
    labels = {"cause": "worker_died"}
    assert value_of(samples, "shoal_incident_steps_lost_count", **labels) == 2
    assert value_of(samples, "shoal_incident_steps_lost_sum", **labels) == 6
    assert value_of(samples, "shoal_incident_steps_lost_bucket", **labels, le="0.0") == 1
    assert value_of(samples, "shoal_incident_bytes_moved_count", **labels) == 1
    assert value_of(samples, "shoal_incident_bytes_moved_bucket", **labels, le="1048576.0") == 1


def test_every_cause_has_its_histograms_before_its_first_incident(store: Store) -> None:
    samples = scrape(store)
    for cause in IncidentCause:
        assert value_of(samples, "shoal_incidents_total", cause=cause) == 0
        assert value_of(samples, "shoal_recovery_seconds_count", cause=cause, phase="recovery") == 0
        assert value_of(samples, "shoal_recovery_seconds_bucket", cause=cause, phase="detect", le="+Inf") == 0
        assert value_of(samples, "shoal_incident_steps_lost_count", cause=cause) == 0


def test_an_incident_counts_once_it_is_over_so_that_no_counter_falls_when_its_cause_is_corrected(
    store: Store, submit: Submit, begin: Begin
) -> None:
    attempt = begin(submit())
    attempt.report(incidents=(_incident(1, IncidentCause.COLLECTIVE_FAILED),))
    attempt.report(incidents=(_incident(1, IncidentCause.NODE_DIED),))
    during = scrape(store)
    assert value_of(during, "shoal_incidents_open", cause="node_died") == 1
    assert value_of(during, "shoal_incidents_total", cause="node_died") == 0
    attempt.report(end=AttemptEnd(reason=EndReason.SUPERVISOR_LOST, message="", step=0))  # it was never closed
    after = scrape(store)
    assert value_of(after, "shoal_incidents_open", cause="node_died") == 0
    assert value_of(after, "shoal_incidents_total", cause="node_died") == 1
    assert value_of(after, "shoal_incidents_total", cause="collective_failed") == 0


def test_the_newest_incident_of_a_cause_is_the_exemplar_of_its_bucket(store: Store, begin: Begin, job_id: str) -> None:
    begin(job_id).report(incidents=(_incident(3, IncidentCause.WORKER_DIED, closed=True, recovery_s=0.7),))
    exposition = exposition_of(store)
    body, media_type = exposition.render(OPENMETRICS)
    assert media_type.startswith("application/openmetrics-text")
    [(sample, exemplar)] = [
        (sample, sample.exemplar)
        for family in openmetrics_families(body.decode())
        for sample in family.samples
        if sample.exemplar is not None and sample.name == "shoal_recovery_seconds_bucket"
    ]
    assert sample.labels == {"cause": "worker_died", "phase": "recovery", "le": "0.8"}
    assert (exemplar.labels, exemplar.value) == ({"job_id": job_id, "incident": "1.3"}, 0.7)
    plain, _ = exposition.render("")
    assert b" # {" not in plain, "the text format has no exemplars"


def test_both_formats_hold_the_same_samples(store: Store, submit: Submit, begin: Begin) -> None:
    begin(submit(name="with-quotes")).report(status_loss=1.5, status_layout='a"b\\c\nd')
    body, _ = exposition_of(store).render(OPENMETRICS)
    openmetrics = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in openmetrics_families(body.decode())
        for sample in family.samples
    }
    process = ("process_",)  # its values move on
    plain = {key: value for key, value in scrape(store).items() if not key[0].startswith(process)}
    assert {key for key in plain if 'a"b\\c\nd' in dict(key[1]).values()}
    moving = {key for key in plain if key[0].startswith("shoal_database_seconds") or "filesystem" in key[0]}
    assert {key: value for key, value in openmetrics.items() if key in plain and key not in moving} == {
        key: value for key, value in plain.items() if key not in moving
    }


def test_the_time_of_a_backup_is_shown_once_there_is_one(store: Store, tmp_path: Path) -> None:
    assert value_of(scrape(store, state_dir=tmp_path), "shoal_backup_timestamp_seconds") is None
    mark_backup(tmp_path)
    os.utime(tmp_path / "backed-up", (1000.0, 1000.0))
    assert value_of(scrape(store, state_dir=tmp_path), "shoal_backup_timestamp_seconds") == 1000.0
    mark_backup(tmp_path / "no-server-here")


def test_each_node_is_in_one_state(store: Store) -> None:
    drain = DrainView(reason="r", requested_at=1.0, source=DrainSource.API)

    def node(name: str, **fields: Any) -> NodeView:
        return NodeView(node_id=name, ip="127.0.0.1", cpus=4, gpus=0, memory_gib=1, **{"alive": True, **fields})

    nodes = (
        node("a"),
        node("b", drain=drain, num_workers=1),
        node("c", drain=drain),
        node("d", on_probation=True),
        node("e", alive=False),
        node("f"),
    )
    samples = scrape(store, cluster=FakeClusterSource(*nodes))
    counts = {"ready": 2, "draining": 1, "drained": 1, "probation": 1, "dead": 1}
    assert {
        state: value_of(samples, "shoal_cluster_nodes", cluster="default", state=state) for state in counts
    } == counts


def test_each_cluster_has_its_own_numbers_and_of_one_that_is_away_only_its_silence_is_known(store: Store) -> None:
    source = FakeClusterSource(NodeView(node_id="a", ip="127.0.0.1", alive=True, cpus=4, gpus=0, memory_gib=1))
    west = ClusterSummary(name="west", connected=True, silent_s=0.2, cpus_total=8, cpus_free=2, gpus_total=2)
    away = ClusterSummary(name="away", silent_s=90.0, cpus_total=8)
    clusters = (*source.view.clusters, west, away, ClusterSummary(name="new"))
    source.view = source.view.model_copy(update={"clusters": clusters})
    samples = scrape(store, cluster=source)

    def of(metric: str, **labels: str) -> dict[str, float | None]:
        return {one.name: value_of(samples, f"shoal_cluster_{metric}", cluster=one.name, **labels) for one in clusters}

    assert of("connected") == {"default": 1, "west": 1, "away": 0, "new": 0}
    assert of("silent_seconds") == {"default": 0.5, "west": 0.2, "away": 90.0, "new": None}
    assert of("nodes", state="ready") == {"default": 1, "west": 0, "away": None, "new": None}
    assert of("resources", resource="gpu") == {"default": 0, "west": 2, "away": None, "new": None}
    assert of("free_resources", resource="cpu") == {"default": 1, "west": 2, "away": None, "new": None}


def test_the_owner_of_the_lease_is_the_leader(store: Store, lease: Lease) -> None:
    samples = scrape(store, clock=lambda: 2e9)
    assert value_of(samples, "shoal_lease_epoch") == 1
    assert value_of(samples, "shoal_lease_expiry_timestamp_seconds") == 1e9
    assert value_of(samples, "shoal_control_plane_leader") == 0  # it has expired
    for owner, now, leads in (("owner-1", 1.0, 1), ("owner-1", 2e9, 0), ("owner-2", 1.0, 0)):
        samples = scrape(store, owner, clock=lambda now=now: now)
        assert value_of(samples, "shoal_control_plane_leader") == leads


def test_requests_and_dropped_reports_are_shown(store: Store, submit: Submit, begin: Begin) -> None:
    requests = RequestMetrics()
    requests.observe("GET", "/v1/jobs/{job_id}", 200, 0.003)
    requests.observe("GET", "/v1/jobs/{job_id}/events", 200, None)
    requests.streams.add()
    attempt = begin(submit())
    attempt.report(JobState.SUCCEEDED)
    samples = scrape(store, requests=requests)
    route = {"method": "GET", "route": "/v1/jobs/{job_id}"}
    assert value_of(samples, "shoal_http_requests_total", **route, status="2xx") == 1
    assert value_of(samples, "shoal_http_request_seconds_bucket", **route, le="0.0025") == 0
    assert value_of(samples, "shoal_http_request_seconds_bucket", **route, le="0.005") == 1
    stream = {"method": "GET", "route": "/v1/jobs/{job_id}/events"}
    assert value_of(samples, "shoal_http_requests_total", **stream, status="2xx") == 1
    assert value_of(samples, "shoal_http_request_seconds_count", **stream) is None
    assert value_of(samples, "shoal_http_streams") == 1
    assert value_of(samples, "shoal_reports_dropped_total", reason="refused_state") == 1


def test_transactions_and_events_are_counted(store: Store, submit: Submit, begin: Begin) -> None:
    begin(submit())
    samples = scrape(store)
    assert value_of(samples, "shoal_events_total") == 2, "created, and its state has changed"
    written = value_of(samples, "shoal_database_seconds_count", kind="write")
    assert written is not None and written >= 3, "the lease, the job, its attempt"
    assert value_of(samples, "shoal_database_errors_total") == 0


def test_every_declared_metric_is_exported_and_no_other(store: Store) -> None:
    body, _ = exposition_of(store).render("")
    exported = [line.split()[2] for line in body.decode().splitlines() if line.startswith("# TYPE shoal_")]
    assert sorted(exported) == sorted(metric.name for metric in ALL)
    assert len(set(exported)) == len(exported)


def test_scrapes_within_a_second_share_one_snapshot(store: Store, submit: Submit) -> None:
    now = 0.0
    exposition = exposition_of(store, clock_mono=lambda: now)

    def queued() -> float | None:
        return value_of(samples_of(exposition.render("")[0].decode()), "shoal_jobs", state="QUEUED")

    assert queued() == 0
    submit()
    now = 0.9
    assert queued() == 0
    now = 2.0
    assert queued() == 1


def test_queue_wait_moves_and_shares_of_projects_are_shown(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    store.writing(queueing.put_project)("vision", ProjectRules())
    first = submit(project="vision", elasticity={"max_workers": 4})  # at 1.0; an attempt begins at 5.0
    begin(first, workers=2)
    begin(submit(project="unknown"), workers=1)
    submit(project="unknown", now=30.0)
    store.writing(driving.set_grant, lease.epoch)(first, workers=4, reason="more", now=6.0)
    store.writing(driving.set_grant, lease.epoch)(first, workers=4, reason="the same", now=6.0)
    store.writing(driving.set_grant, lease.epoch)(first, workers=3, reason="fewer", now=6.0)
    samples = scrape(store)
    assert value_of(samples, "shoal_queue_wait_seconds_count") == 2
    assert value_of(samples, "shoal_queue_wait_seconds_sum") == 8.0
    assert value_of(samples, "shoal_queue_wait_seconds_bucket", le="2.5") == 0
    assert value_of(samples, "shoal_queue_wait_seconds_bucket", le="5.0") == 2
    moves = {"start": 2, "grow": 1, "shrink": 1, "preempt": 0}
    assert {kind: value_of(samples, "shoal_scheduler_moves_total", kind=kind) for kind in moves} == moves
    assert value_of(samples, "shoal_project_workers", project="vision") == 3
    assert value_of(samples, "shoal_project_share", project="default") == 0.25
    assert value_of(samples, "shoal_project_queued_jobs", project="default") == 1
    assert value_of(samples, "shoal_project_workers", project="unknown") is None
    assert value_of(samples, "shoal_queue_longest_wait_seconds", project="default") == NOW - 30
    assert value_of(samples, "shoal_queue_longest_wait_seconds", project="vision") == 0
    store.writing(driving.preempt, lease.epoch)(first, reason="urgent", beneficiary="x", now=6.0)
    assert store.tallies.counts.value("MoveKind", MoveKind.PREEMPT) == 1


def test_a_job_that_returns_to_the_queue_waits_from_then_on(
    store: Store, begin: Begin, lease: Lease, job_id: str
) -> None:
    begin(job_id)
    store.writing(driving.requeue, lease.epoch)(job_id, reason=EndReason.SUPERVISOR_LOST, message="gone", now=60.0)
    assert value_of(scrape(store), "shoal_queue_longest_wait_seconds", project="default") == NOW - 60
