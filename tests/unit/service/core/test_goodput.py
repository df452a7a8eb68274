"""The ledger of worker-seconds: what each second counts as, what is booked when, and the sums by interval."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from shoal_service.core import goodput
from shoal_service.core.goodput import Category, Ledger, Period, Window, calendar_edges, edges_of
from shoal_workers.contract.job import IncidentCause

DIED = goodput.recovering(IncidentCause.WORKER_DIED)


def running(**changes: Any) -> Ledger:
    """A group of generation 1 has just formed at step 0, at time 100."""
    ledger = goodput.group_formed(Ledger(at=100.0), generation=1, start_step=0)
    return replace(ledger, **changes)


def train(ledger: Ledger, now: float, *, in_group: int = 4, requested: int = 4) -> Ledger:
    return goodput.account(ledger, Category.PRODUCTIVE, requested=requested, in_group=in_group, now=now)


def settle(ledger: Ledger, step: int, step_s: float = 1.0, *, generation: int = 1, workers: int = 4) -> Ledger:
    return goodput.settle_step(ledger, generation=generation, step=step, step_s=step_s, workers=workers)


def seconds(ledger: Ledger) -> dict[str, float]:
    return {name: amount for name, amount in goodput.show(ledger).seconds.items() if amount}


def test_missing_workers_of_a_running_group_are_degraded() -> None:
    assert seconds(train(running(), 110.0, in_group=3)) == {"productive": 30.0, "degraded": 10.0}


def test_workers_beyond_the_desired_number_do_not_count() -> None:
    assert seconds(train(running(), 110.0, in_group=4, requested=2)) == {"productive": 20.0}


def test_a_clock_that_goes_back_books_no_seconds() -> None:
    ledger = train(running(), 110.0)
    assert train(ledger, 105.0) == ledger


def test_an_incident_takes_what_was_spent_since_the_last_completed_step() -> None:
    ledger = settle(train(running(), 101.0), 1)
    ledger = goodput.discard(train(ledger, 101.5), DIED)
    assert seconds(ledger) == {"productive": 4.0, "recovering": 2.0}
    assert goodput.show(ledger).recovering == {"worker_died": 2.0}


def test_a_step_completed_before_its_group_was_lost_is_productive_even_if_reported_late() -> None:
    lost = goodput.discard(train(running(), 101.5), DIED)
    assert seconds(settle(lost, 1)) == {"productive": 4.0, "recovering": 2.0}


def test_a_step_that_is_done_again_is_recomputed() -> None:
    ledger = settle(settle(train(running(), 102.0), 1), 2)
    again = goodput.group_formed(ledger, generation=2, start_step=1)
    again = settle(train(again, 104.0), 2, generation=2)
    again = settle(again, 3, generation=2)
    assert seconds(again) == {"productive": 12.0, "recomputed": 4.0}


def test_a_repeated_report_changes_nothing() -> None:
    once = settle(train(running(), 102.0), 1)
    assert settle(once, 1) == once
    assert settle(once, 5, generation=0) == once


def test_steps_never_settle_more_than_was_booked() -> None:
    assert seconds(settle(train(running(max_step=9), 101.0), 1, step_s=50.0)) == {"recomputed": 4.0}


def test_the_stall_of_a_checkpoint_is_that_of_the_slowest_rank() -> None:
    ledger = train(settle(train(running(), 110.0), 1, step_s=10.0), 112.0)
    for rank_stall_s in (0.2, 0.5, 0.3):
        ledger = goodput.checkpoint_stalled(ledger, step=1, stall_s=rank_stall_s, workers=4)
    assert seconds(ledger) == {"productive": pytest.approx(46.0), "checkpoint_stall": pytest.approx(2.0)}
    ledger = goodput.checkpoint_stalled(settle(ledger, 2, step_s=2.0), step=1, stall_s=1.0, workers=4)
    assert seconds(ledger) == {"productive": pytest.approx(44.0), "checkpoint_stall": pytest.approx(4.0)}
    assert goodput.checkpoint_stalled(ledger, step=0, stall_s=9.0, workers=4) == ledger


def test_a_stall_that_is_part_of_a_discarded_step_is_not_taken_twice() -> None:
    ledger = settle(train(running(), 101.0), 1)
    ledger = goodput.discard(train(ledger, 103.0), Category.CHECKPOINT_STALL)
    ledger = goodput.checkpoint_stalled(ledger, step=1, stall_s=2.0, workers=4)
    assert seconds(ledger) == {"productive": 4.0, "checkpoint_stall": 8.0}


def test_each_step_pays_its_share_of_a_snapshot() -> None:
    ledger = goodput.snapshots_cost(running(), copy_s=0.4, every_steps=4)
    assert seconds(settle(train(ledger, 101.0), 1)) == {
        "productive": pytest.approx(3.6),
        "checkpoint_stall": pytest.approx(0.4),
    }


def test_a_verdict_takes_over_what_the_suspicion_has_cost() -> None:
    broken, stuck = IncidentCause.COLLECTIVE_FAILED, IncidentCause.STUCK
    earlier = running(booked={goodput.recovering(broken): 100.0})
    ledger = goodput.discard(train(earlier, 101.0), goodput.recovering(broken))
    ledger = goodput.account(ledger, goodput.recovering(broken), requested=4, now=102.0)
    ledger = goodput.rename_incident(ledger, broken, stuck)
    assert goodput.show(ledger).recovering == {"collective_failed": 100.0, "stuck": 8.0}
    late = settle(ledger, 1)
    assert goodput.show(late).recovering == {"collective_failed": 100.0, "stuck": 4.0}
    assert late.incident == 4.0


def test_what_was_shown_can_be_continued() -> None:
    ledger = goodput.discard(train(running(max_step=7), 101.0), DIED)
    shown = goodput.show(ledger)
    resumed = goodput.resume(shown, at=999.0)
    assert goodput.show(resumed) == shown
    assert (resumed.at, resumed.max_step) == (101.0, 7)
    assert goodput.resume(None, at=5.0) == Ledger(at=5.0)


def test_goodput_is_the_productive_share_and_none_before_the_first_booking() -> None:
    assert goodput.show(Ledger()).ratio is None
    assert goodput.show(train(running(), 110.0, in_group=3)).ratio == 0.75
    assert list(goodput.show(Ledger()).seconds) == [category.value for category in Category]


ACCOUNTS = [*(str(c) for c in Category if c is not Category.RECOVERING), *map(goodput.recovering, IncidentCause)]
amounts = st.floats(0, 1e4)
causes = st.sampled_from(IncidentCause)
workers = st.integers(0, 1000)
steps = st.integers(0, 20)
happenings = st.one_of(
    st.tuples(st.just("account"), st.sampled_from(ACCOUNTS), workers, workers, amounts),
    st.tuples(st.just("settle"), st.integers(0, 2), steps, amounts, workers),
    st.tuples(st.just("formed"), st.integers(0, 2), steps),
    st.tuples(st.just("discard"), st.sampled_from(ACCOUNTS)),
    st.tuples(st.just("stall"), steps, amounts, workers),
    st.tuples(st.just("snapshots"), amounts, steps),
    st.tuples(st.just("rename"), causes, causes),
    st.tuples(st.just("close")),
    st.tuples(st.just("hand over")),
)


@given(st.lists(happenings, max_size=60))
def test_the_sum_is_the_integral_of_the_desired_workers_under_all_events(life: list[tuple[Any, ...]]) -> None:
    ledger, now, integral = Ledger(at=1.7e9), 1.7e9, 0.0
    for what, *how in life:
        match what:
            case "account":
                under, requested, in_group, elapsed_s = how
                integral += requested * ((now + elapsed_s) - now)
                now += elapsed_s
                ledger = goodput.account(ledger, under, requested=requested, in_group=in_group, now=now)
            case "settle":
                ledger = settle(ledger, how[1], how[2], generation=how[0], workers=how[3])
            case "formed":
                ledger = goodput.group_formed(ledger, generation=how[0], start_step=how[1])
            case "discard":
                ledger = goodput.discard(ledger, how[0])
            case "stall":
                ledger = goodput.checkpoint_stalled(ledger, step=how[0], stall_s=how[1], workers=how[2])
            case "snapshots":
                ledger = goodput.snapshots_cost(ledger, copy_s=how[0], every_steps=how[1])
            case "rename":
                ledger = goodput.rename_incident(ledger, *how)
            case "close":
                ledger = goodput.close_incident(ledger)
            case "hand over":
                ledger = goodput.resume(goodput.show(ledger), at=now)
        assert min(ledger.booked.values(), default=0.0) >= 0.0
        assert ledger.unsettled >= 0.0 and ledger.incident >= 0.0
    shown = goodput.show(ledger)
    assert math.isclose(shown.total, integral, rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(sum(shown.seconds.values()), shown.total, rel_tol=1e-9)
    journal = TypeAdapter(Ledger)
    assert journal.validate_json(journal.dump_json(ledger)) == ledger


def test_what_was_spent_before_the_window_does_not_count() -> None:
    window = Window(edges_of(100.0, 200.0, 2))
    window.add([(0.0, {}), (100.0, {"productive": 50.0}), (200.0, {"productive": 90.0, "queued": 10.0})])
    assert window.by_account == {"productive": [20.0, 20.0], "queued": [5.0, 5.0]}
    assert window.totals() == {"productive": 40.0, "queued": 10.0}


def test_accounts_grow_evenly_between_samples_and_stop_at_the_last_one() -> None:
    window = Window([0.0, 10.0, 20.0, 30.0])
    window.add([(5.0, {}), (15.0, {"queued": 10.0})])
    assert window.by_account["queued"] == pytest.approx([5.0, 5.0, 0.0])


def test_jobs_add_up_and_a_job_without_samples_adds_nothing() -> None:
    window = Window([0.0, 10.0])
    window.add([])
    for _ in range(2):
        window.add([(0.0, {}), (10.0, {"productive": 4.0})])
    assert window.totals() == {"productive": 8.0}


def test_seconds_that_turn_out_to_be_lost_count_where_they_are_in_the_end() -> None:
    window = Window([0.0, 10.0, 20.0])
    window.add([(0.0, {}), (10.0, {"productive": 10.0}), (20.0, {"productive": 8.0, "recomputed": 6.0})])
    assert window.by_account == {"productive": [10.0, 0.0], "recomputed": [0.0, 6.0]}


def test_the_last_edge_is_the_end_of_the_window() -> None:
    edges = edges_of(0.1, 0.7, 7)
    assert (edges[0], edges[-1], len(edges)) == (0.1, 0.7, 8)


def test_weeks_begin_on_monday_and_months_on_the_first() -> None:
    thursday = datetime(2026, 1, 15, 13, 30, tzinfo=UTC).timestamp()

    def days(by: Period, number: int) -> list[str]:
        return [datetime.fromtimestamp(edge, UTC).isoformat()[:16] for edge in calendar_edges(thursday, by, number)]

    assert days(Period.WEEK, 2) == ["2026-01-05T00:00", "2026-01-12T00:00", "2026-01-15T13:30"]
    assert days(Period.MONTH, 3) == ["2025-11-01T00:00", "2025-12-01T00:00", "2026-01-01T00:00", "2026-01-15T13:30"]
