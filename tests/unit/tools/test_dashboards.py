"""deploy/grafana: the files are what tools/dashboards.py makes, and show what is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from dashboards import BOARDS, FOLDER, document
from shoal_service.telemetry.metric_names import ALL

_NOT_SHOWN: frozenset[str] = frozenset()
"""Metrics that no dashboard shows."""


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_the_committed_dashboards_are_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == document(BOARDS[name]), "run `make docs`"


def _queries() -> list[str]:
    panels = [panel for board in BOARDS.values() for row in board.rows.values() for panel in row]
    return [query.expr for panel in panels for query in panel.queries]


def test_every_metric_is_shown_or_left_out_on_purpose() -> None:
    used = {name for expr in _queries() for name in re.findall(r"\bshoal_\w+", expr)}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} == {metric.name for metric in ALL} - _NOT_SHOWN


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_no_two_panels_of_a_dashboard_lie_on_each_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    rows = json.loads((FOLDER / name).read_text())["panels"]
    for panel in rows:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_the_provisioning_files_name_what_is_there() -> None:
    folder = FOLDER / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    [provider] = yaml.safe_load((folder / "dashboards" / "shoal.yml").read_text())["providers"]
    assert source["type"] == "prometheus" and provider["type"] == "file"
    assert {path.name for path in Path(FOLDER).glob("*.json")} == BOARDS.keys()
