"""deploy/grafana: the files are what tools/dashboards.py makes, and show what is exported."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from dashboards import BOARDS, FOLDER, document
from kit.cases import failed_cases
from kit.requirements import require
from shoal_service.telemetry.exposition import ALL

_NOT_SHOWN = frozenset({"shoal_wait_seconds", "shoal_wait_limit_seconds", "shoal_waits_ended_total"})
"""Metrics that no dashboard shows: waits for another machine are looked at when something hangs."""


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_the_committed_dashboards_are_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == document(BOARDS[name]), "run `make docs`"


def test_the_dashboards_lead_to_the_pages_of_jobs() -> None:
    boards = {name: json.loads(document(board)) for name, board in BOARDS.items()}
    assert [link["url"] for link in boards["job.json"]["links"] if link["url"]] == ["${shoal}/jobs/${job}"]
    links = {
        (panel["title"], link["url"])
        for panel in boards["fleet.json"]["panels"]
        for link in panel.get("fieldConfig", {}).get("defaults", {}).get("links") or ()
    }
    assert {("Jobs", "${shoal}/jobs/${__data.fields.job_id}")} < links
    assert ("Loss", "${shoal}/jobs/${__field.labels.job_id}") in links
    ended = [panel for panel in boards["job.json"]["panels"] if panel["type"] == "stat"]
    assert {panel["fieldConfig"]["defaults"]["noValue"] for panel in ended} == {"none, or the job has ended"}


def _queries() -> list[str]:
    panels = [panel for board in BOARDS.values() for row in board.rows.values() for panel in row]
    return [query.expr for panel in panels for query in panel.queries]


def test_every_metric_is_shown_or_left_out_on_purpose() -> None:
    used = {name for expr in _queries() for name in re.findall(r"\bshoal_\w+", expr)}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} == {metric.name for metric in ALL} - _NOT_SHOWN


def test_a_maximum_joins_control_planes_and_no_series_of_different_meaning() -> None:
    """Each control plane shows the same values, so the maximum is one of them. Over any other label it is none."""
    assert failed_cases(_check_maximum, set(_queries())) == {}


def _check_maximum(expr: str) -> None:
    labels = {metric.name: set(metric.labels) for metric in ALL}
    for kept, name, pinned in re.findall(r"\bmax(?: by \(([^)]*)\))? ?\((?:\w+\()?(shoal_\w+)(?:\{([^}]*)\})?", expr):
        known = set(re.findall(r"\w+", kept)) | set(re.findall(r"(\w+)=", pinned))
        lost = labels[re.sub(r"_(bucket|sum|count)$", "", name)] - known
        assert lost == set() or name == "shoal_job_info", f"{name} is compared over {lost}"
    assert not re.search(r"\b(?:max|min|avg) by \([^)]*\ble\b", expr), "buckets can only be added up"


def test_quantiles_by_phase_are_of_all_causes_together(tmp_path: Path) -> None:
    """Two control planes show three slow recoveries of one cause for nine quick ones of another: the 95 % are slow."""
    promtool = require("prometheus", "promtool")
    [panel] = [one for row in BOARDS["fleet.json"].rows.values() for one in row if one.title == "Recovery by phase"]
    buckets = {"worker_died": {"0.5": 9, "60": 9, "+Inf": 9}, "node_died": {"0.5": 0, "60": 3, "+Inf": 3}}
    series = [
        {
            "series": f'shoal_recovery_seconds_bucket{{cause="{cause}", phase="form", le="{le}", instance="{plane}"}}',
            "values": f"0+{number}x10",
        }
        for cause, counts in buckets.items()
        for le, number in counts.items()
        for plane in ("a", "b")
    ]
    tests = [
        {
            "expr": query.expr.replace("$__rate_interval", "5m"),
            "eval_time": "10m",
            "exp_samples": [{"labels": '{phase="form"}', "value": value}],
        }
        for query, value in zip(panel.queries, (1 / 3, 0.5 + 59.5 * 0.8), strict=True)
    ]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}]}))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


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
