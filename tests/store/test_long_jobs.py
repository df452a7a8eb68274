"""A job that trains for weeks keeps a bounded number of rows, its curve, and every step and event that is needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import func, select, update

from shoal_service.core.downsampling import AROUND, CHUNK, KEPT_EVENTS, SeriesPoint
from shoal_service.core.events.training import CheckpointDamaged, Validated
from shoal_service.core.sweeps import Measure
from shoal_service.core.where.language import Selection
from shoal_service.reports import PendingEvent
from shoal_service.store import Store, curves, histories, job_lists
from shoal_service.store.curves import Extent, thin_events, thin_steps
from shoal_service.store.database import Transaction, jobs, series, series_rollups, upsert, webhook_cursors
from shoal_service.store.job_lists import FleetQuery
from shoal_service.store.records import load, read_job_num
from shoal_service.store.sweep_jobs import _read_values
from shoal_service.views import CheckpointState, CheckpointView

STEPS = 4 * CHUNK
KEPT = CHUNK // 4
CHANGED, SAVED, NAN, HIGHEST, LOWEST = 5_001, 3_333, 1_234, 2_345, 6_789


def point(step: int) -> SeriesPoint:
    special = {NAN: math.nan, HIGHEST: 99.0, LOWEST: 0.25}
    return SeriesPoint(
        step=step,
        at=10.0 + step,
        loss=special.get(step, 1.0 + (STEPS - step) / STEPS),
        grad_norm=1.0,
        lr=0.1,
        tokens_per_s=100.0,
        step_s=0.1,
        world_size=2,
        generation=1 if step < CHANGED else 2,
        val_loss=0.5 if step % 500 == 0 else None,
    )


pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class LongJob:
    """Stores steps as a report does, with few that stay, and reads what is left of them."""

    store: Store
    id: str
    num: int

    def train(self, first: int, last: int, *, kept_steps: int = KEPT) -> None:
        self.store.writing(_store_steps)(self.num, range(first, last + 1), kept_steps)

    def store_some(self, steps: range) -> None:
        """Without roll-ups."""
        self.store.writing(upsert)(series, [curves.make_row(point(step), job_num=self.num) for step in steps])

    def thin(self, first: int, last: int, *, kept_steps: int = KEPT) -> int:
        """Returns how many chunks are thinned."""
        self.store.writing(thin_steps)(self.num, first_step=first, last_step=last, kept_steps=kept_steps)
        return self.first_steps()[1] // CHUNK

    def steps(self, until: int = STEPS) -> list[int]:
        return [row.step for row in self.store.reading(histories.read_series)(self.id) if row.step <= until]

    def curve(self, max_points: int, **bounds: int) -> list[tuple[int, float]]:
        read = self.store.reading(curves.read_curve)
        return [(row.step, row.loss) for row in read(self.id, max_points=max_points, **bounds)]

    def first_steps(self) -> dict[int, int]:
        """The first step of each level, by its width, and how far the job is thinned as that of width 1."""
        return self.store.reading(_first_steps)(self.num)


def _store_steps(tx: Transaction, num: int, steps: range, kept_steps: int) -> None:
    upsert(tx, series, [curves.make_row(point(step), job_num=num) for step in steps])
    curves.roll_up(tx, [Extent(num, steps[0], steps[-1])], kept_steps=kept_steps)


def _first_steps(tx: Transaction, num: int) -> dict[int, int]:
    rolled = select(series_rollups.c.width, func.min(series_rollups.c.bucket)).where(series_rollups.c.job_num == num)
    firsts = {width: bucket * width for width, bucket in tx.execute(rolled.group_by(series_rollups.c.width))}
    return firsts | {1: tx.execute(select(jobs.c.thinned_until).where(jobs.c.num == num)).scalar_one()}


@pytest.fixture
def attempt(submit: Callable[..., str], begin: Callable[..., Any]) -> Any:
    return begin(submit())


@pytest.fixture
def job(store: Store, attempt: Any) -> LongJob:
    saved = CheckpointView(step=SAVED, url="u", state=CheckpointState.COMMITTED, attempt=1, generation=1)
    attempt.report(checkpoints=(saved,))
    return LongJob(store, attempt.job_id, store.reading(read_job_num)(attempt.job_id))


def test_of_a_long_job_the_steps_stay_that_a_mean_would_hide(job: LongJob) -> None:
    """And every step that a page, a condition, a sweep or a registered model asks for has the value it had."""
    job.train(1, STEPS, kept_steps=STEPS)
    assert len(job.steps()) == STEPS and job.first_steps()[1] == 0, "it is too short to be thinned"
    before = job.curve(40)
    job.train(STEPS - CHUNK + 1, STEPS)
    thinned = STEPS - CHUNK
    assert job.first_steps() == {1: thinned, 8: thinned - CHUNK, **dict.fromkeys((64, 512, 4096), 0)}
    left = set(job.steps())
    assert left >= set(range(thinned + 1, STEPS + 1)), "the newest steps stay"
    around = set(range(CHANGED - AROUND, CHANGED + AROUND))
    needed = {1, SAVED, NAN, HIGHEST, LOWEST} | set(range(500, STEPS, 500)) | around
    assert not needed - left
    assert len(left) < CHUNK + len(needed) + 60
    curve = job.curve(40)
    assert [step for step, _ in curve] == pytest.approx([step for step, _ in before], abs=64), (
        "it is read from roll-ups"
    )
    assert [loss for _, loss in curve] == pytest.approx([loss for _, loss in before], rel=0.05, nan_ok=True)
    selection = Selection.parse("max(loss) == 99 and min(loss) < 0.3 and first(step where loss is nan) == 1234", now=9)
    assert len(job.store.reading(job_lists.page)(FleetQuery(selection=selection)).items) == 1
    values = job.store.reading(_read_values)({job.id: job.num}, 800, Measure.TRAINING)
    assert values == {job.id: pytest.approx(point(800).loss, rel=1e-2)}, "a sweep compares it"
    close = job.curve(500, after_step=LOWEST - 200, until_step=LOWEST + 100)
    assert (LOWEST, 0.25) in close, "a part of the curve has what stayed"
    assert len(close) > 5 and [step for step, _ in close] == sorted({step for step, _ in close})


def test_a_job_that_was_never_thinned_is_thinned_a_few_chunks_at_a_time(job: LongJob) -> None:
    job.store_some(range(1, 10 * CHUNK, 64))
    reached = [job.thin(9 * CHUNK + 1, 10 * CHUNK) for _ in range(4)]
    assert reached == [3, 6, 9, 9], "each transaction is short, and the newest steps stay"
    assert job.thin(10 * CHUNK + 1, 10 * CHUNK + 9, kept_steps=2 * CHUNK) == 9, "what is gone stays gone"


def test_steps_that_are_computed_again_are_thinned_again(job: LongJob) -> None:
    job.store_some(range(1, 4 * CHUNK, 64))
    assert job.thin(3 * CHUNK + 1, 4 * CHUNK) == 3
    again = range(CHUNK + 1, 2 * CHUNK, 64)
    job.store_some(again)
    assert job.thin(again[0], 2 * CHUNK) == 1, "what it trains again is new"
    assert set(job.steps()) >= set(again)
    job.store_some(range(2 * CHUNK + 1, 4 * CHUNK, 64))
    assert job.thin(2 * CHUNK + 1, 4 * CHUNK) == 3 and len(job.steps(2 * CHUNK)) < 2 * CHUNK / 64 / 2


def test_a_job_that_goes_on_from_another_one_is_thinned_from_its_first_step(job: LongJob) -> None:
    job.store_some(range(1000 * CHUNK + 77, 1002 * CHUNK, 64))
    assert job.thin(1001 * CHUNK + 1, 1002 * CHUNK) == 1001
    assert job.steps(10**9)[0] == 1000 * CHUNK + 77


@pytest.mark.parametrize("hook", ["none", "settled", "fails"])
def test_of_old_events_those_of_routine_go_once_webhooks_have_them(
    store: Store, submit: Callable[..., str], begin: Callable[..., Any], hook: str
) -> None:
    hooks = [] if hook == "none" else [{"url": "https://example.org/hook", "secret": "env:SHOAL_WEBHOOK_SECRET_X"}]
    attempt = begin(submit(webhooks=hooks))
    damaged = PendingEvent.of(CheckpointDamaged(name="step-1", message="torn"), 1.0)
    routine = PendingEvent.of(Validated(step=1, loss=1.0, bits_per_byte=None), 1.0)
    attempt.report(events=(damaged, *[routine] * 5_000))
    num = store.reading(read_job_num)(attempt.job_id)
    if hook == "settled":
        store.writing(_settle)(num)
    last = store.reading(load)(attempt.job_id).event_seq
    for before in (last - 600, last - 600, last):  # without a new event that is due, nothing is deleted
        store.writing(thin_events)(num, before=before, last=last, kept_events=1_000)
    left = store.reading(histories.read_events)(attempt.job_id, limit=10_000)
    types = Counter(event.type for event in left)
    assert types["checkpoint.damaged"] == 1 and types["job.created"] == 1, "what is no routine stays"
    assert left[-1].seq == last
    assert types["validation"] == (5_000 if hook == "fails" else 1_000)


def test_reports_of_a_long_job_delete_its_old_events_of_routine(store: Store, attempt: Any) -> None:
    routine = PendingEvent.of(Validated(step=1, loss=1.0, bits_per_byte=None), 1.0)
    for _ in range(5):
        attempt.report(events=(routine,) * (KEPT_EVENTS // 4))
    last = store.reading(load)(attempt.job_id).event_seq
    numbers = [event.seq for event in store.reading(histories.read_events)(attempt.job_id, limit=2 * KEPT_EVENTS)]
    assert KEPT_EVENTS <= len(numbers) < last - 1_000 and numbers[-1] == last


def _settle(tx: Transaction, num: int) -> None:
    tx.execute(update(webhook_cursors).where(webhook_cursors.c.job_num == num).values(seq=10_000))
