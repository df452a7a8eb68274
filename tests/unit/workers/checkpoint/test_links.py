"""The code of a job writes below the job's directory: what it puts there leads no reader out of it."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal_service.supervisor.checkpoints import CheckpointCatalog
from shoal_workers.checkpoint.errors import DamagedCheckpoint
from shoal_workers.checkpoint.storage import Directory, open_directory, open_job_directory
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName

SECRET = b"an administrator's token"
NAME = CheckpointName(4, 1, 1)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory of the server, with the names that readers look for."""
    folder = tmp_path / "state"
    for path in (folder / "token", folder / "profiles" / "token", folder / str(NAME) / MARKER_NAME):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(SECRET)
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "job"
    path.mkdir(parents=True)
    return path


@pytest.fixture(params=["path", "file://", "local://"])
def place(request: pytest.FixtureRequest, job: Path) -> Directory:
    return open_job_directory(f"{'' if request.param == 'path' else request.param}{job}")


def test_a_linked_file_is_neither_read_nor_listed(place: Directory, job: Path, outside: Path) -> None:
    (job / "token").symlink_to(outside / "token")
    assert place.files() == {}
    for read in (lambda: place.read("token"), lambda: place.read_into("token", 0, memoryview(bytearray(9)))):
        with pytest.raises(FileNotFoundError, match="symbolic links are not followed"):
            read()


def test_a_linked_folder_is_neither_read_nor_listed_nor_written(place: Directory, job: Path, outside: Path) -> None:
    (job / "profiles").symlink_to(outside / "profiles")
    below = place.child("profiles")
    assert place.directories() == [] == below.directories()
    calls: tuple[Callable[[], object], ...] = (
        below.files,
        below.create,
        lambda: below.read("token"),
        lambda: below.write("token", [b"x"]),
        lambda: below.create_file("new", b"x"),
        lambda: below.child("deeper").create(),
    )
    for call in calls:
        with pytest.raises(FileNotFoundError, match="symbolic links are not followed"):
            call()
    below.remove("token")
    assert [path.name for path in (outside / "profiles").iterdir()] == ["token"]


def test_the_directory_of_a_job_may_be_no_link_itself(place: Directory, job: Path, outside: Path) -> None:
    job.rmdir()
    job.symlink_to(outside)
    with pytest.raises(FileNotFoundError, match="symbolic links are not followed"):
        place.read("token")


def test_the_directory_that_an_administrator_has_named_may_be_a_link(job: Path, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(job.parent)
    place = open_job_directory(f"{tmp_path}/data/job")
    place.write("a", [b"x"])
    assert (job / "a").read_bytes() == b"x"


def test_a_deletion_removes_links_and_not_what_they_lead_to(place: Directory, job: Path, outside: Path) -> None:
    (job / "profiles").symlink_to(outside / "profiles")
    (job / "step").mkdir()
    (job / "step" / "all").symlink_to(outside)
    (job / "token").symlink_to(outside / "token")
    place.child("profiles").remove_tree()
    place.child("step").remove_tree()
    place.remove("token")
    assert list(job.iterdir()) == []
    assert sum(1 for path in outside.rglob("*") if path.is_file()) == 3


def test_a_planted_draft_is_not_written_through(place: Directory, job: Path, outside: Path) -> None:
    (job / "a.writing").symlink_to(outside / "token")
    with pytest.raises(FileNotFoundError):
        place.write("a", [b"x"])
    assert (outside / "token").read_bytes() == SECRET
    place.write("a", [b"x"])
    assert place.read("a") == b"x"


def test_a_pipe_holds_no_reader(place: Directory, job: Path) -> None:
    os.mkfifo(job / "a")
    assert place.files() == {}
    with pytest.raises(FileNotFoundError):
        place.read("a")


@pytest.mark.parametrize("name", ["../state/token", "..", ".", "", "a/../../../state/token"])
def test_a_name_cannot_leave_its_directory(place: Directory, outside: Path, name: str) -> None:
    for call in (lambda: place.read(name), lambda: place.write(name, [b"x"]), lambda: place.child(name)):
        with pytest.raises(FileNotFoundError):
            call()


def test_a_linked_checkpoint_or_marker_is_none(job: Path, outside: Path) -> None:
    catalog = CheckpointCatalog(str(job))
    (job / str(NAME)).symlink_to(outside / str(NAME))
    assert (catalog.search().name, catalog.markers(), catalog.has_marker(NAME)) == (None, [], False)
    with pytest.raises(DamagedCheckpoint):
        catalog.verify(NAME)
    catalog.delete(NAME)
    assert (outside / str(NAME) / MARKER_NAME).read_bytes() == SECRET and not (job / str(NAME)).exists()
    (job / str(NAME)).mkdir()
    (job / str(NAME) / MARKER_NAME).symlink_to(outside / "token")
    assert catalog.search().name is None and not catalog.has_marker(NAME)


def test_a_store_over_local_files_is_refused(job: Path) -> None:
    with pytest.raises(OSError, match="name the directory itself"):
        open_directory(f"simplecache::file://{job}")


def test_a_file_that_cannot_grow_is_an_os_error_and_leaves_no_file(place: Directory, job: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            place.write("a", [b"x" * 100_000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(job.iterdir()) == []
