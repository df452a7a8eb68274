"""The documents and streams behind the pages: complete, resumable, and idle while nothing happens."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from kit.store_calls import replace_call
from shoal_api.client.transport import parse_stream, split_lines
from shoal_api.http.followers import OverviewReader, Position, follow_overview
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.reports import PendingLog
from shoal_service.store import histories, submissions
from shoal_service.views import JobPatch, JobStatus
from shoal_workers.contract.job import JobState

EVENTS = {"Accept": "text/event-stream"}
Points = Callable[[dict[int, float]], tuple[SeriesPoint, ...]]


def until(stream: Any, last: str) -> dict[str, tuple[Any, str]]:
    """The parts of a stream up to the first with the name `last`: data and id by name."""
    parts = {}
    for part in stream:
        parts[part.event] = (json.loads(part.data), part.id)
        if part.event == last:
            return parts
    raise AssertionError(f"the stream ended without {last}")


def test_a_job_is_shown_in_one_document(service: Any, supervise: Callable[..., str], points: Points) -> None:
    job_id = supervise(series=points({1: 3.0, 2: 2.0}), status=JobStatus(state=JobState.RUNNING, step=2, workers=2))
    overview = service.client.overview(job_id)
    assert overview.job.id == job_id
    assert (overview.series.step, overview.series.loss) == ((1, 2), (3.0, 2.0))
    assert overview.samples.state[-1] is JobState.RUNNING and overview.samples.workers[-1] == 2
    assert [event.type for event in overview.events][:2] == ["job.created", "job.state"]


def test_a_stream_of_a_job_begins_with_everything_and_goes_on_with_what_is_new(
    service: Any, supervise: Callable[..., str], points: Points
) -> None:
    line = PendingLog(at=1.0, rank=0, worker_id="w", stream="stdout", text="hello")
    job_id = supervise(series=points({1: 3.0, 2: 2.0}), logs=(line,))
    path = f"/v1/jobs/{job_id}/overview?logs=true"
    with service.http.stream("GET", path, headers=EVENTS) as answer:
        stream = parse_stream(split_lines(answer.iter_bytes()))
        first = until(stream, "logs")
        assert first["series"][0]["replace"] and first["series"][0]["columns"]["step"] == [1, 2]
        assert "hello" in [line["text"] for line in first["logs"][0]]
        service.record(job_id, 1)
        second = until(stream, "logs")
        assert "series" not in second and len(second["events"][0]) == len(second["logs"][0]) == 1
        position = second["logs"][1]
    service.record(job_id, 2)
    with service.http.stream("GET", path, headers=EVENTS | {"Last-Event-ID": position}) as answer:
        resumed = until(parse_stream(split_lines(answer.iter_bytes())), "events")
        assert [event["data"]["found"] for event in resumed["events"][0]] == [2]
        assert resumed["series"][0] == {"replace": False, "columns": resumed["series"][0]["columns"]}
        assert resumed["series"][0]["columns"]["step"] == []


def test_many_streams_of_one_job_get_the_same_parts(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise()
    found: list[Any] = []

    def watch() -> None:
        with httpx.Client(base_url=service.url, timeout=30, trust_env=False, headers=service.http.headers) as http:
            with http.stream("GET", f"/v1/jobs/{job_id}/overview", headers=EVENTS) as answer:
                stream = parse_stream(split_lines(answer.iter_bytes()))
                until(stream, "events")
                ready.release()
                found.append(until(stream, "events")["events"])

    ready = threading.Semaphore(0)
    watchers = [threading.Thread(target=watch) for _ in range(5)]
    for watcher in watchers:
        watcher.start()
    for _ in watchers:
        assert ready.acquire(timeout=60)
    service.record(job_id, 7)
    for watcher in watchers:
        watcher.join(60)
    assert len(found) == 5 and all(one == found[0] for one in found)


def test_an_open_stream_reads_nothing_while_nothing_happens(own_service: Any, spec: dict[str, Any]) -> None:
    job = own_service.client.submit(spec)
    reads: list[str] = []
    looks: list[float] = []
    read = own_service.store.reading(histories.read_job_version)
    look = own_service.store.reading(histories.read_changed_jobs)

    def counted(job_id: str) -> Any:
        reads.append(job_id)
        return read(job_id)

    def counted_look(since: float) -> Any:
        looks.append(since)
        return look(since)

    replace_call(own_service.store, histories.read_job_version, counted)
    replace_call(own_service.store, histories.read_changed_jobs, counted_look)
    with own_service.http.stream("GET", f"/v1/jobs/{job.id}/overview", headers=EVENTS) as answer:
        lines = split_lines(answer.iter_bytes())
        heartbeats = (line for line in lines if line == ": heartbeat")
        while len(looks) < 2:  # the first look at what other writers did finds the job new
            next(heartbeats)
        for _ in range(2):
            next(heartbeats)
        before = len(reads)
        for _ in range(10):
            next(heartbeats)
        assert len(reads) == before


def test_the_overview_of_all_jobs_is_filtered_and_streamed(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit({**spec, "name": "cod", "labels": {"sweep": "depth", "depth": "3"}})
    found = service.client.overview_of_all(label="depth=3")
    assert [one.id for one in found.items] == [job.id] and found.items[0].labels["sweep"] == "depth"
    assert found.num_by_state[JobState.QUEUED] >= 1
    with service.http.stream("GET", "/v1/overview?label=sweep%3Ddepth", headers=EVENTS) as answer:
        stream = parse_stream(split_lines(answer.iter_bytes()))
        assert until(stream, "fleet")["fleet"][0]["items"][0]["state"] == "QUEUED"
        service.client.cancel(job.id)
        assert until(stream, "fleet")["fleet"][0]["items"][0]["state"] == "CANCELLED"
    assert service.http.get("/v1/overview?label=%3D3").status_code == 422


def test_a_search_reads_the_jobs_only(service: Any, supervise: Callable[..., str], points: Points) -> None:
    job_id = supervise(series=points({1: 3.0, 2: 2.0}), status=JobStatus(state=JobState.RUNNING, step=2, workers=2))
    everything = service.http.get(f"/v1/overview?search={job_id}").json()
    found = service.http.get(f"/v1/overview?jobs_only=true&search={job_id}").json()
    [whole], [plain] = everything["items"], found["items"]
    assert whole["losses"] and not plain["losses"]
    assert {**whole, "losses": plain["losses"], "world_sizes": plain["world_sizes"]} == plain
    assert (found["total"], found["num_by_state"], found["nodes"]) == (1, {}, []) and everything["num_by_state"]


def test_every_version_of_a_spec_is_kept(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    service.store.writing(submissions.patch)(job.id, JobPatch(priority=5), if_match=None, now=time.time())
    versions = service.client.spec_versions(job.id)
    assert [(one.version, one.spec.priority) for one in versions] == [(1, 0), (2, 5)]


def test_pages_that_are_equally_far_share_one_read_of_the_database(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise(status=JobStatus(state=JobState.RUNNING, step=2, workers=2))
    reader = OverviewReader(service.store)

    def num_reads() -> int:
        return service.store.tallies.seconds.values()["read",].count

    async def read(number: int) -> tuple[int, set[tuple[bytes, ...]]]:
        followers = [follow_overview(reader, job_id, Position(), logs=True) for _ in range(number)]
        before = num_reads()
        batches = await asyncio.gather(*(anext(follower) for follower in followers))
        return num_reads() - before, {batch.chunks for batch in batches}

    alone, [chunks] = asyncio.run(read(1))
    assert asyncio.run(read(200)) == (alone, {chunks})
