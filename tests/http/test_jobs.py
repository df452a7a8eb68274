"""Submitting, listing, showing, changing and stopping jobs."""

import json
from typing import Any

import pytest

from shoal_service.fleet_views import NodeView
from shoal_service.views import ElasticityPatch, JobPatch
from shoal_workers.contract.job import JobState

YAML = "name: from-yaml\ndata: {corpus: python-stdlib}\nstop: {steps: 3}\n"


def test_a_job_is_created_with_its_address_and_tag(service: Any, spec: dict[str, Any]) -> None:
    response = service.http.post("/v1/jobs", json=spec)
    job = response.json()
    assert response.status_code == 201
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert job["status"]["state"] == "QUEUED"
    shown = service.http.get(response.headers["location"])
    assert shown.json() == job
    assert shown.headers["etag"] == response.headers["etag"]


@pytest.mark.parametrize("media_type", ["application/yaml", "text/x-yaml; charset=utf-8"])
def test_yaml_is_accepted(service: Any, media_type: str) -> None:
    response = service.http.post("/v1/jobs", content=YAML, headers={"Content-Type": media_type})
    assert (response.status_code, response.json()["spec"]["stop"]["steps"]) == (201, 3)


def test_a_repeated_key_gives_the_same_job(service: Any, spec: dict[str, Any]) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = service.http.post("/v1/jobs", json=spec, headers=headers)
    second = service.http.post("/v1/jobs", json=spec, headers=headers)
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"]
    other = service.http.post("/v1/jobs", json=spec | {"name": "other"}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency-conflict")


def test_an_invalid_spec_is_answered_with_all_errors(service: Any, spec: dict[str, Any]) -> None:
    response = service.http.post("/v1/jobs", json=spec | {"nam": "x", "seed": -1})
    problem = response.json()
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["type"] == "/problems/invalid-spec"
    errors = {error["path"]: error["message"] for error in problem["errors"]}
    assert "Did you mean 'name'" in errors["nam"]
    assert "seed" in errors


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/jsonx"])
def test_other_media_types_are_415(service: Any, content_type: str) -> None:
    response = service.http.post("/v1/jobs", content=b"{}", headers={"Content-Type": content_type})
    assert (response.status_code, response.json()["code"]) == (415, "unsupported-media-type")


def test_a_body_over_one_mebibyte_is_413_declared_or_not(service: Any, spec: dict[str, Any]) -> None:
    body = json.dumps(spec | {"model": {"x": "y" * (1 << 20)}}).encode()
    headers = {"Content-Type": "application/json"}
    assert service.http.post("/v1/jobs", content=body, headers=headers).status_code == 413
    chunks = (body[start : start + 65536] for start in range(0, len(body), 65536))
    assert service.http.post("/v1/jobs", content=chunks, headers=headers).status_code == 413


def test_the_list_is_paged_newest_first_and_filtered(service: Any, spec: dict[str, Any]) -> None:
    ids = [service.client.submit(spec).id for _ in range(5)]
    service.client.cancel(ids[1])
    seen = []
    cursor = None
    while True:
        page = service.client.jobs_page(limit=2, cursor=cursor)
        seen += [job.id for job in page.items]
        cursor = page.next_cursor
        if len(seen) >= 5:
            break
    assert seen[:5] == ids[::-1]
    both = service.http.get("/v1/jobs", params={"state": ["CANCELLED", "FAILED"]}).json()["items"]
    assert both[0]["id"] == ids[1]
    assert {job["state"] for job in both} <= {"CANCELLED", "FAILED"}
    assert [job.id for job in service.client.jobs(state=[JobState.QUEUED], limit=3)] == [ids[4], ids[3], ids[2]]


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("cursor=nonsense", 400, "invalid-cursor"),
        ("limit=0", 422, "invalid-request"),
        ("limit=1001", 422, "invalid-request"),
        ("limit=" + "9" * 5000, 422, "invalid-request"),
        ("state=SLEEPING", 422, "invalid-request"),
        ("cursor=%00", 400, "invalid-cursor"),
        ("cursor=%ff%fe", 400, "invalid-cursor"),
    ],
)
def test_bad_list_parameters_are_refused(service: Any, query: str, status: int, code: str) -> None:
    response = service.http.get(f"/v1/jobs?{query}")
    assert (response.status_code, response.json()["code"]) == (status, code)


