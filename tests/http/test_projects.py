"""The queue, the projects and the users through the API."""

import time
from typing import Any

import pytest

from kit.store_calls import set_queue
from shoal_api.client import ApiError
from shoal_api.client.spec_documents import find_user_name
from shoal_service.core.scheduling.market import Wait
from shoal_service.fleet_views import ProjectRules, UserRules

SPEC = {"stop": {"steps": 10}, "data": {"corpus": "python-stdlib"}}


@pytest.fixture
def service(own_service: Any) -> Any:
    return own_service


def test_a_project_is_defined_changed_and_deleted(service: Any) -> None:
    body = {"weight": 2, "guaranteed": 4}
    assert [service.http.put("/v1/projects/vision", json=body).status_code for _ in range(2)] == [201, 200]
    changed = service.client.set_project("vision", ProjectRules(limit=8))
    assert (changed.weight, changed.guaranteed, changed.limit, changed.is_defined) == (1.0, 0, 8, True)
    assert service.client.project("vision") == changed
    assert [one.name for one in service.client.projects()] == ["default", "vision"]
    service.client.delete_project("vision")
    with pytest.raises(ApiError) as error:
        service.client.delete_project("vision")
    assert error.value.code == "project-not-found"


def test_impossible_quotas_name_the_key_and_the_way_out(service: Any) -> None:
    answer = service.http.put("/v1/projects/vision", json={"guaranteed": 9, "limit": 8})
    assert answer.status_code == 422 and "Set limit to at least 9" in answer.text
    answer = service.http.put("/v1/projects/vision", json={"parent": "lab"})
    assert (answer.status_code, answer.json()["code"]) == (409, "project-conflict")
    assert "`shoal quota set lab`" in answer.json()["detail"]
    assert service.http.put("/v1/projects/Not%20a%20name", json={}).status_code == 422


def test_a_job_above_max_queued_is_refused_with_the_way_out(service: Any) -> None:
    service.client.set_project("vision", ProjectRules(max_queued=1))
    service.client.submit({**SPEC, "project": "vision"})
    with pytest.raises(ApiError) as error:
        service.client.submit({**SPEC, "project": "vision"})
    assert error.value.code == "queue-full"
    assert "shoal quota set vision --max-queued" in str(error.value)


def test_the_queue_and_the_job_say_who_holds_what_is_waited_for(service: Any) -> None:
    holder, job = (service.client.submit({**SPEC, "project": name, "priority": 3}) for name in ("audio", "vision"))
    at = time.time()
    set_queue(service.store, [Wait(job.id, "Needs 1 worker.", 1, (holder.id,), at + 60)], epoch=service.epoch, now=at)
    queue = service.client.queue()
    assert [one.job_id for one in queue.items] == [job.id, holder.id] and queue.num_queued == 2
    first = queue.items[0]
    assert (first.project, first.priority, first.place.holders) == ("vision", 3, (holder.id,))
    assert service.client.job(job.id).queue == first.place
    assert [one.name for one in queue.projects] == ["audio", "default", "vision"]
    assert len(service.client.queue(limit=1).items) == 1


def test_the_list_of_jobs_can_be_of_one_project(service: Any) -> None:
    service.client.submit(SPEC)
    job = service.client.submit({**SPEC, "project": "vision"})
    assert [one.id for one in service.client.jobs(project="vision")] == [job.id]
    assert len(list(service.client.jobs())) == 2
    assert service.http.get("/v1/jobs", params={"project": "A B"}).status_code == 422


def test_the_deadline_of_a_job_can_be_moved(service: Any) -> None:
    job = service.client.submit({**SPEC, "finish_by": "2030-01-31T18:00:00Z"})
    answer = service.http.patch(f"/v1/jobs/{job.id}", json={"finish_by": "2031-01-31T18:00:00+00:00"})
    assert answer.json()["spec"]["finish_by"] == job.spec.finish_by + 365 * 86400
    patched = service.client.events_page(job.id).items[-1]
    assert "finish_by" in patched.message


def test_limits_of_users_are_set_changed_and_deleted(service: Any) -> None:
    assert [service.http.put("/v1/users/ada", json={"max_running": 2}).status_code for _ in range(2)] == [201, 200]
    changed = service.client.set_user("ada", UserRules(max_queued=8))
    assert (changed.max_running, changed.max_queued, changed.is_defined) == (None, 8, True)
    assert service.client.user("ada") == changed
    assert [one.name for one in service.client.users()] == ["ada", "default"]
    service.client.delete_user("ada")
    with pytest.raises(ApiError) as error:
        service.client.delete_user("ada")
    assert error.value.code == "user-not-found"
    assert service.http.put("/v1/users/a%20b", json={}).status_code == 422


def test_a_job_has_the_user_of_its_spec_else_of_the_login(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "LAB\\ada")
    assert service.client.submit(SPEC).spec.user == "LAB-ada"
    assert service.client.submit({**SPEC, "user": "bob"}).spec.user == "bob"
    assert service.http.post("/v1/jobs", json=SPEC).json()["spec"]["user"] == "default"
    assert [one.user for one in service.client.jobs(user="bob")] == ["bob"]
    answer = service.http.post("/v1/jobs", json={**SPEC, "user": "a b"})
    assert answer.status_code == 422 and "user 'a b' is not valid" in answer.text


@pytest.mark.parametrize(("login", "user"), [("ada", "ada"), ("LAB\\ada l.", "LAB-ada-l"), ("", None), ("---", None)])
def test_a_login_name_becomes_a_valid_user(login: str, user: str | None) -> None:
    assert find_user_name(login) == user
