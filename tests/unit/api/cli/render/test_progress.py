"""The panel of a followed job, and its events in words."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from shoal_api.cli.render.progress import describe_activity, find_style, job_panel, narrate, progress_line
from shoal_api.cli.session import STYLES
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events.base import Severity
from shoal_service.core.goodput import Goodput
from shoal_service.views import EventView, JobStatus, JobView
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState

SPEC = parse_spec({"name": "byte-lm", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}})
CLOSED = EventView(
    seq=9, at=5.0, type="incident.closed", severity=Severity.SUCCESS, message="incident worker_died closed: 4 -> 3"
)


def job(**status: Any) -> JobView:
    known: dict[str, Any] = {"state": JobState.RUNNING, "step": 40, "total_steps": 100, "loss": 2.5, "workers": 3}
    return JobView(
        id="job-1",
        name="byte-lm",
        spec=SPEC,
        spec_version=1,
        etag="e",
        created_at=0,
        updated_at=0,
        status=JobStatus(**(known | {"desired_workers": 4} | status)),
    )


def point(step: int, **values: Any) -> SeriesPoint:
    known: dict[str, Any] = {"at": 0, "grad_norm": 1, "lr": 1, "step_s": 1, "generation": 1, "val_loss": None}
    return SeriesPoint(step=step, loss=9 - step, tokens_per_s=step, world_size=4 if step < 5 else 3, **known | values)


def text_of(*arguments: Any) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(job_panel(*arguments))
    return console.export_text()


def test_the_panel_shows_progress_curves_world_size_and_the_last_incident() -> None:
    running = job(incidents=2, steps_lost=3, goodput=Goodput(ratio=0.912), layout="fsdp3", val_loss=2.25)
    shown = text_of(running, [point(step, val_loss=3.0 if step == 4 else None) for step in range(1, 9)], CLOSED)
    for part in ("byte-lm", "RUNNING", "step 40/100", "2.5000", "2.2500", "■■■□ 3/4", "fsdp3", "goodput 91.2%"):
        assert part in shown
    assert "█▇▆▅▄▃▂▁" in shown  # the loss
    assert "████▁▁▁▁" in shown  # the world size
    assert "2 incidents, 3 steps lost; last:" in shown and "incident worker_died closed: 4 -> 3" in shown


def test_some_metrics_of_the_task_have_a_curve() -> None:
    own = dict.fromkeys(("a", "b", "c", "d", "left_out"), 0.5)
    shown = text_of(job(metrics=own), [point(step, metrics={"a": step}) for step in range(1, 9)])
    (line,) = [line for line in shown.splitlines() if " a " in line]
    assert "0.5" in line and "▁▂▃▄▅▆▇█" in line
    assert "left_out" not in shown


def test_the_line_and_the_panel_say_what_a_script_has_not_reported() -> None:
    script = parse_spec({"name": "mine", "script": {"file": "train.py"}})
    nothing = {"step": 0, "total_steps": None, "loss": None, "generation": 1, "incidents": 1}
    silent = job(**nothing).model_copy(update={"spec": script})
    assert progress_line(silent) == "RUNNING step not reported, 3/4 workers"
    before = {"generation": 0, "incidents": 0, "state": JobState.STARTING}
    starting = job(**{**nothing, **before}).model_copy(update={"spec": script})
    assert progress_line(starting) == "STARTING, 3/4 workers" and "step" not in text_of(starting, [])
    shown = text_of(silent, [])
    assert "step not reported" in shown and "1 incident, lost steps not reported" in shown
    for name in ("loss", "tokens/s"):
        assert re.search(rf"\b{name} +not reported", shown), name
    reports = job(**{**nothing, "step": 7, "loss": 2.5, "step_at": 1.0}).model_copy(update={"spec": script})
    assert progress_line(reports) == "RUNNING step 7, loss 2.5000, 3/4 workers"


def test_a_job_without_incidents_names_none() -> None:
    assert "incident" not in text_of(job(), [])


def test_what_a_job_does_beside_its_steps_is_named_once() -> None:
    note, message = "tokenising 45 % (1 of 2 MiB)", "0 of 2 workers ready; waiting for capacity"
    starting = job(state=JobState.STARTING, note=note, message=message)
    assert describe_activity(starting) == (note, message)
    assert note in text_of(starting, []) and message in text_of(starting, [])
    assert describe_activity(job(note="same", message="same")) == ("same",)


def event(message: str, severity: Severity = Severity.INFO) -> EventView:
    return EventView(seq=1, at=0, type="moon.risen", severity=severity, message=message)


def test_an_event_is_shown_in_the_words_of_the_server() -> None:
    assert narrate(event("the moon has risen")) == "the moon has risen"


def test_control_characters_never_reach_the_terminal() -> None:
    assert narrate(event("worker a\x1b[31m\nb lost")) == "worker a [31m b lost"


@pytest.mark.parametrize("severity", Severity)
def test_every_severity_has_a_style(severity: Severity) -> None:
    assert find_style(event("", severity)) in STYLES