def test_an_unchanged_job_is_304(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    path = f"/v1/jobs/{job.id}"
    tag = service.http.get(path).headers["etag"]
    unchanged = service.http.get(path, headers={"If-None-Match": f'"other", W/{tag}'})
    assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", tag)
    service.client.cancel(job.id)
    changed = service.http.get(path, headers={"If-None-Match": tag})
    assert (changed.status_code, changed.json()["status"]["state"]) == (200, "CANCELLED")


def test_a_change_needs_the_tag_that_the_spec_has(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    path = f"/v1/jobs/{job.id}"
    tag = service.http.get(path).headers["etag"]
    first = service.http.patch(path, json={"priority": 5}, headers={"If-Match": tag})
    assert (first.status_code, first.json()["spec"]["priority"]) == (200, 5)
    second = service.http.patch(path, json={"priority": 6}, headers={"If-Match": tag})
    assert (second.status_code, second.json()["code"]) == (412, "precondition-failed")
    merged = service.http.patch(
        path,
        content=b'{"elasticity": {"max_workers": 4}}',
        headers={"Content-Type": "application/merge-patch+json", "If-Match": first.headers["etag"]},
    )
    assert merged.json()["spec"]["elasticity"]["max_workers"] == 4
    assert service.client.patch(job.id, JobPatch(priority=1), if_match=merged.json()["etag"]).spec.priority == 1


def test_labels_and_annotations_are_merged_and_null_removes_one(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec | {"labels": {"team": "a", "draft": "1"}, "annotations": {"why": "x"}})
    path = f"/v1/jobs/{job.id}"
    changes = {"labels": {"draft": None, "lr": "3e-4", "absent": None}, "annotations": {"why": None, "what": "y\nz"}}
    patched = service.http.patch(path, json=changes, headers={"If-Match": f'"{job.etag}"'})
    changed = patched.json()["spec"]
    assert (patched.status_code, changed["labels"]) == (200, {"team": "a", "lr": "3e-4"})
    assert changed["annotations"] == {"what": "y\nz"}
    stale = service.http.patch(path, json={"labels": {"x": "1"}}, headers={"If-Match": f'"{job.etag}"'})
    assert (stale.status_code, stale.json()["code"]) == (412, "precondition-failed")
    event = list(service.client.events(job.id))[-1]
    assert event.message == "spec changed to version 2: labels, annotations"
    assert (event.data["labels"], event.data["annotations"]) == (changes["labels"], ["what", "why"])
    assert service.client.audit(job_id=job.id).items[0].operation == "PATCH /v1/jobs/{job_id}"


def test_only_name_labels_and_annotations_of_an_ended_job_can_be_changed(service: Any, spec: dict[str, Any]) -> None:
    path = f"/v1/jobs/{service.client.submit(spec).id}"
    service.http.post(f"{path}/cancel")
    assert service.http.patch(path, json={"labels": {"kept": "no"}}).json()["spec"]["labels"] == {"kept": "no"}
    both = service.http.patch(path, json={"labels": {"kept": "yes"}, "priority": 3})
    assert (both.status_code, both.json()["code"]) == (409, "job-ended")
    assert "except its name, labels and annotations" in both.json()["detail"]
    assert service.http.get(path).json()["spec"]["labels"] == {"kept": "no"}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"labels": {"-x": "1"}}, "labels", "label '-x': a name has at most 63 letters"),
        ({"labels": {"x": "\n"}}, "labels", "a value has at most 255 printable characters"),
        ({"labels": {f"n{i}": "1" for i in range(33)}}, "labels", "32"),
        ({"annotations": {"x": "y" * 4097}}, "annotations", "at most 4096 characters"),
        ({"labels": {"sweep": None}}, "labels.sweep", "set from sweep.name, which is 'mine': it cannot be removed"),
        ({"labels": {"sweep": "other"}}, "labels", "Leave the label out"),
    ],
)
def test_labels_that_a_spec_cannot_have_are_refused(
    service: Any, spec: dict[str, Any], changes: dict[str, Any], path: str, words: str
) -> None:
    job = service.client.submit(spec | {"sweep": {"name": "mine"}})
    refused = service.http.patch(f"/v1/jobs/{job.id}", json=changes)
    assert refused.status_code == 422, refused.json()
    assert any(words in error["message"] for error in refused.json()["errors"]), refused.json()
    assert service.client.job(job.id).spec.labels == {"sweep": "mine"}


