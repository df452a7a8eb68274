"""The demo ends every process of its server, also one whose parent has ended."""

import os
import sys
from pathlib import Path

import pytest

from kit.processes.os_processes import is_alive
from shoal_api.demo.processes import ServerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

_PARENT_WITH_AN_ORPHAN = """
import subprocess, sys, time
middle = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], " \\
         "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True)"
print(subprocess.run([sys.executable, "-c", middle], capture_output=True, text=True).stdout.strip(), flush=True)
time.sleep(600)
"""


def test_stopping_kills_orphans_in_other_sessions(tmp_path: Path) -> None:
    server = ServerProcess([sys.executable, "-c", _PARENT_WITH_AN_ORPHAN], os.environ, tmp_path / "log", outlive=False)
    try:
        while not server.log_tail():
            assert server.exit_code() is None
            server.wait(0.05)
        orphan = int(server.log_tail()[-1])
        assert is_alive(orphan)
        assert server.owns(orphan)
        assert not server.owns(os.getpid())
        assert not server.owns(1)
    finally:
        server.stop()
    assert not is_alive(orphan)
    assert server.exit_code() is not None
    server.stop()
