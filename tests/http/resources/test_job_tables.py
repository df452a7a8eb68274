"""The table of jobs over REST: conditions and their mistakes, names, archived jobs, saved views; roles and projects."""

from typing import Any

import pytest

from shoal_api.client import ApiError, Client, Forbidden, NotFound
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.fleet_views import TableView


def submit(service: Any, spec: dict[str, Any], **changes: Any) -> str:
    return str(service.client.submit({**spec, **changes}).id)


def test_a_condition_selects_orders_and_shows_in_both_lists(service: Any, spec: dict[str, Any]) -> None:
    ids = [submit(service, spec, name=f"table-{lr}", optimizer={"lr": lr}) for lr in (1e-4, 1e-2, 1e-3)]
    params = {"where": 'name ~ "table-" and lr >= 1e-3', "sort": "-lr", "columns": "lr,label.none,optimizer.name"}
    for path in ("/v1/jobs", "/v1/overview"):
        items = service.http.get(path, params=params).json()["items"]
        assert [one["id"] for one in items] == [ids[1], ids[2]]
        assert items[0]["values"] == {"lr": 0.01, "optimizer.name": "adamw"}
    first = service.client.jobs_page(where='name ~ "table-"', sort="lr", limit=2)
    last = service.client.jobs_page(where='name ~ "table-"', sort="lr", limit=2, cursor=first.next_cursor)
    assert [one.id for one in (*first.items, *last.items)] == [ids[0], ids[2], ids[1]]
    assert service.http.get("/v1/jobs", params={"cursor": first.next_cursor}).status_code == 400


@pytest.mark.parametrize("parameter", ["where", "sort", "columns"])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/overview"])
def test_a_mistake_is_a_problem_that_shows_its_place(service: Any, path: str, parameter: str) -> None:
    answer = service.http.get(path, params={parameter: "los"})
    assert answer.status_code == 422 and answer.json()["type"].endswith("invalid-request")
    assert answer.json()["detail"].splitlines() == ["there is no 'los'; near it are loss, blocks", "  los", "  ^^^"]


def test_names_and_jobs_of_hidden_projects_are_not_seen(service: Any, spec: dict[str, Any]) -> None:
    hidden = submit(service, spec, project="secret", labels={"codename": "x"})
    submit(service, spec, project="open", labels={"team": "x"})
    made = service.client.create_token(TokenRequest(name="eve", role=Role.OPERATOR, projects=frozenset({"open"})))
    assert {"label.codename", "label.team", "loss", "optimizer.lr"} <= {one.name for one in service.client.job_fields()}
    with Client(service.url, token=made.token) as client:
        names = {one.name for one in client.job_fields()}
        assert "label.team" in names and "label.codename" not in names
        assert hidden not in [one.id for one in client.jobs(where='project == "secret" or loss == null')]
        with pytest.raises(NotFound):
            client.archive(hidden)


def test_an_ended_job_is_archived_and_a_viewer_cannot(service: Any, spec: dict[str, Any]) -> None:
    job_id = submit(service, spec, name="shelved")
    with pytest.raises(ApiError, match="cannot be archived before it has ended"):
        service.client.archive(job_id)
    service.client.cancel(job_id)
    made = service.client.create_token(TokenRequest(name="eve", role=Role.VIEWER))
    with Client(service.url, token=made.token) as client, pytest.raises(Forbidden):
        client.archive(job_id)
    assert service.client.archive(job_id).archived_at is not None
    where = 'name == "shelved"'
    assert [one.id for one in service.client.jobs(where=where)] == []
    assert [one.id for one in service.client.jobs(where=where, archived=True)] == [job_id]
    assert service.client.job(job_id).archived_at is not None
    assert service.client.unarchive(job_id).archived_at is None
    assert [one.id for one in service.client.jobs(where=where)] == [job_id]
    assert [one.type for one in service.client.events(job_id)][-2:] == ["job.archived", "job.archived"]


def test_a_view_is_saved_for_all_who_see_its_project(service: Any) -> None:
    view = TableView(where="loss < 2", sort="-loss", columns="optimizer.lr")
    assert service.client.save_view("speech", "best runs", view).saved_by == service.client.whoami().name
    newer = view.model_copy(update={"archived": True})
    service.client.save_view("speech", "best runs", newer)
    assert [(one.name, one.view) for one in service.client.views("speech")] == [("best runs", newer)]
    tokens = {
        (role, project): service.client.create_token(
            TokenRequest(name=f"{role}-{project}", role=role, projects=frozenset({project}))
        ).token
        for role in (Role.VIEWER, Role.OPERATOR)
        for project in ("speech", "vision")
    }
    with Client(service.url, token=tokens[Role.VIEWER, "speech"]) as client:
        assert [one.name for one in client.views()] == ["best runs"]
        with pytest.raises(Forbidden):
            client.delete_view("speech", "best runs")
    with Client(service.url, token=tokens[Role.OPERATOR, "vision"]) as client:
        assert client.views() == ()
        with pytest.raises(NotFound):
            client.save_view("speech", "mine", view)
        with pytest.raises(NotFound):
            client.delete_view("speech", "best runs")
    with Client(service.url, token=tokens[Role.OPERATOR, "speech"]) as client:
        client.delete_view("speech", "best runs")
        assert client.views() == ()
        with pytest.raises(NotFound, match="has no view 'best runs'"):
            client.delete_view("speech", "best runs")
        with pytest.raises(ApiError, match="there is no 'los'"):
            client.save_view("speech", "wrong", TableView(where="los < 2"))
