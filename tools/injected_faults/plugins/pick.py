"""Runs the tests that a file names, in its order, and writes when each begins and how it ends.

SHOAL_FAULTS_PICKED     a file with the name of a test in each line; empty: all tests that pytest selects
SHOAL_FAULTS_PROGRESS   a file for JSON lines: {"test": name, "outcome": ""} when it begins, then its outcome
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


class _Picker:
    def __init__(self, picked: str, progress: Path) -> None:
        names = Path(picked).read_text(encoding="utf-8").splitlines() if picked else []
        self._order = {name: n for n, name in enumerate(names)}
        self._progress = progress

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self._order:
            return
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._order])
        picked = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(picked, key=lambda item: self._order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._write(item.nodeid, "")
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.when == "teardown":
            self._write(report.nodeid, report.outcome)

    def _write(self, test: str, outcome: str) -> None:
        with self._progress.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"test": test, "outcome": outcome}) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    progress = Path(os.environ["SHOAL_FAULTS_PROGRESS"])
    config.pluginmanager.register(_Picker(os.environ["SHOAL_FAULTS_PICKED"], progress))
