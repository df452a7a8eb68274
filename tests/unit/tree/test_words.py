"""The private words that STYLE.md replaced by the field's terms do not come back, as words or as parts of names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_FOLDERS = ("api", "service", "workers", "tests", "bench", "tools", "docs", "examples", "README.md", "CHANGELOG.md")
_SUFFIXES = {".py", ".md", ".yaml", ".html", ".js", ".css"}
BANNED = {
    "attendant": "worker client",
    "census": "token counts",
    "crew": "worker pool",
    "deal": "batch partition",
    "doubt": "suspicion",
    "filler": "padding",
    "hear": "receive",
    "heard": "received",
    "heed": "update",
    "lifeline": "liveness probe",
    "living": "double-buffered (state), live (worker)",
    "meeting": "rendezvous",
    "memory tier": "snapshot store",
    "news": "reports",
    "newsdesk": "outbox",
    "office": "supervisor context",
    "ram tier": "snapshot store",
    "shard died": "worker_died",
    "shard id": "worker_id",
    "sight": "cluster snapshot",
    "stand in": "local parameter",
    "stint": "generation scope",
    "told": "reported, requested",
    "twin": "tied copy",
    "two place": "double-buffered",
    "undertaker": "group reaper",
    "untold": "unacknowledged",
    "vault": "checkpoint coordinator",
    "wishes": "requests",
}
"""Word or sequence of words -> what to write instead."""
EXCEPTIONS = {
    "CHANGELOG.md": "its table of renamed values has the old names",
    "docs/decisions/0015-rooms-and-words.md": "the record of the renaming",
    "tests/unit/tree/test_words.py": "this list",
}
"""File or folder that may use the old words -> why."""


def _files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *_FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    names = listed.split() or [str(path.relative_to(ROOT)) for name in _FOLDERS for path in (ROOT / name).rglob("*")]
    return [
        name
        for name in names
        if Path(name).suffix in _SUFFIXES and (ROOT / name).is_file() and not name.startswith(tuple(EXCEPTIONS))
    ]


def _words(text: str) -> str:
    """The text in lower case with single spaces between words and between the parts of names."""
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)
    return f" {' '.join(re.findall(r'[a-z0-9]+', parts.lower()))} "


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {name: _words(f"{name}\n{(ROOT / name).read_text(encoding='utf-8')}") for name in _files()}


@pytest.mark.parametrize("word", sorted(BANNED))
def test_a_private_word_does_not_come_back(word: str, texts: dict[str, str]) -> None:
    found = [name for name, text in texts.items() if f" {word} " in text or f" {word}s " in text]
    assert found == [], f"write {BANNED[word]!r} instead of {word!r}"


def test_every_exception_exists() -> None:
    assert [name for name in EXCEPTIONS if not (ROOT / name).exists()] == []


def test_the_parts_of_a_name_are_words() -> None:
    assert _words("class NewsDesk: two_place-x\n untold") == " class news desk two place x untold "
