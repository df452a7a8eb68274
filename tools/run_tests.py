"""Runs the tests of `make test` as five pytest processes side by side: each waits more than half of its time, so on two
cores they end sooner than one after the other.

    python tools/run_tests.py [options of pytest]

Tests that need a Ray cluster (tests/chaos, tests/ray, tests/browser) run in the foreground. The others run beside them
at a lower priority, since they wait less; their output follows at the end, with the slowest tests of each. The exit
status is 0 if all succeed. All end with this process, also if it is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_DIST = tuple(f"tests/dist/{name}" for name in ("interrupted", "loop", "process", "script", "tasks"))
"""They take half of the time of tests/dist."""
BESIDE = (_DIST, ("tests/dist",), ("tests/unit",), ("tests/store", "tests/http"))
"""The folders of each process that runs beside the one in the foreground, which has all others. A folder leaves out
what is below it and named by another process."""
_NICENESS = 5
_PR_SET_PDEATHSIG = 1


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", "--durations=20", *sys.argv[1:]]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of many hundred processes would compile Shoal anew
    ignored = [f"--ignore={folder}" for folders in BESIDE for folder in folders]
    no_dist = [f"--ignore={folder}" for folder in _DIST]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outputs = [tempfile.TemporaryFile() for _ in BESIDE]  # noqa: SIM115 closed with this process
    beside = [
        subprocess.Popen(
            [*pytest, *folders, *(no_dist if folders != _DIST else ())],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_run_beside,
        )
        for folders, output in zip(BESIDE, outputs, strict=True)
    ]
    in_front = subprocess.Popen([*pytest, *ignored], cwd=ROOT, preexec_fn=_end_with_parent)
    try:
        for process in (in_front, *beside):
            process.wait()
    finally:  # also if a signal ends this process: what was seen so far says where the time went
        for process in (in_front, *beside):
            process.terminate()
            process.wait()
        for folders, output in zip(BESIDE, outputs, strict=True):
            print(f"== {', '.join(folders)}", flush=True)
            output.seek(0)
            os.write(sys.stdout.fileno(), output.read())
    return next((process.returncode for process in (in_front, *beside) if process.returncode), 0)


def _run_beside() -> None:
    os.nice(_NICENESS)
    _end_with_parent()


def _end_with_parent() -> None:
    """Ends this process with its parent, on Linux only. pytest ends what it has started when it receives the signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
