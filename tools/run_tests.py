"""Runs the tests of `make test` as six pytest processes side by side: each waits more than half of its time, so on two
cores they end sooner than one after the other.

    python tools/run_tests.py [options of pytest]

Tests that need a Ray cluster (tests/chaos, tests/ray, tests/browser) run in the foreground. The others run beside them
at a lower priority, since they wait less; their output follows at the end, with the slowest tests of each. All end with
this process, also if it is killed.

A few tests that fail are run again at the end, alone: on a busy machine a test may fail for want of time, and the rest
of the run is worth more than that. Both results are shown, and the first one is still a mistake, of the test or of
Shoal. The exit status is 0 if all succeed, at the latest alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_DIST = tuple(f"tests/dist/{name}" for name in ("interrupted", "loop", "process", "script", "tasks"))
"""They take half of the time of tests/dist."""
BESIDE = (_DIST, ("tests/dist",), ("tests/unit",), ("tests/store",), ("tests/http",))
"""The folders of each process that runs beside the one in the foreground, which has all others. A folder leaves out
what is below it and named by another process."""
AFTERWARDS = "afterwards"
_NICENESS = 5
_MOST_AGAIN = 5
"""With more failures something is broken, and nothing is run again."""
_TESTS_FAILED = 1
"""Exit status of pytest: all tests were run, and some have failed."""
_PR_SET_PDEATHSIG = 1


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", "--durations=20", *sys.argv[1:]]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of six processes would wait for each other, spinning
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of many hundred processes would compile Shoal anew
    ignored = [f"--ignore={folder}" for folders in BESIDE for folder in folders]
    no_dist = [f"--ignore={folder}" for folder in _DIST]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = tempfile.TemporaryDirectory(prefix="shoal-tests-")
    failed = Path(folder.name, "failed")
    os.environ["SHOAL_FAILED_TESTS"] = str(failed)  # tests/conftest.py writes it
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
    ended = {process.returncode for process in (in_front, *beside)} - {0}
    tests = to_repeat(ended, failed.read_text(encoding="utf-8").splitlines() if failed.exists() else [])
    if not tests:
        return max(ended, default=0)
    print(f"== again, alone: {', '.join(tests)}", flush=True)
    command = [*pytest, "-m", "", *tests]  # a cell without its neighbours has other marks
    again = subprocess.run(command, cwd=ROOT, preexec_fn=_end_with_parent, check=False).returncode
    if again == 0:
        print(f"== failed beside others, and succeeded alone: {', '.join(tests)}", flush=True)
    return again


def to_repeat(ended: Collection[int], failed: Sequence[str]) -> list[str]:
    """The tests that are run again, alone; empty: none.

    Args:
        ended: exit statuses of the processes other than 0.
        failed: the names of failed tests. `AFTERWARDS` stands for a failure after a test, of what it has left: to find
            that again takes the same tests.
    """
    tests = list(dict.fromkeys(failed))
    is_few = len(tests) <= _MOST_AGAIN and AFTERWARDS not in tests
    return tests if is_few and set(ended) == {_TESTS_FAILED} else []


def _run_beside() -> None:
    os.nice(_NICENESS)
    _end_with_parent()


def _end_with_parent() -> None:
    """Ends this process with its parent, on Linux only. pytest ends what it has started when it receives the signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
