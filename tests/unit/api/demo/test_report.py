"""The demo: its spec, its checks, its report and its plot."""

import io
import json
import math
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from kit.views import series_point
from shoal_api.demo.report import (
    DemoOutcome,
    Run,
    compute_tokens_per_s,
    find_failed_checks,
    find_world_sizes,
    is_subsequence,
    read_losses,
    render_report,
)
from shoal_api.demo.show import DEMO_SPEC, KILL_AT_STEP, KILL_RANK, WORKERS, Scenario, make_script
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events.base import Severity
from shoal_service.core.parity import compare
from shoal_service.views import EventView, IncidentView
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState


def series(*sizes: int) -> tuple[SeriesPoint, ...]:
    return tuple(series_point(step, loss=5 / step, lr=1, world_size=size) for step, size in enumerate(sizes, start=1))


def shown(incident: IncidentView, broken: tuple[str, ...] = ()) -> str:
    disturbed = Run("job-a", series(4, 4, 3, 3, 4), 2.5, 1000.0, 60.0, "/tmp/checkpoints")
    undisturbed = Run("job-b", series(4, 4, 4, 4, 4), 2.5, None, None, "none")
    outcome = DemoOutcome(
        state=JobState.SUCCEEDED,
        steps=5,
        world_sizes=(4, 3, 4),
        layouts=("pp2", "fsdp3", "pp2"),
        survivors=(11, 12, 13),
        incidents=(incident,),
        comparison=compare(read_losses(disturbed), read_losses(undisturbed), tolerance=1e-4),
        val_bits_per_byte=2.5,
        tokens_per_s=1000.0,
    )
    console = Console(file=io.StringIO(), width=120)
    for part in render_report(outcome, disturbed, undisturbed, broken, url="http://x", tolerance=1e-4):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_report_has_the_incident_the_sizes_and_the_verdict(incident: IncidentView) -> None:
    text = shown(incident)
    for words in (
        "4 -> 3 -> 4",
        "worker_died, rank 2",
        "30 ms",
        "the same model",
        "/v1/jobs/job-b",
        "/tmp/checkpoints",
    ):
        assert words in text


def test_the_report_shows_failed_checks(incident: IncidentView) -> None:
    text = shown(incident, ("the losses differ by 0.5",))
    assert "✗ the losses differ by 0.5" in text
    assert "the same model" not in text


def point(step: int, loss: float, at: float | None = None) -> SeriesPoint:
    return series_point(step, at=step if at is None else at, loss=loss, lr=1, world_size=4)


def event(seq: int, type_: str, data: dict[str, int]) -> EventView:
    return EventView(seq=seq, at=0, type=type_, severity=Severity.INFO, message="", data=data)


def formed(seq: int, workers: int) -> EventView:
    return event(seq, "generation.formed", {"workers": workers, "generation": seq})


def outcome(incident: IncidentView, **changes: object) -> DemoOutcome:
    values: dict[str, object] = {
        "state": JobState.SUCCEEDED,
        "steps": 2,
        "world_sizes": (4, 3, 4),
        "layouts": ("pp2 x tp2", "fsdp3", "pp2 x tp2"),
        "survivors": (11, 12, 13),
        "incidents": (incident,),
        "comparison": compare([(1, 1.0), (2, 0.5)], [(1, 1.0), (2, 0.5)], tolerance=1e-4),
        "val_bits_per_byte": 2.5,
        "tokens_per_s": 100.0,
    }
    return DemoOutcome(**{**values, **changes})  # type: ignore[arg-type]


def test_world_sizes_are_one_entry_per_change_in_the_order_of_the_events() -> None:
    events = [formed(1, 4), formed(5, 4), formed(3, 3), formed(2, 4), event(4, "job.state", {})]
    assert find_world_sizes(events) == (4, 3, 4)


def test_a_subsequence_may_have_gaps_but_keeps_its_order() -> None:
    assert is_subsequence((4, 3, 2, 3, 4), (4, 3, 4))
    assert not is_subsequence((3, 4), (4, 3, 4))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([(1, 1.0), (2, 0.25)], "the losses differ by 0.25 at step 2"),
        ([(1, 1.0), (2, math.nan)], "the losses differ by inf at step 2"),
        ([(1, 1.0)], "only one of the runs has 1 step"),
        ([(3, 1.0)], "the two runs have no step in common"),
    ],
)
def test_other_losses_fail_the_demo(incident: IncidentView, other: list[tuple[int, float]], message: str) -> None:
    compared = compare([(1, 1.0), (2, 0.5)], other, tolerance=1e-4)
    failed = outcome(incident, comparison=compared)
    assert any(message in line for line in find_failed_checks(failed, workers=4, tolerance=1e-4))
    json.dumps(failed.document(), allow_nan=False)


def test_a_run_that_meets_every_check_passes(incident: IncidentView) -> None:
    assert find_failed_checks(outcome(incident), workers=4, tolerance=1e-4) == ()


def test_each_deviation_fails_one_check(incident: IncidentView) -> None:
    for change in ({"state": JobState.FAILED}, {"world_sizes": (4,)}, {"incidents": ()}):
        assert len(find_failed_checks(outcome(incident, **change), workers=4, tolerance=1e-4)) == 1


def test_the_json_document_has_the_documented_keys_on_one_line(incident: IncidentView) -> None:
    document = outcome(incident).document()
    assert list(document) == [
        "state",
        "steps",
        "world_sizes",
        "layouts",
        "surviving_pids",
        "incidents",
        "max_abs_loss_diff",
        "val_bits_per_byte",
        "tokens_per_s",
    ]
    assert list(document["incidents"][0]) == [
        "cause",
        "detect_s",
        "recovery_s",
        "steps_lost",
        "from_workers",
        "to_workers",
    ]
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_throughput_counts_from_the_first_step_to_the_last() -> None:
    assert compute_tokens_per_s([point(1, 1.0, at=10), point(3, 1.0, at=12)], 50) == 50.0
    assert compute_tokens_per_s([point(1, 1.0)], 50) is None


EXAMPLE = Path(__file__).parents[4] / "examples" / "byte-lm.yaml"


def test_the_demo_is_the_example_with_more_checkpoints() -> None:
    example = yaml.safe_load(EXAMPLE.read_text())
    assert {**example, "checkpoint": None} == {**DEMO_SPEC, "checkpoint": None}
    assert DEMO_SPEC["checkpoint"]["every_steps"] < example["checkpoint"]["every_steps"]


def test_the_demo_spec_is_accepted_and_the_kill_is_within_the_run() -> None:
    spec = parse_spec(DEMO_SPEC)
    assert spec.stop.steps is not None
    assert spec.checkpoint.every_steps is not None
    assert spec.checkpoint.every_steps < KILL_AT_STEP < spec.stop.steps // 2
    assert 0 < KILL_RANK < WORKERS - 1


def test_the_number_of_steps_can_be_given_and_more_of_them_change_no_learning_rate() -> None:
    spec = make_script(Scenario.RELAYOUT, 60).spec
    assert spec["stop"] == {"steps": 60}
    assert parse_spec(spec).schedule.steps == 60
