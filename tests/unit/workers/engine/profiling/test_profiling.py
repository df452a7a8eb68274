"""What a killed worker has left of a profile is deleted by the next one, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shoal_workers.engine.profiling.profiling import remove_abandoned


def test_only_directories_of_dead_workers_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f"shoal-profile-{dead.pid}-x", f"shoal-profile-{os.getpid()}-x", "shoal-profile-x-y", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    remove_abandoned()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