@pytest.mark.parametrize("given", ["W/{}", 'W/{}, "other"', '"other", W/{}'])
def test_a_weak_tag_allows_no_change(service: Any, spec: dict[str, Any], given: str) -> None:
    """RFC 9110, section 13.1.1: If-Match uses strong comparison."""
    path = f"/v1/jobs/{service.client.submit(spec).id}"
    tag = service.http.get(path).headers["etag"]
    refused = service.http.patch(path, json={"priority": 5}, headers={"If-Match": given.format(tag)})
    assert (refused.status_code, refused.json()["code"]) == (412, "precondition-failed")
    beside_a_strong_one = service.http.patch(path, json={"priority": 5}, headers={"If-Match": f'W/"x", {tag}'})
    assert beside_a_strong_one.status_code == 200


@pytest.mark.parametrize(
    ("patch", "path", "message"),
    [
        ({"priorty": 3}, "priorty", "unknown key 'priorty'. Did you mean 'priority'?"),
        ({"elasticity": {"max_worker": 3}}, "elasticity.max_worker", "Did you mean 'max_workers'?"),
        ({"parallelism": {"tpp": 3}}, "parallelism.tpp", "Did you mean 'tp'?"),
        ({"priority": "high"}, "priority", "must be a whole number (it is 'high')."),
    ],
)
def test_a_mistake_in_a_change_is_named(
    service: Any, spec: dict[str, Any], patch: dict[str, Any], path: str, message: str
) -> None:
    response = service.http.patch(f"/v1/jobs/{service.client.submit(spec).id}", json=patch)
    [error] = response.json()["errors"]
    assert (response.status_code, error["path"]) == (422, path)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("media_type", "body"),
    [
        ("application/json", b"{"),
        ("application/json", b'{"priority": 1, "priority": 2}'),
        ("application/json", b'{"priority": NaN}'),
        ("application/yaml", b"a: ["),
        ("application/yaml", b"a: &x [1]\nb: *x"),
    ],
)
def test_a_body_that_is_no_document_is_400_wherever_it_is_sent(
    service: Any, spec: dict[str, Any], media_type: str, body: bytes
) -> None:
    requests = [("POST", "/v1/jobs"), ("POST", "/v1/specs/validate")]
    if media_type == "application/json":
        requests += [("PATCH", f"/v1/jobs/{service.client.submit(spec).id}"), ("POST", "/v1/plans")]
    for method, path in requests:
        response = service.http.request(method, path, content=body, headers={"Content-Type": media_type})
        assert (response.status_code, response.json()["code"]) == (400, "bad-document"), (method, path)


