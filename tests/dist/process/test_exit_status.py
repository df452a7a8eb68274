"""How a worker's process ended, from its fork server: processes that are really killed, by each kind of end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal_workers import exit_status
from shoal_workers.forkserver import launch

pytestmark = pytest.mark.dist

_PATIENCE_S = 60.0
_SCRIPT = """
import ctypes, os, signal, sys
print(os.getpid(), os.getppid(), flush=True)
end = sys.argv[2]
if end == "exit":
    os._exit(3)
if end == "crash":
    sys.path.insert(0, PACKAGES)
    from shoal_workers import exit_status
    kept = exit_status.record_crashes(sys.argv[1].partition("=")[2])
    def run():
        os.kill(os.getpid(), signal.SIGSEGV)
    exec(compile("def train(call):\\n    call()", "/shoal_workers/engine/engine.py", "exec"))
    train(run)
if end == "allocate":
    held = []
    while True:
        held.append(b"x" * (32 << 20))
os.kill(os.getpid(), getattr(signal, end))
"""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a forked process that ends in the given way; returns what the node's other processes can read of it."""
    folder = tmp_path_factory.mktemp("e")
    script = folder / "script.py"
    packages = str(Path(exit_status.__file__).parents[1])
    script.write_text(_SCRIPT.replace("PACKAGES", repr(packages)))
    servers: dict[int, int] = {}  # pid: pidfd

    def run(end: str, raylet: str = "raylet", cgroup: Path | None = None) -> str:
        def enter() -> None:
            if cgroup is not None:
                (cgroup / "cgroup.procs").write_text(str(os.getpid()))

        command = [sys.executable, "-I", "-S", launch.__file__, str(script), f"--raylet-name={folder / raylet}", end]
        ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=enter, timeout=_PATIENCE_S)
        pid, server = (int(number) for number in ended.stdout.split())
        assert server != os.getpid(), "the fork server did not start"
        if server not in servers:
            servers[server] = os.pidfd_open(server)
        deadline = time.monotonic() + _PATIENCE_S
        while (found := exit_status.read(str(folder / raylet), pid)) is None:
            assert time.monotonic() < deadline, "the fork server wrote nothing"
            time.sleep(0.01)
        return found.words()

    yield run
    for pidfd in servers.values():
        with contextlib.suppress(ProcessLookupError):  # it ended with its cgroup
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("SIGKILL", "was killed by signal 9 (SIGKILL)"),
        ("SIGSEGV", "was killed by signal 11 (SIGSEGV)"),
        ("SIGTERM", "was killed by signal 15 (SIGTERM)"),
        ("exit", "exited with 3"),
        ("crash", "was killed by signal 11 (SIGSEGV) while preparing, at script.py:12 in run()"),
    ],
)
def test_the_end_of_a_process_is_written_down_as_it_was(run: Run, end: str, words: str) -> None:
    assert run(end) == words


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup with half a gibibyte of memory."""
    line = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), None)
    own = Path("/sys/fs/cgroup/memory") / line.split(":", 2)[2].lstrip("/") if line else Path("/sys/fs/cgroup")
    limit = "memory.limit_in_bytes" if line else "memory.max"
    folder = own / f"shoal-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(1 << 29))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + _PATIENCE_S
    while (folder / "cgroup.procs").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    folder.rmdir()


def test_a_process_that_the_kernel_kills_for_memory_is_reported_as_such(run: Run, small_cgroup: Path) -> None:
    assert run("SIGKILL", "in-cgroup", small_cgroup) == "was killed by signal 9 (SIGKILL)"
    assert run("allocate", "in-cgroup", small_cgroup) == exit_status.OUT_OF_MEMORY


def test_old_ends_are_deleted(tmp_path: Path) -> None:
    recorder = exit_status.Recorder(str(tmp_path / "raylet"))
    pids = []
    for _ in range(300):
        pid = os.posix_spawn("/bin/true", ["true"], {})
        pidfd = os.pidfd_open(pid)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        recorder.reap(pidfd, pid)
        os.close(pidfd)
        pids.append(pid)
    assert exit_status.read(str(tmp_path / "raylet"), pids[-1]) == exit_status.ExitStatus(code=0)
    assert exit_status.read(str(tmp_path / "raylet"), pids[0]) is None
    assert len(list((tmp_path / "raylet.shoal-exits").iterdir())) == 256
