"""New code for a job over HTTP: what the store then holds, and each refusal in words. How workers take it over is in
`tests/ray/lifecycle/test_hot_update.py`.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_api.client import Client, Forbidden, NotFound
from shoal_service.access_views import TokenRequest
from shoal_service.control.code_archive import CodeArchiveError, pack
from shoal_service.core.access import Role
from shoal_service.store import archives, driving
from shoal_workers.contract.checks.places import AllowedPlaces

OwnCode = dict[str, Any]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return written(tmp_path / "old", "1")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return written(tmp_path / "new", "2")


def written(directory: Path, value: str) -> Path:
    directory.mkdir()
    (directory / "mine.py").write_text(f"VALUE = {value}\n")
    return directory


@pytest.fixture
def own_code(spec: dict[str, Any], old: Path) -> OwnCode:
    return spec | {"task": "mine:Task", "code": {"working_dir": str(old), "env": {"A": "1"}}}


def begin(service: Any, job_id: str) -> None:
    service.store.writing(driving.begin_attempt, service.epoch)(job_id, workers=2, now=time.time())


def test_a_running_job_gets_the_uploaded_directory_as_a_new_version(service: Any, own_code: OwnCode, new: Path) -> None:
    job = service.client.submit(own_code)
    begin(service, job.id)
    changed = service.client.update_code(job.id, new, if_match=job.etag)
    archive = pack(new)
    assert (changed.spec.code.archive, changed.spec.code.env) == (archive.sha256, {"A": "1"})
    assert (changed.spec_version, changed.status.state) == (2, "STARTING")
    assert service.store.reading(archives.get)(archive.sha256) == archive.data
    event = list(service.client.events(job.id))[-1]
    assert (event.type, event.data["code"]) == ("job.patched", {"archive": archive.sha256})
    assert service.client.audit(job_id=job.id).items[0].operation == "PATCH /v1/jobs/{job_id}"


def test_the_same_code_again_is_no_change(service: Any, own_code: OwnCode, old: Path) -> None:
    job = service.client.submit(own_code)
    assert service.client.update_code(job.id, old).spec_version == 1


def test_an_admin_may_name_a_directory_of_the_server_and_nobody_else(
    service: Any, own_code: OwnCode, new: Path
) -> None:
    job = service.client.submit(own_code)
    (new / "mine.py").write_text("VALUE = 'of the server'\n")
    path, change = f"/v1/jobs/{job.id}", {"code": {"working_dir": str(new)}}
    made = service.client.create_token(TokenRequest(name="carol", role=Role.OPERATOR))
    refused = service.http.patch(path, json=change, headers={"Authorization": f"Bearer {made.token}"})
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert "a directory of the server, which only an admin may name" in refused.json()["detail"]
    assert not service.store.reading(archives.exists)(pack(new).sha256)
    packed = service.http.patch(path, json=change).json()["spec"]["code"]
    assert (packed["archive"], packed["working_dir"]) == (pack(new).sha256, str(new))
    missing = service.http.patch(path, json={"code": {"working_dir": str(new / "no")}})
    assert (missing.status_code, missing.json()["errors"][0]["path"]) == (422, "code.working_dir")


def test_a_directory_outside_of_the_allowed_places_is_refused(
    store: Any, run_service: Callable[..., Any], own_code: OwnCode, new: Path
) -> None:
    with run_service(store, places=AllowedPlaces(paths=("/srv/shoal",))) as service:
        job = service.client.submit(own_code)
        refused = service.http.patch(f"/v1/jobs/{job.id}", json={"code": {"working_dir": str(new)}})
        assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "code.working_dir")
        assert "/srv/shoal" in refused.json()["errors"][0]["message"]
        assert service.client.update_code(job.id, new).spec.code.archive == pack(new).sha256


@pytest.mark.parametrize(
    ("code", "status", "kind", "words"),
    [
        ({"archive": "1" * 64}, 422, "code-unknown", "is not stored here; PUT /v1/code/1"),
        ({"archive": "1" * 63}, 422, "invalid-patch", "code.archive"),
        ({}, 422, "invalid-patch", "exactly one of working_dir and archive"),
        ({"archive": "1" * 64, "working_dir": "/x"}, 422, "invalid-patch", "exactly one of working_dir and archive"),
        ({"archive": "1" * 64, "env": {"A": "2"}}, 422, "invalid-patch", "unknown key 'env'"),
    ],
)
def test_a_wrong_archive_is_refused_and_the_code_stays(
    service: Any, own_code: OwnCode, old: Path, code: dict[str, Any], status: int, kind: str, words: str
) -> None:
    job = service.client.submit(own_code)
    refused = service.http.patch(f"/v1/jobs/{job.id}", json={"code": code})
    assert (refused.status_code, refused.json()["code"]) == (status, kind), refused.json()
    assert words in refused.text
    assert service.client.job(job.id).spec.code.archive == pack(old).sha256


def test_a_directory_that_cannot_be_packed_is_not_sent(service: Any, own_code: OwnCode, new: Path) -> None:
    job = service.client.submit(own_code)
    (new / "link").symlink_to("/etc/hostname")
    with pytest.raises(CodeArchiveError, match="outside"):
        service.client.update_code(job.id, new)
    assert service.client.job(job.id).spec_version == 1


def test_workers_that_hold_gpus_get_no_new_code_until_they_are_gone(service: Any, own_code: OwnCode, new: Path) -> None:
    job = service.client.submit(own_code | {"worker": {"gpus": 1}})
    begin(service, job.id)
    archive = service.client.upload_code(new)
    refused = service.http.patch(f"/v1/jobs/{job.id}", json={"code": {"archive": archive}})
    assert (refused.status_code, refused.json()["code"]) == (409, "request-conflict")
    assert "hold GPUs. Pause it, change the code, and resume it" in refused.json()["detail"]
    queued = service.client.submit(own_code | {"worker": {"gpus": 1}})
    assert service.client.update_code(queued.id, new).spec.code.archive == archive


def test_an_ended_job_and_one_without_code_of_its_own_get_none(
    service: Any, spec: dict[str, Any], own_code: OwnCode, new: Path
) -> None:
    ended, builtin = service.client.submit(own_code), service.client.submit(spec)
    service.client.cancel(ended.id)
    change = {"code": {"archive": service.client.upload_code(new)}}
    refused = service.http.patch(f"/v1/jobs/{ended.id}", json=change)
    assert (refused.status_code, refused.json()["code"]) == (409, "job-ended")
    refused = service.http.patch(f"/v1/jobs/{builtin.id}", json=change)
    assert (refused.status_code, refused.json()["code"]) == (409, "request-conflict")
    assert "is not from code of its own" in refused.json()["detail"]


def test_who_may_not_change_the_job_changes_no_code(service: Any, own_code: OwnCode, new: Path) -> None:
    job = service.client.submit(own_code | {"project": "ours"})
    for role, projects, error in ((Role.VIEWER, None, Forbidden), (Role.OPERATOR, ("theirs",), NotFound)):
        made = service.client.create_token(TokenRequest(name="carol", role=role, projects=projects))
        with Client(service.url, token=made.token) as client, pytest.raises(error):
            client.update_code(job.id, new)
    assert service.client.job(job.id).spec_version == 1
