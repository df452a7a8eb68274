"""The Python files of the repository, each read once a session, for tests of rules about the sources.

To parse all of them takes ten seconds. A rule looks for its names in the text, and parses only a file that has them."""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("api", "service", "workers")
_FOREIGN = {"__pycache__", "shadowing"}
"""`shadowing` has modules of a user that are named like modules of Shoal."""


def sources(*folders: str) -> dict[Path, str]:
    """Path -> text of every Python file below the folders, which are relative to the repository."""
    return {path: text for folder in folders for path, text in _read(folder)}


@cache
def _read(folder: str) -> tuple[tuple[Path, str], ...]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return tuple((path, path.read_text("utf-8")) for path in paths if not _FOREIGN & set(path.parts))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))
