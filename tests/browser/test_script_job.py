"""The page of a job that runs a script: its command, and what it has not reported."""

from __future__ import annotations

import pytest

from kit.processes.chromium import Browser
from kit.worlds.written_service import AT, RUNNING, Service, point
from shoal_service.views import JobView
from shoal_workers.contract.checks.spec_errors import parse_spec

SCRIPT = {
    "name": "mine",
    "script": {"file": "train.py", "args": ["--note", "it's <b>", "--lr", "3e-4"]},
    "elasticity": {"min_workers": 2, "max_workers": 4},
}
SILENT = RUNNING.model_copy(
    update={"step": 0, "layout": "", "incidents": 1}
    | dict.fromkeys(("total_steps", "loss", "tokens_per_s", "tokens", "eta_s", "num_parameters"))
)
FACTS = """Object.fromEntries([...document.querySelectorAll("#vital div, #facts div")].map(
    (one) => [...one.children].map((part) => part.textContent)))"""
ACTIONS = "[...document.querySelectorAll('#actions button')].map((one) => one.dataset.action)"
TITLES = """Object.entries(document.querySelector("#curves").layout ?? {}).filter(
    ([name]) => name.startsWith("yaxis")).map(([, axis]) => axis.title.text)"""


@pytest.fixture
def script(written: Service) -> JobView:
    return written.submit(parse_spec(SCRIPT))


def test_a_script_shows_its_command_and_what_it_does_not_report(
    reader: Browser, written: Service, script: JobView
) -> None:
    written.begin(script)
    written.report(script, SILENT)
    reader.open(f"{written.url}/jobs/{script.id}")
    reader.sees("#facts", "Command")
    facts = reader.run(FACTS)
    assert facts["Command"] == """train.py --note 'it'"'"'s <b>' --lr 3e-4"""
    assert [facts[name] for name in ("Step", "Loss", "Tokens/s", "Remaining")] == ["not reported"] * 4
    assert facts["Incidents"] == "1, lost steps not reported"
    assert "relayout" not in reader.run(ACTIONS) and "profile" not in reader.run(ACTIONS)
    reader.click('[data-action="pause"]')
    reader.sees("#dialog-words", "gets SIGTERM, and SIGKILL 10 s later")
    reader.click("#dismiss")
    reader.click("#tab-spec")
    reader.sees("#spec", "script:")
    assert "model:" not in reader.text("#spec"), "a script's spec has no keys of tasks"
    assert reader.complaints() == []


def test_a_script_that_reports_its_loss_only_has_curves_that_say_so(
    reader: Browser, written: Service, script: JobView
) -> None:
    silent = {name: float("nan") for name in ("grad_norm", "lr", "tokens_per_s")}
    series = tuple(point(step, 5.0 - step / 10).model_copy(update=silent) for step in range(1, 11))
    written.begin(script)
    written.report(script, SILENT.model_copy(update={"step": 10, "loss": 4.0, "step_at": AT}), series=series)
    reader.open(f"{written.url}/jobs/{script.id}#tab=curves")
    reader.until(lambda: "loss" in (reader.run(TITLES) or []), "the curves")
    rows = ("tokens/s", "gradient norm", "learning rate")
    assert {f"{row}<br>not reported" for row in rows} <= set(reader.run(TITLES))
    facts = reader.run(FACTS)
    assert (facts["Step"], facts["Loss"], facts["Tokens/s"]) == ("10", "4", "not reported")
    assert reader.complaints() == []
