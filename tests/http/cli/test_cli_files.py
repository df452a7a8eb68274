"""`shoal files` and `shoal fetch`: what they list, write and refuse, against a real server."""

from pathlib import Path
from typing import Any

from kit.worlds.kept_files import keep_files
from shoal_api.cli.exit_codes import ExitCode


def test_files_are_listed_and_fetched_with_their_paths(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job(name="writer")
    assert shoal("files", "writer").out == "The storage of the job has no such file.\n"
    root, out = tmp_path / "checkpoints" / job.id, tmp_path / "out"
    keep_files(root, 0, {"last.pt": b"0123", "runs/a/events": b"e" * 2048, "log.txt": b"of 0"}, num_left_out=3)
    keep_files(root, 1, {"log.txt": b"of 1"})
    ran = shoal("files", "writer")
    assert [line.split()[0] for line in ran.out.splitlines()[1:]] == [
        "last.pt",
        "log.txt",
        "node-1/log.txt",
        "runs/a/events",
    ]
    assert "3 files" in ran.err and "outputs.max_gib" in ran.err
    assert [one["name"] for one in shoal("files", job.id, "runs/**", "--json").json()["items"]] == ["runs/a/events"]

    ran = shoal("fetch", "writer", "**", "--out", str(out))
    assert (ran.code, ran.out) == (0, f"{out}: 4 files, 2.0 KiB\n"), ran
    written = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert written == {
        "last.pt": b"0123",
        "log.txt": b"of 0",
        "node-1/log.txt": b"of 1",
        "runs/a/events": b"e" * 2048,
    }
    (out / "last.pt").write_bytes(b"old")
    before = (out / "log.txt").stat().st_mtime_ns
    assert shoal("fetch", "writer", "*.*", "--out", str(out)).code == 0
    assert (out / "last.pt").read_bytes() == b"0123" and (out / "log.txt").stat().st_mtime_ns == before
    ran = shoal("fetch", "writer", "*.bin")
    assert ran.code == ExitCode.NOT_FOUND and "no file that matches '*.bin'" in ran.err


def test_a_link_in_the_way_leads_nowhere(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job(name="writer")
    keep_files(tmp_path / "checkpoints" / job.id, 0, {"runs/x": b"data", "y": b"data"})
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    (outside / "y").write_text("mine")
    (out / "runs").symlink_to(outside)
    (out / "y").symlink_to(outside / "y")
    ran = shoal("fetch", "writer", "runs/**", "--out", str(out))
    assert ran.code == ExitCode.USAGE and "outside of" in ran.err, ran
    assert shoal("fetch", "writer", "y", "--out", str(out)).code == 0
    assert (out / "y").read_bytes() == b"data" and (outside / "y").read_text() == "mine"
    assert [path.name for path in outside.iterdir()] == ["y"]
