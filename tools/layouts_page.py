"""Writes the figures of `make bench-layouts` into docs/measured/layouts.md.

    python tools/layouts_page.py build/layouts.json   copies new figures to docs/measured/layouts.json first
    python tools/layouts_page.py                      generates the tables from docs/measured/layouts.json

No figure is typed by hand. Pages and JSON are committed together; a test compares them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from measurements import layout_tables as tables

DOCS = Path(__file__).resolve().parent.parent / "docs"
FIGURES = DOCS / "measured" / "layouts.json"
_BEGIN = "<!-- {name}: made by tools/layouts_page.py from docs/measured/layouts.json -->"
_END = "<!-- end -->"
_PAGES = {"measured/layouts.md": ("relayout", "moving", "techniques", "reality")}


def main() -> None:
    if len(sys.argv) > 1:
        shutil.copyfile(sys.argv[1], FIGURES)
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    for name in _PAGES:
        page = DOCS / name
        page.write_text(with_tables(name, page.read_text(encoding="utf-8"), figures), encoding="utf-8")


def with_tables(name: str, page: str, figures: dict[str, Any]) -> str:
    """The page with its tables generated; the rest is written by hand."""
    for part in _PAGES[name]:
        begin = _BEGIN.format(name=part)
        before, rest = page.split(begin)
        _, after = rest.split(_END, 1)
        page = f"{before}{begin}\n{_table(part, figures)}\n{_END}{after}"
    return page


def _table(part: str, figures: dict[str, Any]) -> str:
    where = figures["machine"]
    made = f"Measured on {where['cpu']}, {where['memory']}; {where['system']}; {where['software']}."
    make = {
        "reality": tables.reality_table,
        "relayout": tables.changes_table,
        "moving": tables.moves_table,
        "techniques": tables.techniques_table,
    }[part]
    return f"{made}\n\n{make(figures[part])}"


if __name__ == "__main__":
    main()
