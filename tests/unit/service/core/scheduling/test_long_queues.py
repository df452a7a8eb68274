"""Decisions about a queue of more than LONG_QUEUE jobs."""

from collections import Counter

from kit.market import NOW, carried_out, grants, job, market, nodes
from shoal_service.core.scheduling.admission import LATER, LONG_QUEUE, MOST_STARTS
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import MarketJob, MarketState, Project, Start, Wait


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
    assert len(waits) == 300 and {one.reason for one in waits} == {LATER.words}
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
