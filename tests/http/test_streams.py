"""Server-sent events: gap-free under concurrent writers, resumable, ended when the job has, and never in the way."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from shoal_api.client import Client
from shoal_api.client.transport import parse_stream, split_lines
from shoal_api.http.followers import LogSelection, follow_log
from shoal_api.http.streams import Batch
from shoal_service.core.events.service import SupervisorRestarted
from shoal_service.reports import PendingLog
from shoal_service.store import driving
from shoal_workers.contract.job import EndReason

EVENTS = {"Accept": "text/event-stream"}


def write(service: Any, job_id: str, num_writers: int, num_each: int) -> list[threading.Thread]:
    def go() -> None:
        for number in range(num_each):
            service.record(job_id, number)

    threads = [threading.Thread(target=go) for _ in range(num_writers)]
    for thread in threads:
        thread.start()
    return threads


def test_streams_and_polls_miss_nothing_under_concurrent_writers(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    streamed: list[int] = []
    polled: list[int] = []

    def poll() -> None:
        after = 0
        while True:
            page = service.client.events_page(job.id, after=after, wait_s=10, limit=7)
            polled.extend(event.seq for event in page.items)
            after = page.next_after
            if page.ended:
                return

    readers = [
        threading.Thread(target=poll),
        threading.Thread(target=lambda: streamed.extend(e.seq for e in service.client.events(job.id, follow=True))),
    ]
    for reader in readers:
        reader.start()
    for writer in write(service, job.id, num_writers=4, num_each=40):
        writer.join()
    service.client.cancel(job.id)
    for reader in readers:
        reader.join(60)
    last = list(service.client.events(job.id))[-1].seq
    assert last > 160
    assert streamed == list(range(1, last + 1))
    assert polled == streamed


def test_a_stream_resumes_after_last_event_id_and_ends_with_the_job(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    service.record(job.id, 1)
    service.client.cancel(job.id)
    last = list(service.client.events(job.id))[-1].seq
    answer = service.http.get(f"/v1/jobs/{job.id}/events?after=1", headers=EVENTS | {"Last-Event-ID": "2"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = list(parse_stream(split_lines(iter([answer.content]))))
    assert [event.id for event in events[:-1]] == [str(seq) for seq in range(3, last + 1)]
    assert (events[-1].event, json.loads(events[-1].data)) == ("end", {"state": "CANCELLED"})
    again = service.http.get(f"/v1/jobs/{job.id}/events", headers=EVENTS | {"Last-Event-ID": str(last)})
    assert [event.event for event in parse_stream(split_lines(iter([again.content])))] == ["end"]


def test_a_quiet_stream_sends_heartbeats(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    with service.http.stream("GET", f"/v1/jobs/{job.id}/events?after=1", headers=EVENTS) as answer:
        lines = split_lines(answer.iter_bytes())
        assert ": heartbeat" in (next(lines) for _ in range(10))


def test_writes_of_another_process_are_seen(own_service: Any, spec: dict[str, Any], tmp_path: Any) -> None:
    job = own_service.client.submit(spec)
    other = type(own_service.store).open(f"sqlite:///{tmp_path}/shoal.db")  # its commits do not notify this process
    event = SupervisorRestarted(found=1, of=1)
    timer = threading.Timer(
        0.2, other.writing(driving.record_event, own_service.epoch), (job.id, event), {"now": time.time()}
    )
    timer.start()
    page = own_service.client.events_page(job.id, after=1, wait_s=20)
    assert [event.type for event in page.items] == [event.type]
    timer.join()
    other.close()


def test_a_job_and_the_list_of_jobs_are_streamed_as_they_change(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    with service.http.stream("GET", "/v1/jobs?limit=1", headers=EVENTS) as answer:
        pages = parse_stream(split_lines(answer.iter_bytes()))
        assert json.loads(next(pages).data)["items"][0]["state"] == "QUEUED"
        with service.http.stream("GET", f"/v1/jobs/{job.id}", headers=EVENTS) as one:
            states = parse_stream(split_lines(one.iter_bytes()))
            assert json.loads(next(states).data)["status"]["state"] == "QUEUED"
            service.client.cancel(job.id)
            assert json.loads(next(states).data)["status"]["state"] == "CANCELLED"
            assert next(states).event == "end"
        changed = next(pages)
        assert (changed.event, json.loads(changed.data)["items"][0]["state"]) == ("jobs", "CANCELLED")


@pytest.mark.parametrize("text", ["plain", "with \u2028 and \x85 and \x1c inside"])
def test_a_log_is_followed_to_the_end_of_the_job(service: Any, supervise: Any, text: str) -> None:
    lines = tuple(PendingLog(at=1.0, rank=0, worker_id="s", stream="stdout", text=f"{text} {n}") for n in range(700))
    job_id = supervise(logs=lines)
    service.store.writing(driving.requeue, service.epoch)(
        job_id, reason=EndReason.CLUSTER_LOST, message="", now=time.time()
    )
    service.client.cancel(job_id)
    followed = [entry.text for entry in service.client.logs(job_id, follow=True)]
    assert [one for one in followed if one.startswith(text)] == [f"{text} {n}" for n in range(700)]
    plain = service.http.get(f"/v1/jobs/{job_id}/logs?follow=true&tail=2&rank=0").text
    assert plain.count("\n") == 2 and "698" in plain and "699" in plain


def test_an_unknown_job_is_a_404_and_no_stream(service: Any) -> None:
    for part in ("", "/events", "/logs?follow=true"):
        assert service.http.get(f"/v1/jobs/job-0{part}", headers=EVENTS).status_code == 404


def test_open_streams_do_not_delay_the_stop_of_the_server(run_service: Any, store: Any, spec: dict[str, Any]) -> None:
    polled: list[int] = []
    with httpx.Client(timeout=90, trust_env=False) as reader:
        with run_service(store, grace_s=60) as service:
            reader.headers.update(service.http.headers)
            events = f"{service.url}/v1/jobs/{service.client.submit(spec).id}/events"
            polling = threading.Thread(
                target=lambda: polled.append(reader.get(f"{events}?after=1&wait=60").status_code)
            )
            polling.start()
            stream = reader.send(reader.build_request("GET", events, headers=EVENTS), stream=True)
            while service.num_watches < 2:
                service.client.health()
            begun_mono = time.monotonic()
        assert time.monotonic() - begun_mono < 30, "uvicorn's own grace time had to end the streams"
        polling.join(60)
        assert polled == [200]
        assert b"job.created" in stream.read()


def test_the_client_follows_over_a_restart_without_gaps_or_repeats(
    run_service: Any, store: Any, spec: dict[str, Any]
) -> None:
    seen: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    half_seen = threading.Event()
    with Client(f"http://127.0.0.1:{port}") as client:

        def follow(job_id: str) -> None:
            for event in client.events(job_id, follow=True):
                seen.append(event.seq)
                if len(seen) == 5:
                    half_seen.set()

        with run_service(store, port=port) as service:
            job = service.client.submit(spec)
            follower = threading.Thread(target=follow, args=(job.id,))
            follower.start()
            for number in range(4):
                service.record(job.id, number)
            assert half_seen.wait(60)
        with run_service(store, port=port) as service:
            for number in range(4):
                service.record(job.id, number)
            service.client.cancel(job.id)
            follower.join(60)
            assert not follower.is_alive()
            assert seen == list(range(1, len(list(service.client.events(job.id))) + 1))
            assert len(seen) >= 10


def test_readers_that_leave_are_forgotten(own_service: Any, spec: dict[str, Any]) -> None:
    job = own_service.client.submit(spec)
    path = f"/v1/jobs/{job.id}/events"
    for _ in range(5):
        with own_service.http.stream("GET", path, headers=EVENTS) as answer:
            next(answer.iter_bytes())
        with pytest.raises(httpx.ReadTimeout):
            own_service.http.get(f"{path}?after=1&wait=60", timeout=httpx.Timeout(60, read=0.3))
    deadline_mono = time.monotonic() + 60
    while own_service.num_watches and time.monotonic() < deadline_mono:
        own_service.client.health()
    assert own_service.num_watches == 0


def test_a_stream_with_a_bad_cursor_is_refused_before_it_begins(service: Any) -> None:
    response = service.http.get("/v1/jobs?cursor=nonsense", headers=EVENTS)
    assert (response.status_code, response.json()["code"]) == (400, "invalid-cursor")


@pytest.mark.parametrize("tail", [0, 1, 2, 2000, None])
@pytest.mark.parametrize("num_old", [0, 1500])
def test_a_followed_log_begins_with_its_tail_and_loses_no_line(
    service: Any, supervise: Callable[..., str], tail: int | None, num_old: int
) -> None:
    def lines(what: str, num: int) -> tuple[PendingLog, ...]:
        texts = [f"{what} {number}" for number in range(num)]
        return tuple(PendingLog(at=1.0, rank=0, worker_id="w", stream="stdout", text=text) for text in texts)

    def read(follower: Iterator[Batch]) -> list[str]:
        found: list[str] = []
        while True:
            batch = next(follower)
            found += [chunk.decode().partition("] ")[2].rstrip() for chunk in batch.chunks]
            if not batch.more:
                return found

    old, new = lines("old", num_old), lines("new", 3)
    job_id = supervise(logs=old)
    follower = follow_log(service.store, job_id, LogSelection(rank=0, tail=tail), plain=True)
    shown = num_old if tail is None else min(tail, num_old)
    assert read(follower) == [line.text for line in old[num_old - shown :]]
    assert read(follower) == []
    supervise(job_id, logs=new)
    assert read(follower) == [line.text for line in new], "all of them, however short the tail is"
