"""Ends what a test run has started once the run is gone: also after SIGINT, SIGKILL or a timeout of pytest.

usage: process_guard.py PID MARK [STATE_DIRECTORY]

PID is the run. MARK is in the environment of the processes that it starts and of all that they start, whatever their
sessions are. STATE_DIRECTORY is that of a server, which hides its environment. Standard input is a pipe from the run.
When it is closed or the run has ended, every process with the mark is killed, until there is none; and every process in
the session of one, since Ray's actors overwrite their environment when they set their title. The session of the run is
that of a user's shell: it is left alone.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path


def wait_for_the_end(run: int) -> None:
    """Return when the input or the run has ended: its forked children keep the other end of the input open."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(run)
        if os.getppid() == run:
            select.select([process, sys.stdin], [], [])


def marked(mark: bytes, state_dir: bytes | None) -> list[int]:
    """Pids of the processes that were started with MARK in their environment, and of the server, which hides its own:
    its state directory is in its command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().split(b"\0")
            is_server = state_dir is not None and b"--state-dir=" + state_dir in command
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


def quit_databases(pids: list[int]) -> None:
    """PostgreSQL gives its shared memory back when it is asked to quit, and cannot when it is killed. Its data goes."""
    for pid in pids:
        with contextlib.suppress(OSError):
            process, command = os.pidfd_open(pid), Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if Path(command[0]).name == "postgres" and "-D" in command:
                os.kill(pid, signal.SIGQUIT)
                select.select([process], [], [], 5.0)
                shutil.rmtree(Path(command[command.index("-D") + 1]).parent, ignore_errors=True)


def main() -> None:
    run, mark = int(sys.argv[1]), sys.argv[2].encode()
    state_dir = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    not_ours = sessions_of({run})
    wait_for_the_end(run)
    temp_dir = None
    if state_dir is not None:
        with contextlib.suppress(OSError, ValueError):
            temp_dir = json.loads((state_dir / "embedded-cluster.json").read_text())["temp_dir"]
    hidden = None if state_dir is None else os.fsencode(state_dir)
    quit_databases(marked(mark, hidden))
    sessions: set[int] = set()
    while left := {*marked(mark, hidden), *members(sessions)}:
        sessions |= sessions_of(left) - not_ours
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
