"""Writes the results of `make faults` into docs/measured/faults.md.

    python tools/faults_page.py build/faults.jsonl   copies new results to docs/measured/faults.jsonl first
    python tools/faults_page.py                      generates the tables from docs/measured/faults.jsonl

Page and JSON lines are committed together; a test compares them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from injected_faults.results import Result, format_tables, read_results

DOCS = Path(__file__).resolve().parent.parent / "docs" / "measured"
RESULTS = DOCS / "faults.jsonl"
PAGE = DOCS / "faults.md"
_BEGIN = "<!-- results: made by tools/faults_page.py from docs/measured/faults.jsonl -->"
_END = "<!-- end -->"


def main() -> None:
    if len(sys.argv) > 1:
        shutil.copyfile(sys.argv[1], RESULTS)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), read_results(RESULTS)), encoding="utf-8")


def with_tables(page: str, results: Sequence[Result]) -> str:
    """The page with its tables generated; the rest is written by hand."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END, 1)
    return f"{before}{_BEGIN}\n{format_tables(results)}\n{_END}{after}"


if __name__ == "__main__":
    main()
