"""Events, logs, series, workers, incidents, checkpoints and parity, as one answer each."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kit.views import incident_view, series_point, worker_view
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.reports import PendingLog
from shoal_service.store import histories
from shoal_service.views import CheckpointView, JobStatus
from shoal_workers.contract.job import JobState


def point(step: int, loss: float = 1.0) -> SeriesPoint:
    return series_point(step, loss=loss, tokens_per_s=9.0, step_s=0.1)


def line(number: int, rank: int | None, text: str = "hello") -> PendingLog:
    return PendingLog(at=float(number), rank=rank, worker_id="s0", stream="stdout", text=f"{text} {number}")


def test_events_come_in_pages_without_gaps(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    for number in range(25):
        service.record(job.id, number)
    seen: list[int] = []
    after = 0
    while True:
        page = service.client.events_page(job.id, after=after, limit=10)
        assert page.next_after == (page.items[-1].seq if page.items else after)
        assert not page.ended
        seen += [event.seq for event in page.items]
        after = page.next_after
        if not page.items:
            break
    assert seen == list(range(1, 27))
    assert [event.seq for event in service.client.events(job.id, after=20)] == list(range(21, 27))


def test_metrics_of_a_task_are_in_its_series_its_overview_and_its_status(
    service: Any, supervise: Callable[..., str]
) -> None:
    points = tuple(
        point(step).model_copy(update={"metrics": {"f1": step / 4}, "val_metrics": {"f1": 0.5} if step == 2 else {}})
        for step in (1, 2, 3)
    )
    status = JobStatus(state=JobState.RUNNING, step=3, metrics={"f1": 0.75}, val_metrics={"f1": 0.5})
    job_id = supervise(series=points, status=status)
    assert [one.metrics for one in service.client.series(job_id)] == [{"f1": 0.25}, {"f1": 0.5}, {"f1": 0.75}]
    columns = service.client.overview(job_id).series
    assert columns.metrics == {"f1": (0.25, 0.5, 0.75)}
    assert columns.val_metrics == {"f1": (None, 0.5, None)}
    shown = service.client.job(job_id).status
    assert (shown.metrics, shown.val_metrics) == ({"f1": 0.75}, {"f1": 0.5})


def test_a_long_poll_answers_as_soon_as_there_is_an_event(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    timer = threading.Timer(0.2, service.record, (job.id, 7))
    timer.start()
    begun_mono = time.monotonic()
    page = service.client.events_page(job.id, after=1, wait_s=30)
    assert [event.data for event in page.items] == [{"found": 7, "of": 7}]
    assert 0.15 < time.monotonic() - begun_mono < 20
    timer.join()


def test_a_long_poll_of_a_quiet_job_comes_back_empty(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    page = service.client.events_page(job.id, after=1, wait_s=0.2)
    assert (page.items, page.next_after, page.ended) == ((), 1, False)


def test_a_long_poll_of_an_ended_job_does_not_wait(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    service.client.cancel(job.id)
    last = list(service.client.events(job.id))[-1].seq
    begun_mono = time.monotonic()
    page = service.client.events_page(job.id, after=last, wait_s=30)
    assert (page.items, page.ended) == ((), True)
    assert time.monotonic() - begun_mono < 20


def test_many_long_polls_wait_without_holding_threads(service: Any, spec: dict[str, Any]) -> None:
    """More waiters than the 40 threads that the server has."""
    job = service.client.submit(spec)
    counts: list[int] = []

    def wait() -> None:
        answer = service.http.get(f"/v1/jobs/{job.id}/events?after=1&wait=30", timeout=60)
        counts.append(len(answer.json()["items"]))

    threads = [threading.Thread(target=wait) for _ in range(60)]
    for thread in threads:
        thread.start()
    while service.num_watches < 60:
        service.client.health()
    service.record(job.id, 1)
    for thread in threads:
        thread.join(60)
    assert counts == [1] * 60


def test_a_log_as_text_holds_no_control_characters(service: Any, supervise: Any) -> None:
    job_id = supervise(logs=(line(1, None), line(2, 3, "\x1b[2J<b>\u2028")))
    answer = service.http.get(f"/v1/jobs/{job_id}/logs", headers={"Accept": "text/plain"})
    assert answer.headers["content-type"].startswith("text/plain")
    assert "[-] hello 1\n[3] \ufffd[2J<b>\ufffd 2\n[job] job " in answer.text


def test_workers_incidents_and_checkpoints_are_listed(service: Any, supervise: Any) -> None:
    worker = worker_view(worker_id="s0", node_id="n", pid=7, step=3)
    incident = incident_view(attempt=1, worker_ids=("s1",), at=5.0, from_workers=2)
    checkpoint = CheckpointView(step=2, url="/tmp/x", state="committed", attempt=1, generation=1)
    job_id = supervise(workers=(worker,), incidents=(incident,), checkpoints=(checkpoint,))
    assert service.client.workers(job_id) == (worker,)
    assert service.client.incidents(job_id) == (incident,)
    assert service.client.checkpoints(job_id) == (checkpoint,)


def test_wait_returns_at_the_requested_state(service: Any, supervise: Any) -> None:
    job_id = supervise(status=JobStatus(state=JobState.RUNNING, step=4))
    assert service.client.wait(job_id, until=[JobState.RUNNING], timeout_s=60).status.step == 4
    timer = threading.Timer(0.2, service.client.cancel, (job_id,))
    timer.start()
    job = service.client.wait(job_id, until=[JobState.CANCELLING], timeout_s=60)
    assert job.status.state is JobState.CANCELLING
    timer.join()


@pytest.mark.parametrize("wait", ["nan", "inf", "-1", "61", "x"])
def test_a_senseless_wait_is_refused(service: Any, wait: str) -> None:
    assert service.http.get(f"/v1/jobs/job-1/events?wait={wait}").status_code == 422


def test_a_tail_is_as_long_as_it_is_asked_for(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise(logs=tuple(line(number, 0) for number in range(2500)))
    everything = [entry.text for entry in service.client.logs(job_id, rank=0)]
    assert len(everything) == 2500
    for tail in (0, 1, 2000):
        newest = everything[len(everything) - tail :]
        assert [entry.text for entry in service.client.logs(job_id, rank=0, tail=tail)] == newest
        answer = service.http.get(f"/v1/jobs/{job_id}/logs?rank=0&tail={tail}")
        assert [entry["text"] for entry in answer.json()["items"]] == newest
        plain = service.http.get(f"/v1/jobs/{job_id}/logs?rank=0&tail={tail}", headers={"Accept": "text/plain"})
        assert len(plain.text.splitlines()) == tail
    last = list(service.client.logs(job_id, rank=0))[-1].seq
    assert service.http.get(f"/v1/jobs/{job_id}/logs?rank=0&tail=0").json()["next_after"] == last


Supervise = Callable[..., str]
Points = Callable[[dict[int, float]], Any]


def test_two_jobs_are_compared_and_the_client_reads_the_very_numbers(
    service: Any, supervise: Supervise, points: Points
) -> None:
    a, b = supervise(series=points({1: 1.0, 2: 0.1, 3: 3.0})), supervise(series=points({1: 1.0, 2: 0.2}))
    report = service.client.parity(a, b, max_points=10)
    assert report == service.store.reading(histories.compare_losses)(a, b, max_points=10)
    assert (report.max_rel_diff, report.max_rel_diff_step, report.steps_only_in_job) == (0.5, 2, 1)
    assert [point.step for point in report.points] == [1, 2]
    assert not service.client.parity(a, b, tolerance=0.6).within_tolerance, "one has a step that the other has not"
    c = supervise(series=points({1: 1.0, 2: 0.1}))
    assert service.client.parity(c, b, tolerance=0.6).within_tolerance
    assert service.client.parity(a, a).bit_identical


def test_losses_that_are_not_finite_survive_the_wire(service: Any, supervise: Supervise, points: Points) -> None:
    a, b = supervise(series=points({1: math.nan, 2: 1.0})), supervise(series=points({1: 1.0, 2: 1.0}))
    answer = service.http.get(f"/v1/jobs/{a}/parity", params={"against": b, "max_points": 10})
    assert answer.json()["max_rel_diff"] is None and answer.json()["points"][0]["loss"] is None
    report = service.client.parity(a, b, max_points=10)
    assert report.max_rel_diff == math.inf and report.points[0].rel_diff == math.inf
    assert math.isnan(report.points[0].loss) and report.points[0].against == 1.0
    assert service.client.parity(a, supervise()).max_rel_diff is None


def test_the_other_job_must_be_named_and_exist(service: Any, supervise: Supervise) -> None:
    a = supervise()
    assert service.http.get(f"/v1/jobs/{a}/parity").status_code == 422
    missing = service.http.get(f"/v1/jobs/{a}/parity", params={"against": "job-nobody"})
    assert missing.status_code == 404 and "job-nobody" in missing.json()["detail"]
    assert service.http.get(f"/v1/jobs/{a}/parity", params={"against": a, "tolerance": "nan"}).status_code == 422
