"""Two servers on one state directory: the second one is refused in words, and a dead one's lock is taken over."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal_api.cli.main import build_app
from shoal_service.state_lock import FILE, StateDirectoryInUse, StateLock, owner_of

_HOLD = """
import sys
from pathlib import Path
from shoal_service.state_lock import StateLock
lock = StateLock.take(Path(sys.argv[1]))
lock.listens_at("http://127.0.0.1:8470")
print("held", flush=True)
sys.stdin.read()
"""

_STOP_WITH_A_THREAD = """
import sys, threading
from pathlib import Path
from shoal_service.state_lock import StateLock
lock = StateLock.take_for_process(Path(sys.argv[1]))
threading.Thread(target=sys.stdin.read).start()
threading.Thread(target=lambda: (threading.main_thread().join(), print("held", flush=True))).start()
"""


def _holder(directory: Path, program: str = _HOLD) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_server_is_refused_in_words_and_a_killed_ones_lock_is_taken_over(tmp_path: Path) -> None:
    with _holder(tmp_path) as process:
        with pytest.raises(StateDirectoryInUse, match=rf"pid {process.pid} on .*, http://127.0.0.1:8470\. Stop that"):
            StateLock.take(tmp_path)
        known = owner_of(tmp_path)
        assert known is not None and known.pid == process.pid
        result = CliRunner().invoke(build_app(), ["serve", "--port=0", f"--state-dir={tmp_path}"])
        assert result.exit_code == 2 and f"in use by the server with pid {process.pid}" in result.output
        assert sorted(path.name for path in tmp_path.iterdir()) == [FILE], "nothing was begun"
        process.send_signal(signal.SIGKILL)
        process.wait()
        with StateLock.take(tmp_path):
            assert f'"pid":{os.getpid()},' in (tmp_path / FILE).read_text()


def test_a_released_directory_is_free_again(tmp_path: Path) -> None:
    lock = StateLock.take(tmp_path / "new")
    lock.release()
    assert owner_of(tmp_path / "new") is None
    assert (tmp_path / "new" / FILE).stat().st_mode & 0o777 == 0o600


def test_a_server_that_has_stopped_keeps_its_directory_until_its_last_thread_has_ended(tmp_path: Path) -> None:
    with _holder(tmp_path, _STOP_WITH_A_THREAD) as process:
        with pytest.raises(StateDirectoryInUse, match=f"pid {process.pid} on"):
            StateLock.take(tmp_path)
        process.communicate()
        assert owner_of(tmp_path) is None and process.returncode == 0
