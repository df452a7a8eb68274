"""docs/scheduling.md shows a simulation of every policy."""

import runpy
from pathlib import Path

from schedulers import POLICIES

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")


def test_the_table_of_the_page_has_every_policy() -> None:
    shown = PAGE.split("<!-- simulated:")[1].split("<!-- end -->")[0].splitlines()
    assert [line.split()[0] for line in shown[4:-1]] == list(POLICIES), "run `make docs`"


def test_the_tool_replaces_the_table_only() -> None:
    changed = runpy.run_path(str(ROOT / "tools" / "simulation_page.py"))["with_table"](PAGE, "TABLE")
    before, after = changed.split("TABLE")
    assert PAGE.startswith(before) and PAGE.endswith(after)
