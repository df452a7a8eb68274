"""The report and its plot."""

import io

from rich.console import Console

from shoal_api.demo.outcome import DemoOutcome, compare_losses
from shoal_api.demo.report import Run, plot_losses, report, sizes_by_step
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.views import IncidentView
from shoal_workers.contract.job import JobState

CURVE = {step: 5.0 - step / 10 for step in range(1, 41)}


def series(*sizes: int) -> tuple[SeriesPoint, ...]:
    return tuple(
        SeriesPoint(
            step=step,
            at=step,
            loss=5 / step,
            grad_norm=1,
            lr=1,
            tokens_per_s=1,
            step_s=1,
            world_size=size,
            generation=1,
        )
        for step, size in enumerate(sizes, start=1)
    )


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
        comparison=compare_losses(disturbed.series, undisturbed.series),
        val_bits_per_byte=2.5,
        tokens_per_s=1000.0,
    )
    console = Console(file=io.StringIO(), width=120)
    for part in report(outcome, disturbed, undisturbed, broken, url="http://x", tolerance=1e-4):
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


def test_shrinking_and_growing_are_marked(incident: IncidentView) -> None:
    assert sizes_by_step(series(4, 4, 3, 4)) == (4, 3, 4)
    axis = next(line for line in shown(incident).splitlines() if "└" in line)
    assert axis.index("✗") < axis.index("↑")


def test_equal_runs_are_one_curve() -> None:
    text = "\n".join(plot_losses(CURVE, CURVE, marks={}, width=40, height=10))
    assert "●" in text
    assert "▲" not in text
    assert "▽" not in text


def test_unequal_runs_show_the_points_of_each_run() -> None:
    other = {step: loss + (1.0 if step > 20 else 0.0) for step, loss in CURVE.items()}
    text = "\n".join(plot_losses(CURVE, other, marks={}, width=40, height=10))
    assert all(glyph in text for glyph in "●▲▽")


def test_marks_are_drawn_on_the_axis() -> None:
    assert plot_losses(CURVE, CURVE, marks={20: "✗", 99: "!"}, width=40, height=10)[-2].count("✗") == 1


def test_without_points_there_are_no_lines() -> None:
    assert plot_losses({}, {1: float("nan")}, marks={}, width=40, height=10) == []
    assert plot_losses({1: 2.0}, {}, marks={}, width=40, height=10)
