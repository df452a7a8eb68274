"""Whose turn it is: deadlines, limits that fall, guarantees, jobs that have waited for long, and long queues."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kit.market import NOW, carried_out, grants, job, market, nodes, reasons
from shoal_service.core.scheduling.admission import LATER, LONG_QUEUE, MOST_STARTS, RECLAIM_AFTER_S
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import (
    AGED_AFTER_S,
    MarketJob,
    MarketState,
    Project,
    Start,
    ThroughputCurve,
    Wait,
)

HOUR_S = 3600.0
LINEAR = ThroughputCurve((1, 2, 4), (10.0, 20.0, 40.0))


def after(state: MarketState, now: float = NOW) -> dict[str, int]:
    return grants(carried_out(state, decide(state, now), now))


def of_hours(name: str, hours: float, **fields: object) -> MarketJob:
    """One worker needs so long."""
    return job(name, 1, 1, curve=LINEAR, left=10.0 * HOUR_S * hours, **fields)


@pytest.mark.parametrize(("due_in_s", "first"), [(1.0, "waits"), (-5.0, "waits"), (10 * HOUR_S + 60, "due")])
def test_only_a_deadline_that_can_be_made_is_a_reason_to_go_first(due_in_s: float, first: str) -> None:
    waits = of_hours("waits", 1, submitted_at=NOW - 60)
    due = of_hours("due", 10, finish_by=NOW + due_in_s)
    assert after(market([waits, due], nodes(1))) == {first: 1}


def test_a_deadline_that_was_missed_in_the_queue_no_longer_counts() -> None:
    """It could be made at its submission, before the other job came."""
    other = of_hours("other", 1, submitted_at=NOW - 2 * HOUR_S - 60)
    due = of_hours("due", 10, submitted_at=NOW - 2 * HOUR_S, finish_by=NOW + 8 * HOUR_S + 60)
    assert after(market([other, due], nodes(1)), NOW - 2 * HOUR_S) == {"due": 1}
    assert after(market([other, due], nodes(1))) == {"other": 1}


def test_a_deadline_is_judged_by_the_best_size_and_not_by_the_largest() -> None:
    dips = ThroughputCurve((1, 2, 4), (10.0, 20.0, 5.0))
    waits = of_hours("waits", 1, submitted_at=NOW - 60)
    due = job("due", 1, 4, curve=dips, left=20.0 * HOUR_S, finish_by=NOW + HOUR_S + 60)
    assert after(market([waits, due], nodes(1))) == {"due": 1}


@pytest.mark.parametrize("known", ["urgent", "low", "both", ""])
def test_a_limit_that_falls_preempts_the_lowest_priority_wherever_its_workers_are(known: str) -> None:
    jobs = [job("urgent", 2, 2, granted=2, priority=50, project="p"), job("low", 2, 2, granted=2, project="p")]
    placed = [replace(one, on_nodes={"node-0000": 2}) if known in (one.job_id, "both") else one for one in jobs]
    state = market(placed, nodes(4), Project(name="p", limit=2))
    assert after(state) == {"urgent": 2}
    assert list(reasons(decide(state, NOW))) == ["low"]


def borrowed(*, waits_s: float = RECLAIM_AFTER_S, **fields: object) -> MarketState:
    """Two rigid jobs of a project without guarantee hold the cluster; the other project is guaranteed half of it."""
    jobs = [job("first", 2, 2, granted=2, project="a", submitted_at=NOW - HOUR_S)]
    jobs += [job("second", 2, 2, granted=2, project="a", submitted_at=NOW - HOUR_S / 2)]
    owner = job("owner", 2, 2, project="b", submitted_at=NOW - waits_s, **fields)
    return market([*jobs, owner], nodes(4), Project(name="a"), Project(name="b", guaranteed=2))


def test_what_is_guaranteed_is_taken_back_from_rigid_borrowers_of_equal_priority_after_a_grace() -> None:
    assert after(borrowed(waits_s=RECLAIM_AFTER_S - 1)) == {"first": 2, "second": 2}
    assert after(borrowed()) == {"first": 2, "owner": 2}
    assert reasons(decide(borrowed(), NOW)) == {
        "second": "Preempted for owner, which needs 2 workers of the 2 that are guaranteed to project b. It saves and "
        "returns to the queue; no step is lost.",
        "owner": "Starting with 2 workers (1 CPU each); preempts second for what is guaranteed to project b.",
    }


def test_what_was_taken_back_stays_and_its_borrower_waits() -> None:
    state = carried_out(borrowed(), decide(borrowed(), NOW))
    assert after(state, NOW + 10 * RECLAIM_AFTER_S) == {"first": 2, "owner": 2}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"priority": -1}, "a borrower of higher priority keeps its minimum"),
        ({"min_workers": 3, "max_workers": 3}, "the claim exceeds the guarantee"),
        ({"project": "c"}, "nothing is guaranteed to its project"),
        ({"moved_at": NOW - 1}, "it was preempted a moment ago"),
    ],
)
def test_borrowers_of_equal_priority_keep_their_minimum(change: dict[str, object], why: str) -> None:
    state = borrowed()
    jobs = [replace(one, **change) if one.job_id == "owner" else one for one in state.jobs]  # type: ignore[arg-type]
    assert after(replace(state, jobs=jobs)) == {"first": 2, "second": 2}, why


def test_nobody_is_preempted_for_its_own_project_or_below_what_is_guaranteed_to_its_own() -> None:
    state = borrowed()
    own = [replace(one, project="b") for one in state.jobs]
    assert after(replace(state, jobs=own)) == {"first": 2, "second": 2}
    both = {**state.projects, "a": Project(name="a", guaranteed=4)}
    assert after(replace(state, projects=both)) == {"first": 2, "second": 2}


def test_what_a_job_of_one_project_may_not_displace_a_job_of_another_one_may() -> None:
    """What is guaranteed to `lab` protects its job from others, and not from its own jobs."""
    held = job("held", 2, 2, granted=2, project="lab")
    outside = job("outside", 2, 2, priority=50, project="other")
    inside = job("inside", 2, 2, priority=50, project="lab", left=1.0)
    state = market([held, outside, inside], nodes(2), Project(name="lab", guaranteed=2), Project(name="other"))
    assert after(state) == {"inside": 2}
    assert after(replace(state, jobs=[held, outside])) == {"held": 2}


def test_a_sub_project_takes_what_is_guaranteed_to_it_back_from_its_sibling() -> None:
    tree = [Project(name="lab", guaranteed=4), Project(name="a", parent="lab")]
    state = borrowed()
    lab = market(state.jobs, state.nodes, *tree, Project(name="b", parent="lab", guaranteed=2))
    assert after(lab) == {"first": 2, "owner": 2}


def played(state: MarketState, arriving: Callable[[float], list[MarketJob]], hours: int) -> dict[str, list[int]]:
    """The workers of each job in each hour, while others arrive; those that were trained to their end are gone."""
    alive, found = list(state.jobs), defaultdict[str, list[int]](list)
    for hour in range(hours):
        now = NOW + hour * HOUR_S
        state = replace(state, jobs=[*alive, *arriving(now)])
        state = carried_out(state, decide(state, now), now)
        for name, workers in grants(state).items():
            found[name] += [hour] * (workers > 0)
        alive = [
            replace(one, left=left, served_s=one.served_s + one.granted * HOUR_S)
            for one in state.jobs
            if (left := (one.left or 0) - one.curve.rate(one.granted) * HOUR_S) > 0
        ]
    return found


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    priority=st.integers(1, 1000),
    least=st.integers(1, 4),
    hours=st.integers(1, 9),
    num_low=st.integers(1, 3),
    has_projects=st.booleans(),
)
def test_no_job_starves_while_jobs_of_higher_priority_keep_arriving(
    priority: int, least: int, hours: int, num_low: int, has_projects: bool
) -> None:
    """Each gets workers after the bound, one after the other, and keeps them for half of it."""
    flat = ThroughputCurve((1,), (1.0,))
    low = [
        job(f"low-{at}", least, least, curve=flat, left=hours * HOUR_S, priority=-1000, submitted_at=NOW + at)
        for at in range(num_low)
    ]

    def arriving(now: float) -> list[MarketJob]:
        name = f"high-{now:.0f}"
        one = job(name, 1, 1, curve=flat, left=HOUR_S, priority=priority, project="q", submitted_at=now)
        return [replace(one, job_id=f"{name}-{at}") for at in range(5)]

    bound = int(AGED_AFTER_S / HOUR_S) + 1
    tree = [Project(name="q", weight=5.0), Project(name="default")] if has_projects else []
    workers = played(market(low, nodes(4), *tree), arriving, bound + 1 + num_low * hours)
    for at in range(num_low):
        begun = workers[f"low-{at}"]
        assert begun and begun[0] <= bound + at * hours
        assert begun == list(range(begun[0], begun[0] + hours)), "it is not preempted before its time"


def waited(hours: float, **fields: object) -> MarketState:
    urgent = [job(f"urgent-{at}", 2, 2, granted=2, priority=50 + at) for at in range(2)]
    low = job("low", 2, 2, submitted_at=NOW - hours * HOUR_S, **fields)
    return market([*urgent, low], nodes(4))


def test_a_job_that_has_waited_for_long_goes_first_and_both_reasons_say_so() -> None:
    assert after(waited(23.9)) == {"urgent-0": 2, "urgent-1": 2}
    assert after(waited(24)) == {"low": 2, "urgent-1": 2}
    assert reasons(decide(waited(24), NOW)) == {
        "urgent-0": "Preempted for low, which was without workers for 24 h longer than with them and needs 2 workers. "
        "It saves and returns to the queue; no step is lost.",
        "low": "Starting with 2 workers (1 CPU each); preempts urgent-0 because it was without workers for 24 h longer "
        "than with them.",
    }


def test_time_with_workers_counts_against_time_without() -> None:
    assert after(waited(40, served_s=2 * 9 * HOUR_S)) == {"urgent-0": 2, "urgent-1": 2}
    assert after(waited(42, served_s=2 * 9 * HOUR_S)) == {"low": 2, "urgent-1": 2}


@pytest.mark.parametrize(("ran_hours", "keeps"), [(11.9, True), (12.1, False)])
def test_it_keeps_its_minimum_until_half_of_the_bound_is_made_up(ran_hours: float, keeps: bool) -> None:
    low = job("low", 4, 4, granted=4, submitted_at=NOW - (24 + ran_hours) * HOUR_S, served_s=4 * ran_hours * HOUR_S)
    got = after(market([low, job("urgent", 4, 4, priority=50)], nodes(4)))
    assert got == ({"low": 4} if keeps else {"urgent": 4})


def test_a_job_that_cannot_start_is_no_reason_for_the_next_to_wait() -> None:
    blocked = job("blocked", 1, 1, submitted_at=NOW - 48 * HOUR_S, project="p")
    huge = job("huge", 9, 9, submitted_at=NOW - 47 * HOUR_S)
    state = waited(24)
    jobs = market([*state.jobs, blocked, huge], nodes(4), Project(name="p", limit=0))
    assert after(jobs) == {"low": 2, "urgent-1": 2}


def test_one_job_at_a_time_goes_first_for_having_waited() -> None:
    state = waited(25)
    other = job("other", 2, 2, submitted_at=NOW - 24 * HOUR_S)
    assert after(replace(state, jobs=[*state.jobs, other])) == {"low": 2, "urgent-1": 2}


def queue_of(number: int, most: int = 1) -> list[MarketJob]:
    """One job of six has priority 50; by their places in the queue, many others are before it."""
    return [
        job(
            f"job-{at:05}", 1, most, priority=50 * (at % 6 == 0), project="ab"[at // 2 % 2], submitted_at=NOW - 60 * age
        )
        for at, age in zip(range(number), range(number, 0, -1), strict=True)
    ]


def starts(state: MarketState) -> list[Start]:
    return [one for one in decide(state, NOW) if isinstance(one, Start)]


def test_a_decision_starts_so_many_jobs_at_their_minimum_and_the_next_ones_go_on() -> None:
    state = market(queue_of(MOST_STARTS + 300, most=2), nodes(*[8.0] * 300))
    decisions = decide(state, NOW)
    begun, waits = starts(state), [one for one in decisions if isinstance(one, Wait)]
    assert len(begun) == MOST_STARTS and {one.workers for one in begun} == {1}
    assert len(waits) == 300 and {one.reason for one in waits} == {LATER.message}
    assert not any(one.waits_for_limit or one.holders for one in waits)
    assert [one.position for one in waits] == list(range(1, 301))
    after = carried_out(state, decisions)
    assert len(starts(after)) == 300
    after = carried_out(after, decide(after, NOW))
    assert len(grants(after)) == MOST_STARTS + 300
    later = carried_out(after, decide(after, NOW + 60), NOW + 60)
    assert sum(grants(later).values()) == 300 * 8, "what no minimum needs is divided once all have started"


def test_in_a_long_queue_jobs_of_higher_priority_start_first_in_each_project() -> None:
    jobs = queue_of(LONG_QUEUE + 200)
    state = market(jobs, nodes(*[8.0] * 10), Project(name="a"), Project(name="b"))
    decisions = decide(state, NOW)
    by_id = {one.job_id: one for one in jobs}
    assert {by_id[one.job_id].priority for one in starts(state)} == {50}
    assert Counter(one.job_id for one in decisions) == Counter(list(by_id))
    waits = [one for one in decisions if isinstance(one, Wait)]
    assert [by_id[one.job_id].priority for one in waits] == [50] * 120 + [0] * 1000
    assert [one.position for one in waits] == list(range(1, len(waits) + 1))


def test_a_long_queue_that_has_been_served_stays_as_it_is() -> None:
    state = market(queue_of(LONG_QUEUE + 200), nodes(*[8.0] * 10), Project(name="a"), Project(name="b"))
    after = carried_out(state, decide(state, NOW))
    assert len(grants(after)) == 80
    assert all(isinstance(one, Wait) for one in decide(after, NOW))
    assert all(isinstance(one, Wait) for one in decide(after, NOW + 60))