@pytest.mark.parametrize(
    ("path", "name", "near"),
    [
        ("/v1/jobs?stat=QUEUED", "stat", "state"),
        ("/v1/jobs?limit=1&cursr=x", "cursr", "cursor"),
        ("/v1/jobs/{id}/logs?tial=3", "tial", "tail"),
        ("/v1/overview?serch=x", "serch", "search"),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_nearest(
    service: Any, spec: dict[str, Any], path: str, name: str, near: str
) -> None:
    response = service.http.get(path.format(id=service.client.submit(spec).id))
    assert (response.status_code, response.json()["code"]) == (422, "invalid-request")
    assert f"unknown parameter {name!r}. Did you mean {near!r}?" in response.json()["detail"]


@pytest.mark.parametrize("patch", [{"seed": 3}, {"priority": "high"}, [], {"elasticity": {"min_workers": 0}}])
def test_a_malformed_change_is_refused(service: Any, spec: dict[str, Any], patch: object) -> None:
    job = service.client.submit(spec)
    response = service.http.patch(f"/v1/jobs/{job.id}", json=patch)
    assert (response.status_code, response.json()["code"]) == (422, "invalid-patch")


def test_a_change_that_makes_the_spec_invalid_is_refused_with_the_reason(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    patch = JobPatch(elasticity=ElasticityPatch(min_workers=7))
    response = service.http.patch(f"/v1/jobs/{job.id}", json=patch.model_dump(exclude_none=True))
    assert (response.status_code, response.json()["code"]) == (422, "invalid-spec")
    assert "max_workers" in response.text


def test_a_job_is_paused_resumed_and_cancelled(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    assert service.client.pause(job.id).status.state is JobState.PAUSED
    assert service.client.resume(job.id).status.state is JobState.QUEUED
    assert service.http.post(f"/v1/jobs/{job.id}/cancel").status_code == 202
    assert service.http.post(f"/v1/jobs/{job.id}/cancel").status_code in (202, 409)
    again = service.http.post(f"/v1/jobs/{job.id}/resume")
    assert (again.status_code, again.json()["code"]) == (409, "job-ended")
    changed = service.http.patch(f"/v1/jobs/{job.id}", json={"priority": 3})
    assert (changed.status_code, changed.json()["code"]) == (409, "job-ended")


@pytest.mark.parametrize(
    ("method", "rest"),
    [("GET", ""), ("PATCH", "")]
    + [("POST", f"/{verb}") for verb in ("cancel", "pause", "resume")]
    + [("GET", f"/{part}") for part in ("events", "logs", "series", "workers", "incidents", "checkpoints")],
)
def test_an_unknown_job_is_404_and_a_malformed_id_422(service: Any, method: str, rest: str) -> None:
    arguments = {"json": {"priority": 1}} if method == "PATCH" else {}
    unknown = service.http.request(method, f"/v1/jobs/job-000000000000{rest}", **arguments)
    assert (unknown.status_code, unknown.json()["code"]) == (404, "job-not-found")
    malformed = service.http.request(method, f"/v1/jobs/%00%F0'{rest}", **arguments)
    assert (malformed.status_code, malformed.json()["code"]) == (422, "invalid-request")


@pytest.mark.parametrize("key", ["", "x" * 256, "with space", "\x7f"])
def test_a_malformed_idempotency_key_is_refused(service: Any, spec: dict[str, Any], key: str) -> None:
    response = service.http.post("/v1/jobs", json=spec, headers={"Idempotency-Key": key})
    assert (response.status_code, response.json()["code"]) == (422, "invalid-request")


def test_a_web_page_of_another_origin_changes_nothing(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    refused = service.http.post(f"/v1/jobs/{job.id}/cancel", headers={"Origin": "https://evil.example"})
    assert (refused.status_code, refused.json()["code"]) == (403, "cross-origin")
    assert service.client.job(job.id).status.state is JobState.QUEUED
    own = service.http.post(f"/v1/jobs/{job.id}/cancel", headers={"Origin": service.url})
    assert own.status_code == 202


def test_a_submission_is_answered_with_what_is_probably_not_meant(own_service: Any, spec: dict[str, Any]) -> None:
    node = NodeView(node_id="n", ip="10.0.0.1", alive=True, cpus=4, gpus=0, memory_gib=8)
    own_service.cluster.view = own_service.cluster.view.model_copy(
        update={"nodes": (node, node.model_copy(update={"node_id": "gone", "alive": False}))}
    )
    eight = {"elasticity": {"max_workers": 8}, "schedule": {"warmup_steps": 50}}
    note = own_service.client.submit(spec | eight).status.note
    assert "the cluster has room for 4 workers with 1 CPU each" in note
    assert "schedule.warmup_steps 50 is more than stop.steps 10" in note
    assert own_service.client.submit(spec | {"elasticity": {"max_workers": 4}}).status.note == ""
    rare = {"elasticity": {"max_workers": 4}, "checkpoint": {"every_steps": None, "every_s": None}}
    assert "every_steps and checkpoint.every_s are both null" in own_service.client.submit(spec | rare).status.note


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/overview", "/v1/curves", "/v1/job-export"])
def test_every_list_of_jobs_takes_the_same_filter(own_service: Any, spec: dict[str, Any], path: str) -> None:
    chosen = own_service.client.submit(spec | {"name": "chosen", "user": "ada", "labels": {"team": "speech"}})
    other = own_service.client.submit(spec | {"name": "other", "user": "bob"})
    for query in (
        "user=ada",
        "label=team%3Dspeech",
        "search=chosen",
        f"job={chosen.id}",
        "where=user%3D%3D'ada'",
        "state=QUEUED&user=ada",
        "project=default&user=ada",
        "cluster=west&archived=true",
    ):
        answer = own_service.http.get(f"{path}?{query}")
        assert answer.status_code == 200, (query, answer.text)
        assert other.id not in answer.text, query
        assert (chosen.id in answer.text) is ("cluster" not in query), query
    wrong = own_service.http.get(f"{path}?usr=ada")
    assert wrong.status_code == 422
    assert "user" in wrong.text, "the nearest parameter"
