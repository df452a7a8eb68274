"""Tables for terminals of any width, and the page of a job."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from kit.worlds.written_service import SPEC
from shoal_api.cli.render.fleet import rows_that_fit, top_page
from shoal_api.cli.render.jobs import job_page, jobs_table
from shoal_api.cli.render.queue import queue_page
from shoal_api.cli.render.terminal import new_table
from shoal_service.fleet_views import ClusterView, QueuedJob, QueueView
from shoal_service.views import JobStatus, JobSummary, JobView, QueuePlace
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState, UserFailure

NOW = 1_700_000_000.0
ID = "job-0123456789ab"
REASON = (
    "needs 4 workers of 2 CPUs each; 3 CPUs are free on 10.0.0.7 and 1 on 10.0.0.8. Jobs of priority 50 hold the rest; "
    "a smaller elasticity.min_workers would start at once"
)
SUMMARY = JobSummary(
    id=ID,
    name="language-model-pretraining",
    state=JobState.RUNNING,
    step=123_456,
    total_steps=200_000,
    loss=2.5,
    tokens_per_s=1_234_567.0,
    eta_s=4_000.0,
    workers=3,
    desired_workers=4,
    project="speech-recognition",
    user="ada.lovelace",
    note=REASON,
    created_at=NOW - 100,
    updated_at=NOW,
)
QUEUE = QueueView(
    items=(
        QueuedJob(
            job_id=ID,
            name="language-model-pretraining",
            project="speech-recognition",
            user="ada.lovelace",
            priority=10,
            submitted_at=NOW - 100,
            place=QueuePlace(position=1, reason=REASON, decided_at=NOW),
        ),
    ),
    num_queued=1,
    projects=(),
)
CLUSTER = ClusterView(
    connected=True,
    address="",
    nodes=(),
    cpus_total=4.0,
    cpus_free=0.0,
    gpus_total=0.0,
    gpus_free=0.0,
    owner="",
    epoch=1,
)


def _shown(width: int, *parts: Any) -> list[str]:
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_queue_and_top_are_readable_at_any_width(width: int) -> None:
    for page in (queue_page(QUEUE, NOW), [top_page([SUMMARY], CLUSTER, NOW)], [jobs_table([SUMMARY], NOW)]):
        lines = _shown(width, *page)
        assert max(len(line.rstrip()) for line in lines) <= width
        assert any(ID in line for line in lines), "the id is whole"
        assert len(lines) < 16, "nothing is squeezed into a column of a few letters"
    words = " ".join(" ".join(_shown(width, *queue_page(QUEUE, NOW))).split())
    assert REASON in words and "ada.lovelace" in words


def test_what_does_not_fit_stands_under_its_row_with_its_name() -> None:
    table = new_table("id", ">step", "where", "why")
    table.add_row("a", "10", "-", "b" * 30)
    assert _shown(60, table)[0].split() == ["id", "step", "where", "why"]
    narrow = [line.split() for line in _shown(30, table)]
    assert narrow[:2] == [["id", "step", "where"], ["a", "10", "-"]] and narrow[2][0] == "why"
    assert not any("where -" in line for line in _shown(12, table)), "what is not known is left out"


def test_a_narrow_screen_has_room_for_fewer_jobs() -> None:
    assert rows_that_fit(200, 30) > rows_that_fit(80, 30) >= 1 and rows_that_fit(80, 3) == 1


@pytest.mark.parametrize(("ranks", "words"), [((), "step 4"), ((2,), "step 4, rank 2"), ((0, 2), "step 4, ranks 0, 2")])
def test_a_failure_names_its_ranks_if_it_has_some(ranks: tuple[int, ...], words: str) -> None:
    failure = UserFailure(type="ValueError", message="no", traceback="", phase="forward", ranks=ranks, step=4)
    [line] = [line for line in _shown(80, job_page(_job(failure=failure), (), NOW)) if "in forward" in line]
    assert line.split("in forward, ")[1].strip() == words


@pytest.mark.parametrize(("tokens", "unit"), [(320, "samples/s"), (320 * 128, "tokens/s")])
def test_a_task_without_tokens_trains_on_samples(tokens: int, unit: str) -> None:
    page = " ".join(_shown(80, job_page(_job(step=10, tokens=tokens, tokens_per_s=5.0), (), NOW)))
    assert unit in page


def _job(**status: Any) -> JobView:
    return JobView(
        id=ID,
        name="byte-lm",
        spec=parse_spec(SPEC),
        spec_version=1,
        etag="1",
        created_at=NOW,
        updated_at=NOW,
        status=JobStatus(state=JobState.FAILED, **status),
    )
