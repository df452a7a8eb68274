"""Writes which statements each test reaches into the map, see `injected_faults.reach`.

A statement that a fixture of a wider scope reaches counts for every test that uses the fixture.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_SECOND_TIER = ("slow", "matrix", "soak")


class _Recorder:
    def __init__(self, probes: Path, lines: Path) -> None:
        with probes.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)
        self._lines = lines
        self._by_fixture: dict[int, bytes] = {}
        self._outcomes: dict[str, list[str]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out the tests that are in the map."""
        lines = self._lines.read_text(encoding="utf-8").splitlines() if self._lines.exists() else []
        names = {json.loads(line)["name"] for line in lines}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
        items[:] = [item for item in items if item.nodeid not in names]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._take()
        try:
            return (yield)
        finally:
            self._by_fixture[id(fixturedef)] = self._bytes[:]
            self._bytes[:] = _union(before, self._bytes[:])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._outcomes.setdefault(item.nodeid, []).append(report.outcome)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._take()
        begin = time.monotonic()
        result = yield
        seconds = time.monotonic() - begin
        reached = self._bytes[:]
        for definitions in getattr(item, "_fixtureinfo").name2fixturedefs.values():  # noqa: B009 mypy knows no such name
            for definition in definitions:
                reached = _union(reached, self._by_fixture.get(id(definition), b""))
        line = {
            "name": item.nodeid,
            "seconds": round(seconds, 3),
            "is_first_tier": not any(item.get_closest_marker(name) for name in _SECOND_TIER),
            "passed": set(self._outcomes.pop(item.nodeid, [])) == {"passed"},
            "statements": f"{_bits(reached):x}",
        }
        with self._lines.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        return result

    def _take(self) -> bytes:
        """The bytes, which are cleared."""
        taken = self._bytes[:]
        self._bytes[:] = bytes(len(taken))
        return taken


def _union(first: bytes, second: bytes) -> bytes:
    return (int.from_bytes(first, "little") | int.from_bytes(second, "little")).to_bytes(len(first), "little")


def _bits(reached: bytes) -> int:
    """Bit n is set if byte n is."""
    return int(reached[::-1].translate(bytes([48]) + bytes([49]) * 255) or b"0", 2)


def pytest_configure(config: pytest.Config) -> None:
    variables = (os.environ["SHOAL_FAULTS_PROBES"], os.environ["SHOAL_FAULTS_MAP"])
    config.pluginmanager.register(_Recorder(*map(Path, variables)))
