"""The table and the curves of many jobs over REST: conditions, roles and projects, archived jobs, saved views."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from shoal_api.client import ApiError, Client, Forbidden, NotFound
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.fleet_views import Band, Panel, PanelKind, TableView, Workspace


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


def test_one_answer_has_many_jobs_with_what_columns_ask_for(service: Any, spec: dict[str, Any]) -> None:
    ids = [submit(service, spec, name=f"curves-{number}", labels={"team": f"t{number}"}) for number in range(3)]
    params = {"where": 'name ~ "curves-"', "columns": "label.team", "metric": ["loss", "metric.accuracy"]}
    found = service.http.get("/v1/curves", params=params).json()
    assert found["ids"] == ids[::-1] == [one["id"] for one in found["items"]] and found["total"] == 3
    assert found["items"][0]["values"] == {"label.team": "t2"}
    assert found["items"][0]["curve"] == {"step": [], "at": [], "values": {}}
    assert found["items"][0]["samples_per_step"] == service.client.job(ids[0]).spec.batch.global_size
    only = service.http.get("/v1/curves", params={"job": ids[:2], "limit": 1}).json()
    assert only["ids"] == [ids[1]] and only["total"] == 2


@pytest.mark.parametrize(
    ("params", "words"),
    [({"metric": "los"}, "metric='los': there is no such curve"), ({"where": "los < 2"}, "there is no 'los'")],
)
def test_a_wrong_name_is_a_problem_that_names_it(service: Any, params: dict[str, str], words: str) -> None:
    answer = service.http.get("/v1/curves", params=params)
    assert answer.status_code == 422 and words in answer.json()["detail"]


def test_jobs_of_hidden_projects_are_not_in_it(service: Any, spec: dict[str, Any]) -> None:
    hidden, seen = (submit(service, spec, project=name) for name in ("secret", "open"))
    token = service.client.create_token(TokenRequest(name="eve", role=Role.VIEWER, projects=frozenset({"open"}))).token
    headers = {"Authorization": f"Bearer {token}"}
    found = service.http.get("/v1/curves", params={"job": [hidden, seen]}, headers=headers).json()
    assert found["ids"] == [seen] and found["total"] == 1


def test_an_answer_is_compressed_and_its_tag_saves_the_next_one(service: Any, spec: dict[str, Any]) -> None:
    for number in range(20):
        submit(service, spec, name=f"tagged-{number}")
    params = {"where": 'name ~ "tagged-"'}
    plain = service.http.get("/v1/curves", params=params, headers={"Accept-Encoding": "identity"})
    packed = service.http.get("/v1/curves", params=params, headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert packed.json()["items"] == plain.json()["items"] and len(gzip.compress(plain.content)) < len(plain.content)
    again = service.http.get("/v1/curves", params=params, headers={"If-None-Match": packed.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    submit(service, spec, name="tagged-new")
    newer = service.http.get("/v1/curves", params=params, headers={"If-None-Match": packed.headers["etag"]})
    assert newer.status_code == 200 and newer.json()["total"] == 21


def test_the_stream_sends_what_has_changed_since_the_answer(service: Any, spec: dict[str, Any]) -> None:
    params = {"where": 'name ~ "streamed-"'}
    old = submit(service, spec, name="streamed-old")
    first = service.http.get("/v1/curves", params=params).json()
    headers = {"Accept": "text/event-stream"}
    with service.http.stream("GET", "/v1/curves", params=params | {"since": "00"}, headers=headers) as stream:
        assert [one["id"] for one in next(_documents(stream))["items"]] == [old], "an unknown position: everything"
    later = {**params, "since": first["position"]}
    with service.http.stream("GET", "/v1/curves", params=later, headers=headers) as stream:
        documents = _documents(stream)
        new = submit(service, spec, name="streamed-new")
        added = next(documents)
        assert [one["id"] for one in added["items"]] == [new] and added["ids"] == [new, old]
        service.client.cancel(old)
        while True:
            changed = next(documents)
            if any(one["id"] == old and one["state"] == "CANCELLED" for one in changed["items"]):
                break


def _documents(stream: Any) -> Iterator[Any]:
    return (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))


def test_a_workspace_is_kept_in_a_view(service: Any) -> None:
    panels = (Panel(y="loss", log_y=True, width=2), Panel(kind=PanelKind.SCATTER, x="optimizer.lr", y="loss"))
    saved = Workspace(panels=panels, group="label.team", colours={"speech": "#112233"}, zoom=(1.0, 20.0), smoothing=0.5)
    saved = saved.model_copy(update={"band": Band.STD_ERROR, "project": "speech", "limit": 30})
    view = TableView(where="loss < 2", workspace=saved)
    service.client.save_view("speech", "panels", view)
    assert service.client.views("speech")[0].view == view
    token = service.client.create_token(TokenRequest(name="v", role=Role.VIEWER, projects=frozenset({"speech"}))).token
    with Client(service.url, token=token) as client:
        assert client.views()[0].view.workspace == saved
    wrong = {"workspace": {"panels": [{"y": "loss", "width": 9}]}}
    answer = service.http.put("/v1/views/speech/wrong", json=wrong)
    assert answer.status_code == 422 and "width" in json.dumps(answer.json())
    with pytest.raises(ApiError, match="there is no 'los'"):
        service.client.save_view("speech", "wrong", TableView(workspace=Workspace(group="los")))
    service.client.delete_view("speech", "panels")  # other tests share the server
