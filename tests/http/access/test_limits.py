"""Limits: each is a 429 with Retry-After and a count; another principal is not concerned."""

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from shoal_api.client.credentials import find_token
from shoal_api.http.access.limits import Limiter, Limits
from shoal_api.http.problems import TooManyRequests
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Rate, Role, TokenBuckets
from shoal_service.store import Store, access
from shoal_service.telemetry.tallies import RequestMetrics


def http_of(url: str, token: str | None = None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {token or find_token('http://127.0.0.1:1')}"}
    return httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False)


def refused(answer: httpx.Response) -> bool:
    if answer.status_code != 429:
        return False
    assert answer.json()["code"] == "too-many-requests" and int(answer.headers["Retry-After"]) >= 1
    return True


def test_a_bucket_fills_again_with_time() -> None:
    buckets = TokenBuckets(Rate(per_s=2.0, burst=3.0))
    assert [buckets.wait_s("a", 10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert buckets.wait_s("b", 10.0) == 0.0
    assert [buckets.wait_s("a", 10.6), buckets.wait_s("a", 10.6)] == [0.0, pytest.approx(0.4)]


def test_a_token_that_asks_too_often_is_refused_and_others_are_not(serve: Any, store: Store) -> None:
    url, metrics = serve(limits=Limits(requests_per_s=0.5))
    other = store.writing(access.create_token)(TokenRequest(name="other", role=Role.VIEWER), by="test", now=time.time())
    with http_of(url) as http, http_of(url, other.token) as second:
        found: list[bool] = []
        while not any(found) and len(found) < 200:  # one more is allowed each two seconds
            found.append(refused(http.get("/v1/whoami")))
        assert found[:5] == [False] * 5 and found[-1]
        assert not refused(second.get("/v1/whoami"))
    assert metrics.refusals.values()["requests",] == sum(found)


GUESSED = "shoal_00000000_" + "a" * 43


@pytest.mark.parametrize(
    "guess",
    [
        lambda url: httpx.Request("GET", f"{url}/v1/whoami", headers={"Authorization": f"Bearer {GUESSED}"}),
        lambda url: httpx.Request("POST", f"{url}/v1/session", json={"token": GUESSED}),
        lambda url: httpx.Request("POST", f"{url}/v1/session", json={"code": "a" * 43}),
    ],
    ids=["header", "login", "link"],
)
def test_an_address_that_guesses_tokens_is_refused(serve: Any, guess: Callable[[str], httpx.Request]) -> None:
    url, metrics = serve(limits=Limits())
    with httpx.Client(timeout=30, trust_env=False) as http:
        statuses = []
        while 429 not in statuses and len(statuses) < 600:  # one more is allowed each second
            statuses.append(http.send(guess(url)).status_code)
    assert statuses[:60] == [401] * 60 and statuses[-1] == 429
    assert metrics.refusals.values()["failures",] >= 1
    with http_of(url) as http:
        assert http.get("/v1/whoami").status_code == 200, "a valid token of the same address"


def test_streams_of_a_token_are_counted(serve: Any) -> None:
    url, metrics = serve(limits=Limits(streams=1))
    events = {"Accept": "text/event-stream"}
    with http_of(url) as http:
        with http.stream("GET", "/v1/jobs", headers=events) as first:
            chunks = first.iter_bytes()  # kept: httpx closes the stream with its iterator
            assert first.status_code == 200 and next(chunks)
            assert refused(http.get("/v1/jobs", headers=events))
    assert metrics.refusals.values()["streams",] == 1 and metrics.streams.value() <= 1


def test_uploads_and_open_requests_are_counted() -> None:
    metrics = RequestMetrics()
    limiter = Limiter(Limits(uploads=1, requests_at_once=2), metrics)
    ada, bob = (Request({"type": "http", "client": (address, 1)}) for address in ("10.0.0.1", "10.0.0.2"))
    with limiter.upload(ada), limiter.upload(bob):
        with pytest.raises(TooManyRequests, match="SHOAL_LIMIT_UPLOADS"), limiter.upload(ada):
            pass
    with limiter.upload(ada), limiter.request(), limiter.request():
        with pytest.raises(TooManyRequests, match="SHOAL_LIMIT_AT_ONCE"), limiter.request():
            pass
    assert (metrics.refusals.values()["uploads",], metrics.refusals.values()["at_once",]) == (1, 1)


def test_the_sizes_of_documents_and_archives_are_settings_and_counted(serve: Any) -> None:
    url, metrics = serve(limits=Limits(body_bytes=1000, archive_bytes=2000))
    zipped = {"Content-Type": "application/zip"}
    with http_of(url) as http:
        large = http.post("/v1/jobs", json={"name": "x" * 2000})
        assert (large.status_code, large.json()["code"]) == (413, "body-too-large")
        assert "more than 1000 bytes (SHOAL_LIMIT_BODY_BYTES)" in large.json()["detail"]
        pieces = http.put(f"/v1/code/{'0' * 64}", content=iter([b"x" * 1500, b"x" * 1500]), headers=zipped)
        assert pieces.status_code == 413 and "SHOAL_LIMIT_ARCHIVE_BYTES" in pieces.json()["detail"]
        fits = http.put(f"/v1/code/{'0' * 64}", content=b"x" * 2000, headers=zipped)
        assert fits.json()["code"] == "code-mismatch", "of the allowed size, and no archive"
    assert (metrics.refusals.values()["body_bytes",], metrics.refusals.values()["archive_bytes",]) == (1, 1)


def test_an_upload_and_a_request_ask_the_limiter(serve: Any) -> None:
    headers = {"Content-Type": "application/zip"}
    url, metrics = serve(limits=Limits(uploads=0))
    with http_of(url) as http:
        assert refused(http.put(f"/v1/code/{'0' * 64}", content=b"PK", headers=headers))
    assert metrics.refusals.values()["uploads",] == 1
    url, metrics = serve(limits=Limits(requests_at_once=0))
    with http_of(url) as http:
        assert refused(http.get("/v1/whoami"))
    assert metrics.refusals.values()["at_once",] == 1
