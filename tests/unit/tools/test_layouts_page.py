"""The pages that show the figures of `make bench-layouts`."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    before = list(sys.path)
    found = runpy.run_path(str(ROOT / "tools" / "layouts_page.py"))
    sys.path[:] = before
    return found


def test_pages_show_the_committed_figures(page: dict[str, Any]) -> None:
    if not page["FIGURES"].exists():  # none were ever taken
        return
    figures = json.loads(page["FIGURES"].read_text(encoding="utf-8"))
    for name in page["_PAGES"]:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert page["with_tables"](name, text, figures) == text


def test_a_table_is_replaced_and_the_rest_of_the_page_stays(page: dict[str, Any]) -> None:
    layout = {
        "name": "tp2",
        "world_size": 2,
        "predicted_bytes": 90 << 20,
        "measured_bytes": 100 << 20,
        "memory_error": -0.1,
        "predicted_s": 0.5,
        "measured_s": 0.25,
    }
    reality = {"layouts": [layout], "memory_error_largest": 0.1, "memory_error_median": 0.1}
    machine = {"cpu": "2 cores", "memory": "24 GiB", "system": "Linux", "software": "torch"}
    begin = page["_BEGIN"].format(name="reality")
    text = f"before\n{begin}\nold\n{page['_END']}\nafter\n"
    made = page["with_tables"]("planner.md", text, {"machine": machine, "reality": reality})
    assert "| 2 | tp2 | 90.0 MiB | 100.0 MiB | -10.0 % | 500 ms | 250 ms |" in made
    assert made.startswith("before\n") and made.endswith("\nafter\n") and "old" not in made
