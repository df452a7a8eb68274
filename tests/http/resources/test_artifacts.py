"""Media, lineage and models over REST."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.worlds.kept_files import keep_files
from shoal_api.client import Client
from shoal_api.client.credentials import find_token
from shoal_api.client.errors import ApiError, Conflict, NotFound
from shoal_service.access_views import TokenRequest
from shoal_service.artifact_views import ModelRequest
from shoal_service.core.access import Role
from shoal_service.store import models
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract.data_preview import (
    DATA_FILE,
    MAX_FILE_BYTES,
    DataPreview,
    SamplePreview,
    SplitPreview,
)
from shoal_workers.contract.media import FOLDER, MediaImage, MediaRecord, MediaText, RecordName
from shoal_workers.contract.outputs import FOLDER as OUTPUTS

NAME = "step-000000000010-a1-g1"
CHECKPOINT = CheckpointView(step=10, url=f"/c/{NAME}", state="committed", attempt=1, generation=1)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(32)


def _store(folder: Path, step: int, generation: int = 1, words: str = "x") -> str:
    """Writes a record with an image; returns the name of the image."""
    name = RecordName(step, 1, generation, 0, 1)
    folder.mkdir(parents=True, exist_ok=True)
    file = name.image(0, "png")
    (folder / file).write_bytes(PNG)
    record = MediaRecord(
        step=step,
        attempt=1,
        generation=generation,
        rank=0,
        at=5.0,
        held_s=0.0001,
        images=(MediaImage(name="sample", file=file, bytes=len(PNG)),),
        texts=(MediaText(name="words", text=words, num_chars=len(words)),),
    )
    (folder / str(name)).write_text(record.model_dump_json())
    return file


def test_media_are_read_from_the_storage_newest_generation_first(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise()
    assert service.http.get(f"/v1/jobs/{job_id}/media").json() == {"steps": [], "items": [], "num_records": 0}
    folder = Path(service.checkpoint_url) / job_id / FOLDER
    for step in (2, 4):
        _store(folder, step)
    _store(folder, 4, generation=2, words="again")
    (folder / str(RecordName(6, 1, 1, 0, 1))).write_text("not a record")
    page = service.http.get(f"/v1/jobs/{job_id}/media").json()
    assert [(one["step"], one["generation"]) for one in page["items"]] == [(2, 1), (4, 2)]
    assert page["steps"] == [2, 4, 6]
    [only] = service.http.get(f"/v1/jobs/{job_id}/media?step=4").json()["items"]
    assert only["texts"][0]["text"] == "again"
    assert service.http.get("/v1/jobs/job-0/media").status_code == 404
    for step in (7, 8, 9):
        _store(folder, step)
    (folder / str(RecordName(6, 1, 1, 0, 1))).unlink()
    over_all = service.http.get(f"/v1/jobs/{job_id}/media?spread=true&limit=3").json()
    assert [one["step"] for one in over_all["items"]] == [2, 7, 9] and over_all["steps"] == [2, 4, 7, 8, 9]


def test_what_a_job_reads_is_what_it_has_described_or_nothing(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise()
    nothing = {"task": "", "remarks": [], "splits": {}}
    address, file = f"/v1/jobs/{job_id}/data", Path(service.checkpoint_url) / job_id / FOLDER / DATA_FILE
    assert service.http.get(address).json() == nothing
    file.parent.mkdir(parents=True)
    row = SamplePreview(texts=(), tokens=3, in_loss=1, label="<b>")
    train = SplitPreview(
        samples=3, validated=None, left_out={"<i>": 2}, num_cut=0, num_labels=0, labels={}, rows=(row,)
    )
    preview = DataPreview(task="a:B", splits={"train": train, "validation": None})
    content = preview.model_dump_json()
    file.write_text(content)
    assert service.client.data(job_id) == preview and service.http.get(address).json()["splits"]["validation"] is None
    wrong = []
    for name, damaged in (
        ("cut", content[:-1]),
        ("another key", content.replace('"remarks"', '"more"')),
        ("markup for a picture", content.replace('"png":""', '"png":"x\\" onload=evil()"')),
        ("too long", content + " " * MAX_FILE_BYTES),
    ):
        assert damaged != content
        file.write_text(damaged)
        wrong += [name] if service.http.get(address).json() != nothing else []
    assert wrong == []
    secret = file.with_name("secret")
    secret.write_text(content)
    file.unlink()
    file.symlink_to(secret)
    assert service.http.get(address).json() == nothing
    assert service.http.get("/v1/jobs/job-0/data").status_code == 404


def test_an_image_has_its_type_and_a_policy_that_runs_nothing(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise()
    folder = Path(service.checkpoint_url) / job_id / FOLDER
    file = _store(folder, 2)
    answer = service.http.get(f"/v1/jobs/{job_id}/media/{file}")
    assert (answer.content, answer.headers["content-type"]) == (PNG, "image/png")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]
    secret = folder.parent / "secret"
    secret.write_text("of another user")
    (folder / RecordName(8, 1, 1, 0, 1).image(0, "png")).symlink_to(secret)
    for name, status in (
        (RecordName(8, 1, 1, 0, 1).image(0, "png"), 404),
        (RecordName(9, 1, 1, 0, 1).image(0, "png"), 404),
        ("x.svg", 422),
        (str(RecordName(2, 1, 1, 0, 1)), 422),
        ("..%2fsecret", 404),
    ):
        assert service.http.get(f"/v1/jobs/{job_id}/media/{name}").status_code == status, name


def test_files_are_listed_and_downloaded_as_what_they_are(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise()
    assert service.http.get(f"/v1/jobs/{job_id}/files").json()["items"] == []
    root = Path(service.checkpoint_url) / job_id
    html = b"<script>alert(1)</script>"
    keep_files(root, 0, {"last.pt": b"0123", "runs/a b/%41?.html": html, "log.txt": b"of 0"}, num_left_out=2)
    keep_files(root, 1, {"log.txt": b"of 1", "last.pt": b"0123"})
    page = service.client.files(job_id)
    names = ["last.pt", "log.txt", "node-1/log.txt", "runs/a b/%41?.html"]
    assert ([file.name for file in page.items], page.num_files, page.num_left_out) == (names, 4, 2)
    assert [file.name for file in service.client.files(job_id, "*.txt").items] == ["log.txt", "node-1/log.txt"]
    first = service.client.files(job_id, limit=1)
    assert ([file.name for file in first.items], first.num_files) == (["last.pt"], 4)
    saved = io.BytesIO()
    service.client.save_file(job_id, "runs/a b/%41?.html", saved)
    assert saved.getvalue() == html
    answer = service.http.get(f"/v1/jobs/{job_id}/files/node-1/log.txt")
    assert (answer.content, answer.headers["content-type"]) == (b"of 1", "application/octet-stream")
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''log.txt"
    assert "sandbox" in answer.headers["content-security-policy"]

    (root / "secret").write_text("of another user")
    content = next(path for path in (root / OUTPUTS / "0").iterdir() if path.read_bytes() == b"0123")
    content.unlink()
    content.symlink_to(root / "secret")
    (root / OUTPUTS / "2").symlink_to(root / OUTPUTS / "1")
    for name in ("last.pt", "nothing.pt", "..%2fsecret", "runs/..%2f..%2f..%2fsecret", "%2fetc%2fpasswd", "a%00b"):
        assert service.http.get(f"/v1/jobs/{job_id}/files/{name}").status_code == 404, name
    assert "node-2/log.txt" not in [file.name for file in service.client.files(job_id).items]


def test_a_checkpoint_is_registered_and_found_by_its_alias(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise(checkpoints=(CHECKPOINT,))
    made = service.http.post("/v1/models/speech/versions", json={"job": job_id, "description": "first"})
    assert made.status_code == 201 and made.json()["version"] == 1
    answer = service.http.put("/v1/models/default/speech/aliases/prod", json={"version": 1})
    assert answer.json()["aliases"] == ["prod"]
    found = service.http.get("/v1/models/default/speech/prod").json()
    assert (found["url"], found["job_id"], found["description"]) == (CHECKPOINT.url, job_id, "first")
    assert [one["version"] for one in service.http.get("/v1/models?name=speech").json()["items"]] == [1]
    view = service.http.get(f"/v1/jobs/{job_id}/lineage").json()
    assert view["jobs"][0]["job_id"] == job_id and view["registered"][0]["name"] == "speech"
    refused = service.http.delete(f"/v1/jobs/{job_id}/checkpoints/{NAME}")
    assert refused.status_code == 409
    assert service.http.put("/v1/models/default/speech/aliases/9x", json={"version": 1}).status_code == 422
    assert service.http.delete("/v1/models/default/speech/versions/1").status_code == 204
    assert service.http.get("/v1/models/default/speech/prod").status_code == 404


def test_the_client_registers_names_follows_and_removes_a_version(service: Any, supervise: Callable[..., str]) -> None:
    later = CHECKPOINT.model_copy(update={"step": 20, "url": "/c/step-000000000020-a1-g1", "bytes": 7000})
    job_id, client = supervise(checkpoints=(CHECKPOINT, later)), service.client
    first = client.register_model("voice", ModelRequest(job=job_id, step=10, description="of step 10"))
    second = client.register_model("voice", ModelRequest(job=job_id))
    assert [(one.version, one.step, one.bytes) for one in (first, second)] == [(1, 10, 0), (2, 20, 7000)]
    assert client.set_model_alias("default", "voice", "prod", 1).aliases == ("prod",)
    with Client(service.url, token=find_token(service.url)) as server:  # of models
        followed = server.follow_model("default", "voice", "prod", every_s=0.01)
        assert next(followed).step == 10
        client.set_model_alias("default", "voice", "staging", 1)  # nothing to load anew
        client.remove_model_alias("default", "voice", "prod")
        client.set_model_alias("default", "voice", "prod", 2)
        assert next(followed).step == 20
    assert list(followed) == [], "a closed client follows nothing any more"
    assert client.models(project="default", name="voice")[0] == client.model("default", "voice", "latest")
    assert [one.version for one in client.lineage(job_id).registered] == [1, 2]
    client.remove_model("default", "voice", 2)
    for which in ("prod", "2"):
        with pytest.raises(NotFound, match=f"no model 'voice' with a version or alias '{which}'"):
            client.model("default", "voice", which)
    with pytest.raises(NotFound):
        next(client.follow_model("default", "voice", "prod"))
    with pytest.raises(ApiError):
        client.register_model("no/slash", ModelRequest(job=job_id))


def test_a_version_has_an_etag_until_it_changes(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise(checkpoints=(CHECKPOINT,))
    service.client.register_model("tagged", ModelRequest(job=job_id))
    for path in ("/v1/models/default/tagged/latest", "/v1/models?name=tagged"):
        tag = service.http.get(path).headers["etag"]
        same = service.http.get(path, headers={"If-None-Match": tag})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
        service.client.set_model_alias("default", "tagged", "prod", 1)
        assert service.http.get(path, headers={"If-None-Match": tag}).status_code == 200
        service.client.remove_model_alias("default", "tagged", "prod")


def test_an_alias_is_refused_for_a_checkpoint_that_serving_cannot_read(
    service: Any, supervise: Callable[..., str]
) -> None:
    job_id = supervise(checkpoints=(CHECKPOINT,))
    service.client.register_model("broken", ModelRequest(job=job_id))
    supervise(job_id, checkpoints=(CHECKPOINT.model_copy(update={"state": CheckpointState.DAMAGED}),))
    assert service.client.model("default", "broken").state == "damaged"
    with pytest.raises(Conflict, match="is damaged: an alias needs a version that can be read"):
        service.client.set_model_alias("default", "broken", "prod", 1)


def test_a_version_says_nothing_about_jobs_of_projects_that_the_reader_does_not_see(
    service: Any, supervise: Callable[..., str], spec: dict[str, object]
) -> None:
    parent = supervise(checkpoints=(CHECKPOINT,))
    origin = {"job": parent, "step": 10, "checkpoint": NAME, "url": CHECKPOINT.url}
    spec |= {"project": "open", "continue_from": origin, "stop": {"steps": 20}}
    child = supervise(checkpoints=(CHECKPOINT,))
    service.client.register_model("mixed", ModelRequest(job=child))
    token = service.client.create_token(TokenRequest(name="eve", role=Role.VIEWER, projects=("open",))).token
    assert [one.is_known for one in service.store.reading(models.find)("open", "mixed", "1").lineage] == [True, True]
    with Client(service.url, token=token) as eve:
        for chain in (eve.model("open", "mixed").lineage, eve.models()[0].lineage, eve.lineage(child).jobs):
            assert [(one.job_id, one.is_known, one.name) for one in chain] == [
                (child, True, "tiny"),
                (parent, False, ""),
            ]
