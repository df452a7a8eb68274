"""Runs the tests of `make test` as two pytest processes side by side: on two cores they end sooner than one.

    python tools/run_tests.py [options of pytest]

Tests that need a Ray cluster (tests/chaos, tests/ray, tests/browser) run in the foreground. The others run beside them
at a lower priority, since they wait less; their output follows at the end, with the slowest tests of both. The exit
status is 0 if both succeed. Both end with this process, also if it is killed.
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
BESIDE = ("tests/unit", "tests/store", "tests/http", "tests/dist")
_NICENESS = 3
_PR_SET_PDEATHSIG = 1


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", "--durations=20", *sys.argv[1:]]
    ignored = [f"--ignore={folder}" for folder in BESIDE]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(
            [*pytest, *BESIDE], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_run_beside
        )
        in_front = subprocess.Popen([*pytest, *ignored], cwd=ROOT, preexec_fn=_end_with_parent)
        try:
            in_front.wait()
            beside.wait()
        finally:  # also if a signal ends this process: what was seen so far says where the time went
            for process in (in_front, beside):
                process.terminate()
                process.wait()
            print(f"== {', '.join(BESIDE)}", flush=True)
            output.seek(0)
            os.write(sys.stdout.fileno(), output.read())
    return in_front.returncode or beside.returncode


def _run_beside() -> None:
    os.nice(_NICENESS)
    _end_with_parent()


def _end_with_parent() -> None:
    """Ends this process with its parent, on Linux only. pytest ends what it has started when it receives the signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
