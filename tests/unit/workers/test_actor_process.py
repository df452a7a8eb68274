"""What a killed worker leaves behind is removed by the next one."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

from shoal_workers.actor_process import use_named_temporary_directory


def test_the_temporary_directories_of_dead_workers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.delitem(config, "tempdir", raising=False)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    prefix = f"pymp-shoal-{Path('/proc/self/ns/pid').stat().st_ino}-"
    (tmp_path / f"{prefix}{dead.pid}-abc").mkdir()
    (tmp_path / f"{prefix}{os.getppid()}-abc").mkdir()
    (tmp_path / f"pymp-shoal-1-{dead.pid}-abc").mkdir()
    use_named_temporary_directory()
    names = {path.name.rpartition("-")[0] for path in tmp_path.iterdir()}
    assert names == {f"{prefix}{os.getpid()}", f"{prefix}{os.getppid()}", f"pymp-shoal-1-{dead.pid}"}
    assert Path(get_temp_dir()).parent == tmp_path and f"-{os.getpid()}-" in get_temp_dir()
