"""Runs the tests of `make test` as several pytest processes side by side: each waits more than half of its time, so on
two cores they end sooner than one after the other.

    python tools/run_tests.py [--beside N] [options of pytest]

Most tests of tests/ray, which need a Ray cluster, run in the foreground. The others run beside them at a lower
priority, since they wait less, N at once: more would wait for CPU time, and fail by it. Their output follows at the
end, with the slowest tests of each and what it cost. All end with this process, also if it is killed.

A few tests that fail are run again at the end, alone, to tell what is broken from what depends on other tests or on the
speed of the machine. A test that fails and passes alone fails the run, unless tests/known_flakes.toml lists it, or
SHOAL_FLAKES is `report`: then it is only named.

A test that hangs is ended by its limit (`timeout` in pyproject.toml, or its marker), which prints the stacks of its
threads and of the processes that it has started. `faulthandler_timeout` ends a pytest process that cannot be
interrupted, and prints its stacks too. _LIMIT_S ends the whole run.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KNOWN_FLAKES = ROOT / "tests" / "known_flakes.toml"
_DIST = tuple(f"tests/dist/{name}" for name in ("interrupted", "loop", "process", "script"))
"""They take a third of the time of tests/dist."""
_ON_A_CLUSTER = ("tests/chaos", "tests/ray/isolation", "tests/ray/lifecycle")
"""Half of the tests that need a Ray cluster, in time."""
_WRITTEN_JOBS = ("job_states", "job_table", "researcher_tasks", "widths", "workspace")
_PAGES = tuple(f"tests/browser/test_{name}.py" for name in _WRITTEN_JOBS)
"""Half of tests/browser in time. They show jobs that a test has written, so they need no Ray cluster."""
BESIDE = (
    ("tests/unit/service",),
    _ON_A_CLUSTER,
    ("tests/dist",),
    _DIST,
    ("tests/dist/tasks",),
    ("tests/unit",),
    ("tests/browser",),
    ("tests/http",),
    ("tests/store",),
    _PAGES,
)
"""The folders and modules of each process that runs beside the one in the foreground, which has all others. The longest
ones first, of `make test` or of the slow tests. A folder leaves out what is below it and named by another process."""
_MOST_BESIDE = 4
_IMPORTED = (
    "boto3",
    "fastapi",
    "hypothesis.strategies",
    "pandas",
    "psycopg",
    "pydantic_settings",
    "ray",
    "shoal_api.client",
    "shoal_api.http.app",
    "shoal_workers.check",
    "shoal_workers.engine.engine",
    "shoal_workers.tasks.lm",
    "sqlalchemy.orm",
    "tensorboardX",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "trio",
    "uvicorn",
)
AFTERWARDS = "afterwards"
_NICENESS = 5
_MOST_AGAIN = 15
"""With more failures something is broken, and nothing is run again."""
_TESTS_FAILED = 1
"""Exit status of pytest: all tests were run, and some have failed."""
_LIMIT_S = 3600.0
_LAST_S = 60.0
"""How long a process that was told to print its stacks and end may take."""
_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--beside", type=int, default=_MOST_BESIDE)
    own, others = parser.parse_known_args()
    options = ["--durations=20", "-W", "ignore::pytest.PytestAssertRewriteWarning", *others]
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of many processes would wait for each other, spinning
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of many hundred processes would compile Shoal anew
    sys.dont_write_bytecode = False  # of this process and its forks, which rewrite the asserts of the tests
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _import_once()
    folder = Path(tempfile.mkdtemp(prefix="shoal-tests-"))  # a TemporaryDirectory would end with the first fork
    try:
        return _run(options, folder, own.beside)
    finally:
        shutil.rmtree(folder)


def _run(options: list[str], folder: Path, beside: int) -> int:
    """Return the exit status of the whole run. `folder`: for the names of failed tests."""
    ended, failed = _run_side_by_side(options, folder / "failed", beside)
    tests = to_repeat(ended, failed)
    if not tests:
        return max((abs(status) for status in ended), default=0)
    print(f"== again, alone: {', '.join(tests)}", flush=True)
    _start([*options, "-m", "", *tests], folder / "again").join()  # a cell without its neighbours has other marks
    known = tomllib.loads(KNOWN_FLAKES.read_text(encoding="utf-8"))
    fails = os.environ.get("SHOAL_FLAKES") != "report"
    status, lines = verdict(tests, _names(folder / "again"), known, flakes_fail=fails)
    print("\n".join(lines), flush=True)
    return status


def _import_once() -> None:
    """Import what most tests import, so that the forked processes have it: a minute of CPU time less."""
    for name in _IMPORTED:
        importlib.import_module(name)
    num_threads = threading.active_count()
    assert num_threads == 1, f"a process with {num_threads} threads is forked"
    gc.collect()
    gc.freeze()  # the collections of the forked processes neither visit nor copy these pages


def _run_side_by_side(options: Sequence[str], failed: Path, beside: int) -> tuple[set[int], list[str]]:
    """Exit statuses other than 0, and the names of the failed tests, which are written to the file `failed`."""
    ignored = [f"--ignore={folder}" for folders in BESIDE for folder in folders]
    deadline_mono = time.monotonic() + _LIMIT_S
    foreground = _start([*options, *ignored], failed)
    running, outputs = [foreground], []
    ended: set[int] = set()
    try:
        for folders in BESIDE:
            while len(running) > beside or (foreground not in running and len(running) == beside):
                ended |= _wait(running, deadline_mono)
            outputs.append(tempfile.TemporaryFile())  # noqa: SIM115 closed with this process
            arguments = [*options, *folders, *_left_out(folders)]
            running.append(_start(arguments, failed, outputs[-1].fileno()))
        while running:
            ended |= _wait(running, deadline_mono)
    finally:  # also if a signal ends this process: what was seen so far says where the time went
        for process in running:
            process.terminate()
            process.join()
        for folders, output in zip(BESIDE, outputs, strict=False):
            print(f"== {', '.join(folders)}", flush=True)
            output.seek(0)
            os.write(sys.stdout.fileno(), output.read())
    return ended - {0}, _names(failed)


def _start(arguments: list[str], failed: Path, output: int | None = None) -> ForkProcess:
    """Fork a process that runs pytest with these arguments.

    Args:
        failed: where tests/conftest.py writes the names of failed tests.
        output: the descriptor of a file for what it prints; with it, the process has a lower priority.
    """
    process = multiprocessing.get_context("fork").Process(target=_run_pytest, args=(arguments, failed, output))
    process.start()
    return process


def _run_pytest(arguments: list[str], failed: Path, output: int | None) -> None:
    _end_with_parent()
    if output is not None:
        os.nice(_NICENESS)
        os.dup2(output, 1)
        os.dup2(output, 2)
    os.environ["SHOAL_FAILED_TESTS"] = str(failed)
    os.environ["SHOALTEST_SHARED"] = str(failed.parent)  # for what is made once, see tests/conftest.py
    start = time.monotonic()
    status = pytest.main(arguments)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    print(f"== {time.monotonic() - start:.0f} s, {cpu_s:.0f} s of CPU time", flush=True)
    atexit._run_exitfuncs()  # a forked process ends without them
    sys.exit(status)


def _left_out(folders: Sequence[str]) -> list[str]:
    """Options that leave out what is below the folders and run by another process."""
    below = tuple(f"{folder}/" for folder in folders)
    return [f"--ignore={other}" for others in BESIDE for other in others if other.startswith(below)]


def _wait(running: list[ForkProcess], deadline_mono: float) -> set[int]:
    """Wait until a process has ended, and remove it. At the deadline all print their stacks and end by SIGABRT.

    Returns:
        The exit statuses of those that ended.
    """
    multiprocessing.connection.wait([process.sentinel for process in running], deadline_mono - time.monotonic())
    if time.monotonic() > deadline_mono:
        for process in running:
            print(f"== the process of tests {process.pid} runs after {_LIMIT_S:g} s, the limit of a run", flush=True)
            os.kill(process.pid or os.getpid(), signal.SIGABRT)
            process.join(_LAST_S)
    done = [process for process in running if not process.is_alive()]
    running[:] = [process for process in running if process not in done]
    return {process.exitcode or 0 for process in done}


def to_repeat(ended: Collection[int], failed: Sequence[str]) -> list[str]:
    """Return the tests to run again, alone. The list is empty if all is well or something is broken.

    Args:
        ended: exit statuses of the processes other than 0.
        failed: the names of failed tests. `AFTERWARDS` stands for a failure after a test, of what it has left: to find
            that again takes the same tests.
    """
    tests = list(dict.fromkeys(failed))
    is_few = len(tests) <= _MOST_AGAIN and AFTERWARDS not in tests
    return tests if is_few and set(ended) == {_TESTS_FAILED} else []


def verdict(
    failed: Sequence[str],
    failed_again: Collection[str],
    known: Mapping[str, Mapping[str, object]],
    *,
    flakes_fail: bool = True,
) -> tuple[int, list[str]]:
    """Return the exit status of the run and a line for each test that failed.

    Args:
        failed: tests that failed beside others.
        failed_again: those that failed alone too.
        known: flakes by test, each with `reason` and `since`.
        flakes_fail: a test that passes alone and is not known fails the run.
    """
    lines, status = [], 0
    for test in failed:
        flake = known.get(test)
        if test in failed_again:
            status, line = _TESTS_FAILED, f"== failed, also alone: {test}"
        elif flake is not None:
            line = f"== known flake since {flake['since']} ({flake['reason']}): {test}"
        else:
            status = _TESTS_FAILED if flakes_fail else status
            line = (
                f"== FLAKY: {test} failed beside others and passed alone{', which fails this run' * flakes_fail}. "
                f"Mend what it waits for, or list it in {KNOWN_FLAKES.relative_to(ROOT)} with its reason and date."
            )
        lines.append(line)
    return status, lines


def _names(failed: Path) -> list[str]:
    return failed.read_text(encoding="utf-8").splitlines() if failed.exists() else []


def _end_with_parent() -> None:
    """End this process with its parent, on Linux only. pytest ends what it has started when it receives the signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
