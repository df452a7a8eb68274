"""The Python client over a bad network: what is repeated, what is not, and what the user reads."""

import os
import pickle
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shoal_api.client import Client, Disconnected, NotFound, Unauthenticated, WaitTimeout
from shoal_api.client.transport import RetryPolicy
from shoal_service.core.access import ADMIN_TOKEN_FILE
from shoal_workers.contract.checks.spec_errors import parse_spec

QUICK = RetryPolicy(num_retries=3, first_s=0.01, most_s=0.02)


class Relay:
    """A TCP relay in front of the service that drops some connections after the request has been passed on."""

    def __init__(self, target: tuple[str, int], num_lost_answers: int) -> None:
        self._target = target
        self._num_lost = num_lost_answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        socket.create_connection(self._listener.getsockname()).close()
        self._thread.join(60)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            near, _ = self._listener.accept()
            with near, socket.create_connection(self._target) as far:
                near.settimeout(60)
                far.settimeout(60)
                request = near.recv(1 << 16)
                if not request:
                    return
                while b"\r\n\r\n" not in request:
                    request += near.recv(1 << 16)
                head, _, body = request.partition(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
                while len(body) < int(fields.get(b"content-length", b"0")):
                    body += near.recv(1 << 16)
                far.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
                answer = b""
                while chunk := far.recv(1 << 16):
                    answer += chunk
                if self._num_lost > 0:
                    self._num_lost -= 1
                else:
                    near.sendall(answer)


@pytest.fixture
def lossy(service: Any) -> Iterator[Any]:
    relays: list[Relay] = []

    def make(num_lost_answers: int) -> Client:
        host, port = service.url.removeprefix("http://").split(":")
        relays.append(Relay((host, int(port)), num_lost_answers))
        return Client(relays[-1].url, retry=QUICK)

    yield make
    for relay in relays:
        relay.close()


def test_a_submission_with_a_lost_answer_creates_one_job(service: Any, spec: dict[str, Any], lossy: Any) -> None:
    with lossy(2) as client:
        job = client.submit(parse_spec(spec | {"name": "only-once"}))
    assert [one.id for one in service.client.jobs(limit=20) if one.name == "only-once"] == [job.id]


def test_a_request_with_only_lost_answers_raises_disconnected(lossy: Any) -> None:
    with lossy(4) as client, pytest.raises(Disconnected) as caught:
        client.health()
    assert client.base_url in str(caught.value)


def test_an_address_without_a_server_raises_disconnected_with_a_hint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", retry=QUICK) as client:
        with pytest.raises(Disconnected, match="shoal serve"):
            client.job("job-1")
        with pytest.raises(Disconnected):
            list(client.events("job-1", follow=True))


def test_without_an_address_the_one_of_the_environment_counts(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_URL", raising=False)
    with Client() as client:
        assert client.base_url == "http://127.0.0.1:8470"
    monkeypatch.setenv("SHOAL_URL", service.url)
    with Client() as client:
        assert list(client.jobs()) == list(service.client.jobs())


def test_errors_carry_the_problem_and_survive_pickling(service: Any) -> None:
    with pytest.raises(NotFound) as caught:
        service.client.job("job-unknown")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.problem == caught.value.problem
    assert copy.code == "job-not-found"
    assert copy.problem.instance == "/v1/jobs/job-unknown"


def test_an_id_cannot_leave_its_path_segment(service: Any) -> None:
    with pytest.raises(Exception) as caught:
        service.client.job("../../healthz")
    assert caught.value.problem.status in (404, 422)


def test_scale_changes_the_elasticity(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    changed = service.client.scale(job.id, min_workers=2, max_workers=4, standby=1)
    assert changed.spec.elasticity.model_dump(include={"min_workers", "max_workers", "standby"}) == {
        "min_workers": 2,
        "max_workers": 4,
        "standby": 1,
    }
    assert changed.spec_version == job.spec_version + 1


def test_a_wait_that_takes_too_long_carries_the_job(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    with pytest.raises(WaitTimeout) as caught:
        service.client.wait(job.id, timeout_s=0.3)
    assert caught.value.job.id == job.id


def test_back_off_grows_and_is_bounded() -> None:
    policy = RetryPolicy(num_retries=9, first_s=0.1, most_s=1.0)
    delays = [policy.delay_s(failures, spread=0.999999) for failures in range(8)]
    assert delays[0] == pytest.approx(0.1, rel=1e-3)
    assert delays == sorted(delays)
    assert max(delays) <= 1.0


def test_a_client_finds_a_token_that_is_written_after_it_was_made(
    service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts opens its port before its owner's token is there."""
    written = Path(os.environ["SHOAL_STATE_DIR"]) / ADMIN_TOKEN_FILE
    monkeypatch.setenv("SHOAL_STATE_DIR", str(tmp_path))
    with Client(service.url, retry=QUICK) as client:
        with pytest.raises(Unauthenticated):
            client.tokens()
        shutil.copy2(written, tmp_path / ADMIN_TOKEN_FILE)
        assert client.tokens()


def test_an_unavailable_server_says_when_to_come_back_and_the_client_does(service: Any, spec: dict[str, Any]) -> None:
    """The second server stands for one whose database is locked: it refuses twice, then it passes requests on."""
    asked_mono: list[float] = []
    refusals = [503, 503]

    class Locked(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked_mono.append(time.monotonic())
            if refusals:
                self.send_response(refusals.pop())
                self.send_header("Retry-After", "1")
                self.end_headers()
                return
            answer = service.http.post(self.path)
            self.send_response(answer.status_code)
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: Any) -> None:
            pass

    job_id = service.client.submit(spec).id
    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        with Client(f"http://127.0.0.1:{server.server_address[1]}", retry=QUICK) as client:
            assert client.cancel(job_id).status.state.ended
        server.shutdown()
        thread.join()
    assert all(later - before >= 1.0 for before, later in pairwise(asked_mono)) and len(asked_mono) == 3


def test_every_answer_that_the_service_is_unavailable_says_when_to_come_back(own_service: Any) -> None:
    own_service.cluster.view = own_service.cluster.view.model_copy(update={"connected": False})
    answer = own_service.http.get("/readyz")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
