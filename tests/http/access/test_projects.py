"""A token that is bound to projects: lists, streams and metrics have only their jobs, and it submits only theirs."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal_api.client import Client, Forbidden, NotFound
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.fleet_views import ProjectRules
from shoal_service.store import access, driving, submissions
from shoal_workers.contract.checks.spec_errors import parse_spec

EVENTS = {"Accept": "text/event-stream"}
SPEC = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 10}}


@pytest.fixture(scope="module")
def jobs(service: Any) -> Iterator[tuple[str, str]]:
    """A running job of each of the projects `mine` and `theirs`."""
    ids = []
    for project in ("mine", "theirs"):
        spec = parse_spec({**SPEC, "name": f"a-{project}", "project": project})
        job_id = service.store.writing(submissions.create)(spec, idempotency_key=None, now=time.time())[0].id
        service.store.writing(driving.begin_attempt, service.epoch)(job_id, workers=2, now=time.time())
        queued = parse_spec({**SPEC, "name": f"q-{project}", "project": project})
        service.store.writing(submissions.create)(queued, idempotency_key=None, now=time.time())
        service.client.set_project(project, ProjectRules())  # only those that are defined have metrics
        ids.append(job_id)
    yield ids[0], ids[1]
    for project in ("mine", "theirs"):
        service.client.delete_project(project)


@pytest.fixture(scope="module")
def bound(service: Any) -> Iterator[Callable[[Role], Client]]:
    clients = []

    def client(role: Role) -> Client:
        request = TokenRequest(name="ada", role=role, projects=("mine",), user="ada")
        made = service.store.writing(access.create_token)(request, by="test", now=time.time())
        clients.append(Client(service.url, token=made.token))
        return clients[-1]

    yield client
    for one in clients:
        one.close()


@pytest.mark.parametrize(
    "path", ["/v1/jobs", "/v1/overview", "/v1/queue", "/v1/projects", "/v1/webhooks", "/v1/deletions", "/metrics"]
)
def test_what_lists_jobs_has_only_those_of_the_projects(
    service: Any, jobs: tuple[str, str], bound: Callable[[Role], Client], path: str
) -> None:
    answer = bound(Role.VIEWER)._transport.send("GET", path).text
    everything = service.http.get(path).text
    if path not in ("/v1/webhooks", "/v1/deletions"):
        assert "mine" in answer and "theirs" in everything
    assert "theirs" not in answer and jobs[1] not in answer


def test_streams_have_only_jobs_of_the_projects(
    jobs: tuple[str, str], bound: Callable[[Role], Client], service: Any
) -> None:
    client = bound(Role.VIEWER)
    for path in ("/v1/jobs", "/v1/overview"):
        with client._transport.stream(path, {}, EVENTS) as answer:
            text = ""
            for chunk in answer.iter_text():
                text += chunk
                if "data:" in text and text.endswith("\n\n"):
                    break
            assert jobs[0] in text and jobs[1] not in text


def test_metrics_of_the_projects_only(jobs: tuple[str, str], bound: Callable[[Role], Client]) -> None:
    text = bound(Role.SCRAPER).metrics()
    assert f'shoal_job_state{{job_id="{jobs[0]}"' in text
    assert 'shoal_project_queued_jobs{project="mine"} 1' in text
    assert "shoal_jobs{" not in text and "process_" not in text


def test_losses_are_not_compared_with_a_job_of_another_project(
    jobs: tuple[str, str], bound: Callable[[Role], Client]
) -> None:
    with pytest.raises(NotFound):
        bound(Role.VIEWER).parity(jobs[0], jobs[1])


def test_a_submission_belongs_to_the_project_and_the_user_of_the_token(bound: Callable[[Role], Client]) -> None:
    client = bound(Role.OPERATOR)
    job = client.submit({**SPEC, "name": "tiny", "user": "bob"})
    assert (job.spec.project, job.spec.user) == ("mine", "ada")
    assert "user is ada, not bob: the token submits" in job.status.note
    client.cancel(job.id)
    with pytest.raises(Forbidden, match="may submit jobs of mine, not of the project 'theirs'"):
        client.submit({**SPEC, "name": "tiny", "project": "theirs"})


def test_only_an_admin_names_a_directory_of_the_server(service: Any, bound: Callable[[Role], Client]) -> None:
    body = {**SPEC, "name": "tiny", "task": "shapes:Shapes", "code": {"working_dir": "/etc"}}
    headers = {"Authorization": bound(Role.OPERATOR)._transport._http.headers["Authorization"]}
    answer = service.http.post("/v1/jobs", json=body, headers=headers)
    assert answer.status_code == 403 and "/etc" in answer.json()["detail"]
