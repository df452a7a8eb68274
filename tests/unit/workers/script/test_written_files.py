"""What counts as a file with new content."""

import os
from pathlib import Path

from shoal_workers.script.written_files import WrittenFiles


def test_only_a_new_content_counts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "a.pt").write_bytes(b"one")
    (folder / "job-files").mkdir()
    files = WrittenFiles((str(folder), str(tmp_path / "missing"), "s3://bucket/job"), {"job-files"})

    def is_new(name: str, content: bytes) -> bool:
        files.begin()
        (folder / name).write_bytes(content)
        return files.has_new()

    seen = {
        "same content, later": is_new("a.pt", b"one"),
        "same content, another name": is_new("b.pt", b"one"),
        "a file of Shoal's": is_new("job-files/index.json", b"12:00"),
        "a log": is_new("train.log", b"12:00 step 1"),
        "an event file": is_new("events.out.tfevents.17.host.1", b"12:00"),
        "another content": is_new("a.pt", b"two"),
        "a new file": is_new("c.pt", b"three"),
        "a large file that differs everywhere": is_new("d.pt", os.urandom(5 << 20)),
    }
    assert [name for name, new in seen.items() if new] == [
        "another content",
        "a new file",
        "a large file that differs everywhere",
    ]
    files.begin()
    (folder / "c.pt").unlink()
    os.mkfifo(folder / "pipe")
    assert not files.has_new()
