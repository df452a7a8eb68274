"""Ends the processes of a test's server when the test run is gone: also after SIGINT, SIGKILL or a timeout of pytest.

usage: process_guard.py MARK STATE_DIRECTORY

MARK is in the environment of the server, so also in that of its cluster and its workers, whatever their sessions are.
Standard input is a pipe from pytest. At its end every process with the mark is killed, until there is none; and every
process in the session of one, since Ray's actors overwrite their environment when they set their title.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def marked(mark: bytes, state_dir: bytes) -> list[int]:
    """Pids of the processes that were started with MARK in their environment, and of the server, which hides its own:
    its state directory is in its command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            is_server = b"--state-dir=" + state_dir in (entry / "cmdline").read_bytes().split(b"\0")
            if is_server or mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def sessions_of(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getsid(pid))
    return found


def members(sessions: set[int]) -> set[int]:
    """Pids of their processes; without zombies, which have no command line."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            pid = int(entry.name) if entry.name.isdigit() else 0
            if pid and os.getsid(pid) in sessions and (entry / "cmdline").read_bytes():
                found.add(pid)
    return found


def main() -> None:
    mark, state_dir = sys.argv[1].encode(), Path(sys.argv[2])
    sys.stdin.read()
    temp_dir = None
    with contextlib.suppress(OSError, ValueError):
        temp_dir = json.loads((state_dir / "embedded-cluster.json").read_text())["temp_dir"]
    sessions: set[int] = set()
    while left := {*marked(mark, os.fsencode(state_dir)), *members(sessions)}:
        sessions |= sessions_of(left)
        for pid in left | members(sessions):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if temp_dir is not None:
        shutil.rmtree(temp_dir, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main()
