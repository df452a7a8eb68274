"""The routes that supervisors dial, over HTTP: what they store and answer, and what they refuse."""

import threading
import time
from typing import Any

import httpx
import pytest
from pydantic_core import to_json

from kit.attempt_reports import reported
from kit.processes.server import until
from shoal_service.core.access import new_attempt_token
from shoal_service.core.endings import AttemptEnd
from shoal_service.home import HomeReport
from shoal_service.store import driving, submissions, supervisor_links
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason


class Supervisor:
    """Speaks for the first attempt of a job, without a library in between that would mend its requests."""

    def __init__(self, service: Any) -> None:
        spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}})
        self.service = service
        self.job_id = service.store.writing(submissions.create)(spec, idempotency_key=None, now=time.time())[0].id
        service.store.writing(driving.begin_attempt, service.epoch)(self.job_id, workers=1, now=time.time())
        token = new_attempt_token()
        service.store.writing(supervisor_links.keep_token, service.epoch)(self.job_id, 1, token)
        self.headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self.path = f"/v1/jobs/{self.job_id}/attempts/1"

    def ask(self, method: str, path: str = "", **more: Any) -> httpx.Response:
        headers = {**self.headers, **more.pop("headers", {})}
        return self.service.http.request(method, more.pop("base", self.path) + path, headers=headers, **more)

    def report(self, number: int, **more: Any) -> httpx.Response:
        reports = reported(number, number, **{name: more.pop(name) for name in ("end",) if name in more})
        body = to_json(HomeReport(life=1, after=number - 1, reports=reports).model_dump())
        return self.ask("POST", "/reports", content=body, **more)


@pytest.fixture
def supervisor(service: Any) -> Supervisor:
    return Supervisor(service)


def test_a_report_is_stored_and_counts_under_the_path_of_the_documented_route(supervisor: Supervisor) -> None:
    answer = supervisor.report(1)
    assert (answer.status_code, answer.json()) == (200, {"acknowledged": 1, "released": False})
    assert supervisor.service.store.get_job(supervisor.job_id).status.step == 1
    route = ("POST", "/v1/jobs/{job_id}/attempts/{attempt}/reports", "2xx")
    requests = supervisor.service.requests  # counted when the answer has been sent, which may be after it was read
    until(lambda: requests.finished.values().get(route) == 1, f"one request of {route}")


@pytest.mark.parametrize("query", ["after=0&wait_s=0", "wait_s=0&after=0", "", "after=0&wait_s=0.0"])
def test_a_directive_is_the_same_however_the_query_is_written(supervisor: Supervisor, query: str) -> None:
    store, epoch = supervisor.service.store, supervisor.service.epoch
    assert supervisor.ask("GET", f"/directive?{query}").json() == {"number": 0, "directive": None}
    store.writing(supervisor_links.put_directive, epoch)(supervisor.job_id, 1, '{"a":1}')
    assert supervisor.ask("GET", f"/directive?{query}").json() == {"number": 1, "directive": {"a": 1}}


def test_a_long_poll_is_answered_by_the_next_directive(supervisor: Supervisor) -> None:
    store, epoch = supervisor.service.store, supervisor.service.epoch
    answers: list[Any] = []
    poll = threading.Thread(target=lambda: answers.append(supervisor.ask("GET", "/directive?after=0&wait_s=20").json()))
    poll.start()
    store.writing(supervisor_links.put_directive, epoch)(supervisor.job_id, 1, '{"a":1}')
    poll.join(15)
    assert answers == [{"number": 1, "directive": {"a": 1}}]


@pytest.mark.parametrize(
    ("method", "path", "more", "status"),
    [
        ("POST", "/reports", {"content": b"{}"}, 400),
        ("POST", "/reports", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415),
        ("POST", "/reports?life=2", {"content": b"{}"}, 422),
        ("GET", "/reports", {}, 405),
        ("GET", "/directive?after=0&wait_s=31", {}, 422),
        ("GET", "/directive?after=-1&wait_s=1", {}, 422),
        ("GET", "/directive?after=0&wait_s=nan", {}, 422),
        ("GET", "/directive?after=0&wait_s=1&more=1", {}, 422),
        ("GET", "/directive", {"base": "/v1/jobs/another/attempts/1"}, 403),
        ("POST", "/reports", {"content": b"{}", "headers": {"Authorization": "Bearer shoal-attempt_unknown"}}, 401),
    ],
)
def test_what_is_wrong_is_refused_with_words(
    supervisor: Supervisor, method: str, path: str, more: dict[str, Any], status: int
) -> None:
    answer = supervisor.ask(method, path, **more)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json" and answer.json()["detail"]


def test_the_owner_of_the_service_is_no_supervisor(supervisor: Supervisor) -> None:
    own = {"Authorization": supervisor.service.http.headers["Authorization"]}
    assert supervisor.report(1, headers=own).status_code == 403


def test_a_token_that_is_known_from_a_moment_ago_ends_with_its_attempt(supervisor: Supervisor) -> None:
    end = AttemptEnd(reason=EndReason.FINISHED, message="", step=1)
    assert supervisor.report(1, end=end).json() == {"acknowledged": 1, "released": True}
    assert supervisor.report(2).status_code == 401
    assert supervisor.ask("GET", "/directive?after=0&wait_s=0").status_code == 401
