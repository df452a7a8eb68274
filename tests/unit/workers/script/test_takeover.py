"""The files of another script's job are copied once, and only as a whole."""

from pathlib import Path

import pytest

from shoal_workers.script.takeover import MARK, NothingToContinue, take_over


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "job-a"
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "last.pt").write_bytes(b"weights")
    (folder / "runs" / "one" / "log").write_text("line")
    (folder / "newest").symlink_to("last.pt")
    (folder / "profiles").mkdir()
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "job-b"
    folder.mkdir()
    return folder


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_files_are_copied_but_those_of_shoal(origin: Path, own: Path) -> None:
    words: list[str] = []
    take_over(origin, own, job="job-a", progress=words.append)
    copied = _content(own)
    assert copied.pop(MARK) == b"job-a\n"
    assert copied == {"last.pt": b"weights", "newest": b"weights", "runs/one/log": b"line"}
    assert (own / "newest").is_symlink() and not (own / "profiles").exists()
    assert words[-1] == "copied 0 MiB of what job-a has left"


def test_what_the_script_has_changed_since_is_not_copied_again(origin: Path, own: Path) -> None:
    take_over(origin, own, job="job-a", progress=lambda _: None)
    (own / "last.pt").write_bytes(b"newer")
    take_over(origin, own, job="job-a", progress=lambda _: None)
    assert (own / "last.pt").read_bytes() == b"newer"
    assert (origin / "last.pt").read_bytes() == b"weights"


def test_a_copy_that_was_interrupted_is_made_again(origin: Path, own: Path) -> None:
    class Killed(Exception):
        pass

    def kill(_: str) -> None:
        raise Killed

    with pytest.raises(Killed):
        take_over(origin, own, job="job-a", progress=kill)
    assert not (own / MARK).exists()
    (own / "runs").mkdir()
    (own / "runs" / "half").touch()  # as if it had ended between two of the renames
    take_over(origin, own, job="job-a", progress=lambda _: None)
    assert _content(own).keys() == {MARK, "last.pt", "newest", "runs/one/log"}


def test_a_job_that_has_left_nothing_cannot_be_continued(tmp_path: Path, own: Path) -> None:
    with pytest.raises(NothingToContinue, match=r"job-a: the job has left no file in .* without continue_from"):
        take_over(tmp_path / "never", own, job="job-a", progress=lambda _: None)


def test_what_the_other_job_has_logged_stays_there_and_a_folder_of_the_script_of_that_name_does_not(
    origin: Path, own: Path
) -> None:
    name = "step-000000000002-a1-g1-r0-n1"
    (origin / "media").mkdir()
    for ending in (".json", "-i0.png"):
        (origin / "media" / f"{name}{ending}").write_text("of Shoal")
    take_over(origin, own, job="job-a", progress=lambda _: None)
    assert not (own / "media").exists()

    (origin / "media" / "clip.wav").write_bytes(b"sound")
    (own / MARK).unlink()
    take_over(origin, own, job="job-a", progress=lambda _: None)
    assert _content(own / "media") == {"clip.wav": b"sound"}
