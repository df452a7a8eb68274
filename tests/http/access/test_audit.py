"""The audit: each change has its record, in the same transaction; refusals too; and nothing changes a record."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal_api.client import Client, Forbidden
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.core.desired import Desired
from shoal_service.store import JobEnded, Store, access, submissions
from shoal_service.store.access import CURRENT_ENTRY, AuditEntry, AuditQuery


def test_a_change_is_recorded_with_who_what_and_from_where(service: Any, spec: dict[str, Any]) -> None:
    made = service.client.create_token(TokenRequest(name="eve", role=Role.OPERATOR))
    with Client(service.url, token=made.token) as client:
        job = client.submit(spec)
        client.pause(job.id)
        client.job(job.id)
        client.validate(spec)
        with pytest.raises(Forbidden):
            client.delete_project("default")
    events = service.client.audit(actor="eve").items
    assert [(one.operation, one.job_id, one.outcome) for one in events] == [
        ("DELETE /v1/projects/{name}", "", "forbidden"),
        ("POST /v1/jobs/{job_id}/pause", job.id, "done"),
        ("POST /v1/jobs", job.id, "done"),
    ]
    assert {(one.role, one.token_id, one.address) for one in events} == {("operator", made.id, "127.0.0.1")}
    assert [one.operation for one in service.client.audit(job_id=job.id).items] == [
        "POST /v1/jobs/{job_id}/pause",
        "POST /v1/jobs",
    ]
    assert [(event.type, event.data.get("by")) for event in service.client.events(job.id)][:2] == [
        ("job.created", "eve"),
        ("job.requested", "eve"),
    ]


def test_a_refused_submission_is_recorded_as_refused_and_an_accepted_one_with_its_job(
    service: Any, spec: dict[str, Any], tmp_path: Path
) -> None:
    """Both store the code of the job before they submit it."""
    tmp_path.joinpath("mine.py").write_text("")
    packed = {**spec, "code": {"working_dir": str(tmp_path)}}
    made = service.client.create_token(TokenRequest(name="ann", role=Role.ADMIN))
    headers = {"Authorization": f"Bearer {made.token}", "Idempotency-Key": "k"}
    with httpx.Client(base_url=service.url, headers=headers) as client:
        answer = client.post("/v1/jobs", json=packed)
        assert answer.status_code == 201, answer.text
        job_id = answer.json()["id"]
        tmp_path.joinpath("mine.py").write_text("changed = True")
        assert client.post("/v1/jobs", json={**packed, "name": "other"}).status_code == 409
        assert client.post("/v1/jobs", json={**spec, "stop": {"steps": 0}}).status_code == 422
        client.post(f"/v1/jobs/{job_id}/cancel")
        assert client.post(f"/v1/jobs/{job_id}/pause").status_code == 409
    assert [(one.operation, one.job_id, one.outcome) for one in service.client.audit(actor="ann").items] == [
        ("POST /v1/jobs/{job_id}/pause", job_id, "job-ended"),
        ("POST /v1/jobs/{job_id}/cancel", job_id, "done"),
        ("POST /v1/jobs", "", "invalid-spec"),
        ("POST /v1/jobs", "", "idempotency-conflict"),
        ("POST /v1/jobs", job_id, "done"),
    ]


def test_what_fails_leaves_no_record_of_a_change(store: Store) -> None:
    entry = AuditEntry(at=1.0, address="10.0.0.1", operation="POST /x", path="/x", actor="eve", role="operator")
    token = CURRENT_ENTRY.set(entry)
    try:
        job, _ = store.writing(submissions.create)(_spec(), idempotency_key=None, now=time.time())
        assert len(store.reading(access.read)(AuditQuery())) == 1
        store.writing(submissions.request)(job.id, Desired.CANCEL, now=time.time())
        refused = CURRENT_ENTRY.set(
            AuditEntry(at=2.0, address="", operation="POST /y", path="/y", actor="eve", job_id=job.id)
        )
        with pytest.raises(JobEnded):
            store.writing(submissions.request)(job.id, Desired.RUN, now=time.time())
        CURRENT_ENTRY.reset(refused)
    finally:
        CURRENT_ENTRY.reset(token)
    assert [(one.operation, one.job_id) for one in store.reading(access.read)(AuditQuery())] == [("POST /x", job.id)]


def test_pages_of_the_audit(service: Any) -> None:
    for name in ("a1", "a2", "a3"):
        service.client.create_token(TokenRequest(name=name))
    first = service.client.audit(limit=2)
    assert len(first.items) == 2 and first.next_before == first.items[-1].number
    second = service.client.audit(limit=2, before=first.next_before)
    assert second.items[0].number < first.items[-1].number


def test_no_route_changes_the_audit(service: Any) -> None:
    assert {key for key in service.declarations if "audit" in key[1]} == {("GET", "/v1/audit")}


def _spec() -> Any:
    from shoal_workers.contract.checks.spec_errors import parse_spec

    return parse_spec({"name": "tiny", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 10}})
