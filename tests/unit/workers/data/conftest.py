"""A corpus of small text files, and a config that reads it into a cache of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.text_data import TextDataConfig


@pytest.fixture
def text_dir(tmp_path: Path) -> Path:
    """40 different documents of 1 to 2 KB."""
    directory = tmp_path / "text"
    directory.mkdir()
    for number in range(40):
        body = "\n".join(f"document {number}, line {line}: {number * line}" for line in range(40 + number % 7))
        (directory / f"{number:03d}.txt").write_text(body)
    return directory


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., TextDataConfig]:
    def make(*paths: Path | str, **settings: Any) -> TextDataConfig:
        return TextDataConfig(paths=tuple(map(str, paths)), cache_dir=str(tmp_path / "cache"), **settings)

    return make
