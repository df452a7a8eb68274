"""One fault in a copy of the tree, and the tests that reach it, until one fails.

First the tests of the first tier, folder by folder and the cheap ones first; if all pass, those of the second tier: the
tests marked `slow` in the same files. A test outside `tests/unit` must fail twice, because on a busy machine it can
fail once for want of time. A test of the second tier must also pass without the fault; those of the first tier have
passed when the map was made.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from types import TracebackType

from injected_faults.changes import Fault
from injected_faults.reach import PIECES, ReachingTest, tree_environment
from injected_faults.sources import copy_tree

_HANG_S = 90.0
"""A test that takes longer, and ten times longer than without the fault, hangs."""
_POLL_S = 0.2
_NO_TESTS = 5
"""Exit status of pytest."""
_SECOND_TIER = "slow and not (matrix or soak)"
_FOLDERS = [*dict.fromkeys(piece.split("/")[1] for piece in PIECES)]


class How(StrEnum):
    """How a run of tests has ended."""

    PASSED = "passed"
    FAILED = "failed"
    HUNG = "hung"
    CRASHED = "crashed"
    LIMIT = "limit"
    """The tests took longer than allowed, and none had failed."""


_CATCHES = (How.FAILED, How.HUNG, How.CRASHED)


@dataclass(frozen=True)
class Run:
    """What came of some tests."""

    how: How
    test: str = ""
    """The first one that has failed, hung or crashed."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Judgement:
    """Which tests catch a fault."""

    caught: str
    """`first` or `second` tier, `none`, or `undecided`: the limit was reached before all tests were run."""
    run: Run


class Trials:
    """Two copies of the tree: one for the faults, and one without."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._directory = tempfile.TemporaryDirectory(prefix="shoal-faults-")
        self._changed, self._unchanged = (Path(self._directory.name, name) for name in ("changed", "unchanged"))

    def __enter__(self) -> Trials:
        copy_tree(self._changed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._directory.cleanup()

    def judge(self, fault: Fault, tests: Sequence[ReachingTest]) -> Judgement:
        """The fault is in the copy during this call only. `tests`: those that reach it, of the first tier."""
        module = self._changed / fault.path
        source = module.read_text(encoding="utf-8")
        try:
            self._write(module, fault.apply(source))
            run = self._first_tier(tests)
            if run.how is not How.PASSED:
                return Judgement("undecided" if run.how is How.LIMIT else "first", run)
            run = self._second_tier(tests)
            return Judgement({How.PASSED: "none", How.LIMIT: "undecided"}.get(run.how, "second"), run)
        finally:
            self._write(module, source)

    def _first_tier(self, tests: Sequence[ReachingTest]) -> Run:
        seconds = 0.0
        for folder, group in groupby(_in_order(tests), key=lambda test: test.folder):
            left = list(group)
            while left:
                run = self._run(self._changed, left, self._limit_s - seconds)
                seconds += run.seconds
                if run.how not in _CATCHES:
                    break
                if folder == "unit" or not run.test or self._fails_again(run.test):
                    return replace(run, seconds=seconds)
                left = left[[test.name for test in left].index(run.test) + 1 :]
            if seconds >= self._limit_s:
                return Run(How.LIMIT, seconds=seconds)
        return Run(How.PASSED, seconds=seconds)

    def _second_tier(self, tests: Sequence[ReachingTest]) -> Run:
        files = list(dict.fromkeys(test.name.split("::")[0] for test in _in_order(tests)))
        run = self._run(self._changed, [], self._limit_s, ["-m", _SECOND_TIER, *files])
        if run.how not in _CATCHES or not run.test:
            return run
        if not self._unchanged.exists():
            copy_tree(self._unchanged)
        passes = self._run(self._unchanged, [_unmeasured(run.test)], self._limit_s).how is How.PASSED
        return run if passes and self._fails_again(run.test) else Run(How.LIMIT, seconds=run.seconds)

    def _fails_again(self, test: str) -> bool:
        return self._run(self._changed, [_unmeasured(test)], self._limit_s).how in _CATCHES

    def _run(self, tree: Path, tests: Sequence[ReachingTest], limit_s: float, options: Sequence[str] = ()) -> Run:
        """Runs these tests in their order, or those that the options choose."""
        picked, progress = (Path(self._directory.name, name) for name in ("picked", "progress"))
        picked.write_text("\n".join(test.name for test in tests), encoding="utf-8")
        progress.write_text("", encoding="utf-8")
        files = list(dict.fromkeys(test.name.split("::")[0] for test in tests))
        command = [sys.executable, "-m", "pytest", "-x", "-p", "injected_faults.plugins.pick", *(options or ["-m", ""])]
        environment = tree_environment(tree) | {
            "SHOAL_FAULTS_PICKED": str(picked) if tests else "",
            "SHOAL_FAULTS_PROGRESS": str(progress),
        }
        begin = time.monotonic()
        process = subprocess.Popen(
            [*command, *files],
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            how = _wait(process, progress, {test.name: test.seconds for test in tests}, limit_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # what it has started ends with it: tests/kit/guard
                process.wait()
        lines = _read(progress)
        failed = [test for test, outcome in lines if outcome == "failed"]
        if how is How.PASSED and failed:
            how = How.FAILED
        elif how is How.PASSED and process.returncode not in (0, _NO_TESTS):
            how = How.CRASHED
        assert not tests or process.returncode != _NO_TESTS, "the map names tests that do not exist: make it again"
        test = failed[0] if failed else lines[-1][0] if lines else ""
        return Run(how, test if how in _CATCHES else "", round(time.monotonic() - begin, 1))

    @staticmethod
    def _write(module: Path, source: str) -> None:
        module.write_text(source, encoding="utf-8")
        for compiled in (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc"):
            compiled.unlink()  # it is known by size and whole seconds only


def _in_order(tests: Sequence[ReachingTest]) -> list[ReachingTest]:
    return sorted(tests, key=lambda test: (_FOLDERS.index(test.folder), test.seconds, test.name))


def _unmeasured(name: str) -> ReachingTest:
    return ReachingTest(name=name, seconds=0.0, is_first_tier=True, passed=True, statements=0)


def _wait(process: subprocess.Popen[bytes], progress: Path, seconds: dict[str, float], limit_s: float) -> How:
    """Returns when the process has ended (`PASSED`, whatever its status), a test hangs, or the limit is reached."""
    begin = since = time.monotonic()
    size = 0
    while True:
        try:
            process.wait(_POLL_S)
            return How.PASSED
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if progress.stat().st_size != size:
            size, since = progress.stat().st_size, now
            continue
        lines = _read(progress)
        if lines and lines[-1][1] == "" and now - since > max(_HANG_S, 10 * seconds.get(lines[-1][0], 0.0)):
            return How.HUNG
        if now - begin > limit_s:
            return How.LIMIT


def _read(progress: Path) -> list[tuple[str, str]]:
    """Test and outcome of each whole line; no outcome: the test has begun."""
    lines = [json.loads(line) for line in progress.read_text(encoding="utf-8").split("\n")[:-1]]
    return [(line["test"], line["outcome"]) for line in lines]
