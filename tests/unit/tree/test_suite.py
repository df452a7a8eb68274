"""The suite itself: nothing of it is left out without a word."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


def test_every_folder_with_tests_is_looked_into(pytestconfig: pytest.Config) -> None:
    """pytest skips folders by name, and its own list of names has `dist` and `build` in it."""
    skipped = pytestconfig.getini("norecursedirs")
    folders = {folder.name for file in TESTS.rglob("test_*.py") for folder in file.relative_to(TESTS).parents}

    assert folders >= {"dist", "unit", "chaos"}
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in skipped)]
