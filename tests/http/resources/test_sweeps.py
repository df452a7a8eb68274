"""Sweeps over HTTP: the jobs of a grid, all or none; and who sees, shows and cancels them."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal_api.client import Client, Conflict, Forbidden, InvalidSpec, NotFound
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.fleet_views import ProjectRules
from shoal_service.store import access, driving
from shoal_service.views import JobStatus, SweepRequest
from shoal_workers.contract.job import JobState

Supervise = Callable[..., str]
GRID = {"optimizer.lr": ["1e-4", 0.0003], "seed": [1, 2]}


def request_for(spec: dict[str, Any], name: str | None, **changes: Any) -> SweepRequest:
    return SweepRequest.model_validate({"name": name, "spec": spec, "grid": GRID, **changes})


@pytest.fixture
def client_of(service: Any) -> Iterator[Callable[..., Client]]:
    clients = []

    def _client(role: Role, *projects: str) -> Client:
        request = TokenRequest(name="carol", role=role, projects=projects or None)
        made = service.store.writing(access.create_token)(request, by="test", now=time.time())
        clients.append(Client(service.url, token=made.token))
        return clients[-1]

    yield _client
    for client in clients:
        client.close()


def test_each_combination_is_a_job_in_the_order_of_the_grid(service: Any, spec: dict[str, Any]) -> None:
    body = {"name": "order", "spec": spec, "grid": GRID, "limit": 2, "prune": "median", "warmup_steps": 30}
    made = service.http.post("/v1/sweeps", json=body)
    view = made.json()
    assert (made.status_code, made.headers["location"]) == (201, "/v1/sweeps/default/order")
    assert (view["num_jobs"], view["num_by_state"]) == (4, {"QUEUED": 4})
    assert (view["limit"], view["prune"], view["warmup_steps"]) == (2, "median", 30)
    specs = [service.client.job(job["id"]).spec for job in view["jobs"]]
    assert [(one.optimizer.lr, one.seed) for one in specs] == [(1e-4, 1), (1e-4, 2), (3e-4, 1), (3e-4, 2)]
    assert [one.name for one in specs] == ["tiny-1", "tiny-2", "tiny-3", "tiny-4"]
    assert [one.labels["lr"] for one in specs] == ["1e-4", "1e-4", "0.0003", "0.0003"]
    assert {(one.sweep.name, one.sweep.limit, one.sweep.prune) for one in specs} == {("order", 2, "median")}
    event = next(iter(service.client.events(view["jobs"][0]["id"])))
    assert (event.type, event.data["by"]) == ("job.created", "bootstrap")
    record = service.client.audit(limit=1).items[0]
    assert (record.operation, record.path, record.job_id) == ("POST /v1/sweeps", "/v1/sweeps/default/order", "")


def test_the_same_request_again_submits_nothing_twice(service: Any, spec: dict[str, Any]) -> None:
    body = {"name": "again", "spec": spec, "grid": {"seed": [1, 2]}}
    first, second = (service.http.post("/v1/sweeps", json=body) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 200)
    assert [job["id"] for job in first.json()["jobs"]] == [job["id"] for job in second.json()["jobs"]]
    with pytest.raises(Conflict, match="another job number 1") as caught:
        service.client.submit_sweep(request_for(spec | {"stop": {"steps": 11}}, "again"))
    assert caught.value.code == "sweep-conflict"
    assert service.client.sweep("default", "again").num_jobs == 2


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"grid": {}}, "invalid-request", "grid"),
        ({"grid": {"seed": []}}, "invalid-request", "grid.seed: give one value or more"),
        ({"grid": {"seed": [1, "1"]}}, "invalid-request", "each of them once"),
        ({"grid": {"a..b": [1]}}, "invalid-request", "is not a path of keys"),
        ({"grid": {"name": ["a"]}}, "invalid-request", "the jobs are numbered"),
        ({"grid": {"seed": list(range(50)), "stop.steps": list(range(50))}}, "invalid-request", "2,500 combinations"),
        ({"grid": {"seed": ["{a"]}}, "invalid-request", "grid.seed"),
        ({"grid": {"annotations.x": ["y" * 200_000, *range(90)]}}, "invalid-spec", "at most 4096"),
        ({"name": "a b"}, "invalid-request", "name"),
        ({"prune": "mean"}, "invalid-request", "prune"),
        ({"grid": {"seed": [1, -2]}}, "invalid-spec", "With seed=-2: "),
        ({"grid": {"code": [{"archive": "1" * 64}]}}, "code-unknown", "is not stored here"),
    ],
)
def test_a_mistake_is_named_and_no_job_is_submitted(
    service: Any, spec: dict[str, Any], changes: dict[str, Any], code: str, words: str
) -> None:
    before = len(list(service.client.jobs()))
    refused = service.http.post("/v1/sweeps", json={"name": "wrong", "spec": spec, "grid": GRID} | changes)
    assert (refused.status_code, refused.json()["code"]) == (422, code), refused.json()
    assert words in refused.text
    assert len(list(service.client.jobs())) == before


def test_a_large_spec_is_not_multiplied_without_bound(service: Any, spec: dict[str, Any]) -> None:
    large = spec | {"annotations": {"why": "x" * 100_000}}
    refused = service.http.post("/v1/sweeps", json={"spec": large, "grid": {"seed": list(range(999))}})
    assert refused.status_code == 422 and "together more than 16 MiB" in refused.json()["detail"]


def test_a_queue_without_room_for_all_takes_none(service: Any, spec: dict[str, Any]) -> None:
    service.client.set_project("narrow", ProjectRules(max_queued=3))
    try:
        with pytest.raises(Conflict, match="No job of the sweep was submitted") as caught:
            service.client.submit_sweep(request_for(spec | {"project": "narrow"}, "wide"))
        assert caught.value.code == "queue-full"
        assert list(service.client.jobs(project="narrow")) == []
    finally:
        service.client.delete_project("narrow")


def test_sweeps_are_listed_in_pages_and_shown_with_the_best_job_first(
    service: Any, spec: dict[str, Any], supervise: Supervise
) -> None:
    for name in ("first", "second", "third"):
        service.client.submit_sweep(request_for(spec | {"project": "listed"}, name, grid={"seed": [1, 2, 3]}))
    page = service.client.sweeps(project="listed", limit=2)
    rest = service.client.sweeps(project="listed", limit=2, cursor=page.next_cursor)
    assert [one.name for one in (*page.items, *rest.items)] == ["third", "second", "first"]
    assert (page.items[0].num_jobs, rest.next_cursor) == (3, None)
    jobs = service.client.sweep("listed", "second").jobs
    for job, loss in zip(jobs, (3.0, 1.0, float("nan")), strict=True):
        service.store.writing(driving.begin_attempt, service.epoch)(job.id, workers=1, now=time.time())
        supervise(job.id, status=JobStatus(state=JobState.RUNNING, loss=loss, step=2))
    shown = service.client.sweep("listed", "second")
    assert [job.id for job in shown.jobs] == [jobs[1].id, jobs[0].id, jobs[2].id]
    assert shown.num_by_state == {JobState.RUNNING: 3}
    [listed] = service.client.sweeps(name="second").items
    assert listed.best is not None and listed.ended_at is None
    assert (listed.best.job, listed.best.name, listed.best.measure, listed.best.value) == (
        jobs[1].id,
        jobs[1].name,
        "loss",
        1.0,
    )
    assert service.client.sweeps(name="first").items[0].best is None
    with pytest.raises(NotFound, match="has no sweep 'fourth'"):
        service.client.sweep("listed", "fourth")


def test_cancel_ends_what_has_not_ended_and_names_it(service: Any, spec: dict[str, Any]) -> None:
    made = service.client.submit_sweep(request_for(spec, "stopped"))
    service.client.cancel(made.jobs[0].id)
    ended = service.client.cancel_sweep("default", "stopped")
    assert [job.id for job in ended.jobs] == [job.id for job in made.jobs[1:]]
    assert ended.num_by_state == {JobState.CANCELLED: 4}
    assert service.client.cancel_sweep("default", "stopped").jobs == ()
    record = service.client.audit(limit=1).items[0]
    assert record.operation == "POST /v1/sweeps/{project}/{name}/cancel"
    assert record.path == "/v1/sweeps/default/stopped/cancel"


def test_a_sweep_outlives_its_client_and_its_server(
    store: Any, run_service: Callable[..., Any], spec: dict[str, Any]
) -> None:
    request = request_for(spec, "long", limit=1)
    with run_service(store) as service:
        made = service.client.submit_sweep(request)
    with run_service(store) as service:
        found = service.client.sweep("default", "long")
        assert [job.id for job in found.jobs] == [job.id for job in made.jobs]
        assert (found.num_by_state, found.limit) == ({JobState.QUEUED: 4}, 1)
        assert [job.id for job in service.client.submit_sweep(request).jobs] == [job.id for job in made.jobs]


def test_a_token_of_projects_submits_and_sees_the_sweeps_of_these(
    service: Any, spec: dict[str, Any], client_of: Callable[..., Client]
) -> None:
    theirs = service.client.submit_sweep(request_for(spec | {"project": "theirs"}, "secret"))
    mine = client_of(Role.OPERATOR, "mine")
    assert mine.submit_sweep(request_for(spec, "open")).project == "mine"
    assert {one.project for one in mine.sweeps().items} == {"mine"}
    assert mine.sweeps(project="theirs").items == ()
    for ask in (mine.sweep, mine.cancel_sweep):
        with pytest.raises(NotFound) as caught:
            ask("theirs", "secret")
        assert caught.value.code == "sweep-not-found"
    with pytest.raises(Forbidden, match="not of the project 'theirs'"):
        mine.submit_sweep(request_for(spec | {"project": "theirs"}, "secret"))
    with pytest.raises(NotFound):
        mine.submit_sweep(request_for(spec | {"continue_from": {"job": theirs.jobs[0].id}}, "from"))
    with pytest.raises(Forbidden, match="a directory of the server"):
        mine.submit_sweep(request_for(spec, "files", grid={"code.working_dir": ["/etc"]}))
    viewer = client_of(Role.VIEWER)
    assert viewer.sweep("theirs", "secret").num_jobs == 4
    for refused in (lambda: viewer.submit_sweep(request_for(spec, "x")), lambda: viewer.cancel_sweep("mine", "open")):
        with pytest.raises(Forbidden):
            refused()


def test_a_spec_that_is_not_valid_is_an_exception_of_the_client(service: Any, spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="stop"):
        service.client.submit_sweep(request_for({"name": "tiny"}, "invalid"))


def test_values_are_drawn_at_random_and_more_samples_continue_the_sweep(service: Any, spec: dict[str, Any]) -> None:
    ranges = {
        "optimizer.lr": {"low": 1e-5, "high": 1e-2, "scale": "log"},
        "stop.steps": {"low": 5, "high": 900, "whole": True},
    }
    body = {"name": "drawn", "spec": spec, "grid": {"seed": [1, 2]}, "ranges": ranges, "samples": 3, "seed": 5}
    body |= {"prune": "halving", "reduction": 2, "warmup_steps": 4, "limit": 2}
    few = service.http.post("/v1/sweeps", json=body)
    assert few.status_code == 201, few.text
    assert (few.json()["num_jobs"], few.json()["prune"], few.json()["reduction"]) == (3, "halving", 2)
    specs = [service.client.job(job["id"]).spec for job in few.json()["jobs"]]
    assert all(1e-5 <= one.optimizer.lr <= 1e-2 and 5 <= one.stop.steps <= 900 for one in specs)
    assert all(float(one.labels["lr"]) == one.optimizer.lr and one.seed in (1, 2) for one in specs)
    more = service.http.post("/v1/sweeps", json=body | {"samples": 5}).json()
    assert [job["id"] for job in more["jobs"]][:3] == [job["id"] for job in few.json()["jobs"]]
    assert more["num_jobs"] == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranges": {"seed": {"low": 1, "high": 2}}}, "samples, the number of jobs, is missing"),
        ({"ranges": {"seed": {"low": 1, "high": 2}}, "samples": 2}, "grid has values of this key too"),
        ({"ranges": {"stop.steps": {"low": 9, "high": 2}}, "samples": 2}, "low must be a number less than high"),
        ({"samples": 9}, "only 4 different sets of values"),
        ({"samples": 1_001}, "1000"),
        ({"reduction": 1, "prune": "halving"}, "reduction"),
    ],
)
def test_a_mistake_in_ranges_is_named(service: Any, spec: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    refused = service.http.post("/v1/sweeps", json={"name": "wrong", "spec": spec, "grid": GRID} | changes)
    assert refused.status_code == 422 and words in refused.text
