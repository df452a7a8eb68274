"""Writes the table of docs/programs.md from the rows that tests/dist/tasks/test_small_programs.py runs.

    python tools/programs_page.py

A test compares the page with the rows. Run by `make docs`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "programs.md"
_BEGIN = "<!-- programs: made by tools/programs_page.py from tests/kit/worlds/small_programs.py; run `make docs` -->\n"
_END = "<!-- end of programs -->"

sys.path.insert(0, str(ROOT / "tests"))

from kit.worlds.small_programs import table  # noqa: E402


def with_programs(page: str) -> str:
    """The page with a new table; everything else is written by hand."""
    before, rest = page.split(_BEGIN)
    return f"{before}{_BEGIN}{table()}{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_programs(PAGE.read_text("utf-8")), "utf-8")
