"""Media, lineage and models over REST."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal_service.views import CheckpointView
from shoal_workers.contract.media import FOLDER, MediaImage, MediaRecord, MediaText, RecordName

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
