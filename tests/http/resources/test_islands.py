"""Islands over HTTP: a job for each, all or none, and the rounds in which they merge."""

from typing import Any

import pytest

from kit import island_rounds as kit
from shoal_api.client import InvalidSpec, NotFound
from shoal_api.client.errors import Conflict
from shoal_service.store import island_rounds
from shoal_service.views import SweepRequest

GRID = {"islands.index": [0, 1]}


def _submit(service: Any, spec: dict[str, Any], **islands: Any) -> list[str]:
    document = {**spec, "islands": {"num": 2, **islands}}
    view = service.client.submit_sweep(SweepRequest.model_validate({"spec": document, "grid": GRID}))
    return [job.id for job in view.jobs]


def test_the_jobs_of_a_sweep_know_the_job_of_island_0(service: Any, spec: dict[str, Any]) -> None:
    ids = _submit(service, spec)
    specs = [service.client.job(job_id).spec.islands for job_id in ids]
    assert [(one.index, one.run) for one in specs] == [(0, ids[0]), (1, ids[0])]


def test_the_same_sweep_again_submits_no_island_twice(service: Any, spec: dict[str, Any]) -> None:
    body = {"name": "atoll", "spec": {**spec, "islands": {"num": 2}}, "grid": GRID}
    first, second = (service.http.post("/v1/sweeps", json=body) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 200)
    assert [job["id"] for job in first.json()["jobs"]] == [job["id"] for job in second.json()["jobs"]]


def test_each_island_goes_to_its_cluster(service: Any, spec: dict[str, Any]) -> None:
    ids = _submit(service, spec, clusters=["east", "west"])
    assert [service.client.job(job_id).spec.worker.cluster for job_id in ids] == ["east", "west"]


def test_a_job_without_its_number_is_refused_with_the_way_out(service: Any, spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec) as refused:
        service.client.submit({**spec, "islands": {"num": 3}})
    [error] = refused.value.problem.errors
    assert error.path == "islands.index"
    assert "`shoal submit` makes one job for each island" in error.message
    assert '"grid": {"islands.index": [0, 1, 2]}' in error.message


def test_a_later_island_alone_needs_the_job_of_island_0(service: Any, spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec) as refused:
        service.client.submit({**spec, "islands": {"num": 2, "index": 1}})
    [error] = refused.value.problem.errors
    assert error.path == "islands.run" and "set islands.run to the id of the job of island 0" in error.message
    first = service.client.submit({**spec, "islands": {"num": 2, "index": 0}}).id
    added = service.client.submit({**spec, "islands": {"num": 2, "index": 1, "run": first}})
    assert added.spec.islands.run == first


def test_every_island_shows_the_rounds_of_all(service: Any, spec: dict[str, Any]) -> None:
    ids = _submit(service, spec)
    assert service.client.rounds(ids[1]) == ()
    decision = kit.close(service.store, service.epoch, ids[0], 0, [0, 1])
    service.store.writing(island_rounds.note, service.epoch)(ids[0], 1, [kit.contribution(1)], now=20.0)
    newest, closed = service.client.rounds(ids[0])
    assert service.client.rounds(ids[1]) == (newest, closed)
    assert (closed.round, closed.decision, closed.closed_at) == (0, decision, 10.0)
    assert (newest.round, newest.decision, newest.closed_at) == (1, None, None)
    assert [(one.island, one.tokens, one.num_bytes, one.arrived_at) for one in newest.arrived] == [(1, 100, 4096, 20.0)]


def test_the_job_with_the_ledger_is_deleted_last(service: Any, spec: dict[str, Any]) -> None:
    ids = _submit(service, spec)
    service.client.cancel(ids[0])
    with pytest.raises(Conflict, match=f"cancel them first: `shoal cancel {ids[1]}`"):
        service.client.delete_job(ids[0])
    assert service.client.rounds(ids[1]) == ()
    service.client.cancel(ids[1])
    service.client.delete_job(ids[0])


def test_a_job_without_islands_has_no_rounds(service: Any, spec: dict[str, Any]) -> None:
    assert service.client.rounds(service.client.submit(spec).id) == ()
    with pytest.raises(NotFound):
        service.client.rounds("job-none")


def test_the_jobs_of_a_run_are_found_by_a_condition(service: Any, spec: dict[str, Any]) -> None:
    """As the page of a job finds them."""
    ids = _submit(service, spec)
    _submit(service, spec)
    params = {"where": f'islands.run == "{ids[0]}"', "columns": "islands.index", "archived": True}
    items = service.http.get("/v1/jobs", params=params).json()["items"]
    assert {one["id"]: one["values"]["islands.index"] for one in items} == {ids[0]: 0, ids[1]: 1}
