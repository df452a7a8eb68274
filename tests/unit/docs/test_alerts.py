"""deploy/prometheus: promtool accepts configuration and rules; every alert fires in a test and has a runbook."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import runbook_page
from kit.cases import failed_cases
from kit.requirements import require
from shoal_service.telemetry.exposition import ALL

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "prometheus"


def _rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


ALERTS = [rule for rule in _rules() if "alert" in rule]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "--syntax-only", "prometheus.yml"),
        ("check", "rules", "rules.yml"),
        ("test", "rules", "tests.yml"),
    ],
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    promtool = require("prometheus", "promtool")
    done = subprocess.run([promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_to_fire_and_to_stay_quiet() -> None:
    tests = yaml.safe_load((FOLDER / "tests.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fired == {alert["alert"] for alert in ALERTS}
    with_good = {test["name"] for test in tests if any("good" in one["series"] for one in test["input_series"])}
    quiet = {case["alertname"] for case in cases if not case["exp_alerts"]} | {
        case["alertname"] for test in tests if test["name"] in with_good for case in test["alert_rule_test"]
    }
    assert quiet == fired


def test_an_alert_links_to_its_section_of_the_runbook() -> None:
    def check(alert: dict[str, Any]) -> None:
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert page == "http://127.0.0.1:8470/runbook", "Alertmanager shows it as a link, so it has a host"
        assert f'id="{anchor}"' in runbook
        section = re.search(rf"^### {alert['alert']}\n\n(.+?)(?=^##|\Z)", text, re.M | re.S)
        assert section is not None and anchor == alert["alert"].lower()
        assert all(f"**{part}.**" in section[1] for part in ("Means", "Look", "Do"))
        assert alert["labels"]["severity"] in ("warning", "critical") and alert["annotations"]["summary"]

    runbook = runbook_page.PAGE.read_text(encoding="utf-8")
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert failed_cases(check, ALERTS, lambda alert: alert["alert"]) == {}


def test_what_a_range_has_seen_of_a_job_does_not_outlive_the_job() -> None:
    of_jobs = [alert for alert in ALERTS if "job_id" in alert["expr"]]
    with_range = [alert for alert in of_jobs if re.search(r"\[\d+[smhd]\]|shoal:", alert["expr"])]
    assert with_range
    assert [alert["alert"] for alert in with_range if "shoal_job_state{" not in alert["expr"]] == []


def test_rules_use_only_metrics_that_exist() -> None:
    known = {metric.name for metric in ALL}
    used = {name for rule in _rules() for name in re.findall(r"\bshoal_\w+", rule["expr"])}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= known
