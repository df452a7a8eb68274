"""Code archives: packed deterministically, verified, stored under their sha256, and referenced by specs."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shoal_api.client import BadRequest, InvalidSpec
from shoal_service.control.code_archive import CodeArchiveError, check, pack
from shoal_service.store import archives


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    (root / "pkg" / "__pycache__").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "task.py").write_text("class Task: ...\n")
    (root / "pkg" / "inner.py").write_text("x = 1\n")
    (root / "pkg" / "__pycache__" / "inner.pyc").write_bytes(b"\0")
    (root / ".git" / "HEAD").write_text("ref")
    return root


def test_the_same_files_give_the_same_archive_whatever_their_times(folder: Path) -> None:
    first = pack(folder)
    os.utime(folder / "task.py", (1, 1))
    (folder / ".git" / "HEAD").write_text("another")
    assert pack(folder) == first
    check(first.sha256, first.data)
    assert zipfile.ZipFile(io.BytesIO(first.data)).namelist() == ["pkg/inner.py", "task.py"]
    (folder / "task.py").write_text("class Task: x = 1\n")
    assert pack(folder).sha256 != first.sha256


def test_a_directory_that_is_too_large_names_its_largest_files(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"\0" * 3_000_000)
    with pytest.raises(CodeArchiveError, match=r"weights\.bin \(2\.9 MiB\)"):
        pack(folder, max_bytes=1 << 20)


def test_links_that_lead_out_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(CodeArchiveError, match="outside"):
        pack(folder)


def test_what_shoalignore_names_is_not_packed_and_is_counted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (folder / "data").symlink_to(tmp_path / "data")
    with pytest.raises(CodeArchiveError, match=r"\.shoalignore"):
        pack(folder)
    (folder / "runs" / "1").mkdir(parents=True)
    (folder / "runs" / "1" / "weights.pt").write_bytes(b"\0" * 3_000_000)
    (folder / ".shoalignore").write_text("data/\nruns/\n")
    packed = pack(folder, max_bytes=1 << 20)
    names = zipfile.ZipFile(io.BytesIO(packed.data)).namelist()
    assert names == [".shoalignore", "pkg/inner.py", "task.py"]
    assert packed.words == f"3 files, 34 B ({len(packed.data)} B packed); .shoalignore leaves out 2"


def test_a_shoalignore_that_is_not_text_is_refused(folder: Path) -> None:
    (folder / ".shoalignore").write_bytes(b"\xff")
    with pytest.raises(CodeArchiveError, match="not UTF-8"):
        pack(folder)


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "x")
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["../evil.py", "/etc/passwd", "a/../../b", "C:/x"])
def test_entries_outside_of_the_root_are_refused(name: str) -> None:
    import hashlib

    data = zipped(name)
    with pytest.raises(CodeArchiveError, match="outside"):
        check(hashlib.sha256(data).hexdigest(), data)


def test_an_upload_is_verified_and_repeatable(service: Any, folder: Path) -> None:
    archive = pack(folder)
    for _ in range(2):
        answer = service.http.put(
            f"/v1/code/{archive.sha256}", content=archive.data, headers={"Content-Type": "application/zip"}
        )
        assert (answer.status_code, answer.json()) == (201, {"sha256": archive.sha256, "bytes": len(archive.data)})
    assert service.store.reading(archives.get)(archive.sha256) == archive.data


@pytest.mark.parametrize(
    ("sha256", "body", "content_type", "status", "code"),
    [
        ("0" * 64, b"PK", "application/zip", 422, "code-mismatch"),
        (
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            b"",
            "application/zip",
            422,
            "code-mismatch",
        ),
        ("0" * 63, b"", "application/zip", 422, "invalid-request"),
        ("0" * 64, b"", "text/plain", 415, "unsupported-media-type"),
    ],
)
def test_a_bad_upload_is_refused(
    service: Any, sha256: str, body: bytes, content_type: str, status: int, code: str
) -> None:
    answer = service.http.put(f"/v1/code/{sha256}", content=body, headers={"Content-Type": content_type})
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_the_client_uploads_a_working_directory(service: Any, spec: dict[str, Any], folder: Path) -> None:
    job = service.client.submit(spec | {"code": {"working_dir": str(folder)}})
    assert job.spec.code.working_dir is None
    assert job.spec.code.archive == pack(folder).sha256
    assert service.store.reading(archives.exists)(job.spec.code.archive)


def test_a_working_directory_of_a_spec_file_is_relative_to_it(service: Any, folder: Path) -> None:
    path = folder.parent / "job.yaml"
    path.write_text("data: {corpus: python-stdlib}\nstop: {steps: 1}\ncode: {working_dir: mine}\n")
    assert service.client.submit(path).spec.code.archive == pack(folder).sha256


def test_the_service_packs_a_directory_of_its_own_machine(service: Any, spec: dict[str, Any], folder: Path) -> None:
    answer = service.http.post("/v1/jobs", json=spec | {"code": {"working_dir": str(folder)}})
    code = answer.json()["spec"]["code"]
    assert code == {"working_dir": str(folder), "archive": pack(folder).sha256, "env": {}, "pip": [], "wheels": None}
    missing = service.http.post("/v1/jobs", json=spec | {"code": {"working_dir": str(folder / "no")}})
    assert (missing.status_code, missing.json()["errors"][0]["path"]) == (422, "code.working_dir")


def test_an_archive_that_was_not_uploaded_is_refused(service: Any, spec: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        service.client.submit(spec | {"code": {"archive": "1" * 64}})
    assert caught.value.code == "code-unknown"


def test_specs_are_checked_without_being_submitted(service: Any, spec: dict[str, Any]) -> None:
    assert service.client.validate(spec).valid
    check = service.client.validate(spec | {"batch": {"global_size": 7, "micro_size": 2}})
    assert not check.valid
    assert [error.path for error in check.errors] == ["batch"]
    assert "7 = 3 x 2 + 1" in check.errors[0].message
    schema = service.http.get("/v1/spec-schema").json()
    assert schema["properties"]["stop"]


def test_an_invalid_spec_is_an_exception_that_lists_its_errors(service: Any) -> None:
    with pytest.raises(InvalidSpec) as caught:
        service.client.submit({"nam": 1})
    assert {error.path for error in caught.value.problem.errors} >= {"nam", "stop"}
    assert "nam: unknown key" in str(caught.value)
