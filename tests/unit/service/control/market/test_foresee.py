"""What would happen with other quotas, beside what happens anyway."""

from __future__ import annotations

from dataclasses import replace

from kit.market import NOW, job, market, nodes
from shoal_service.control.market.outlook import foresee
from shoal_service.core.scheduling.admission import RECLAIM_AFTER_S
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import MarketState, Project


def with_rules(state: MarketState, *projects: Project) -> MarketState:
    return replace(state, projects={one.name: one for one in projects})


def test_a_lower_limit_shrinks_the_jobs_of_the_project_and_others_get_the_workers() -> None:
    running = [job("a", granted=4, project="speech"), job("b", most=8, granted=4, project="vision")]
    state = market(running, nodes(8))
    found = foresee(state, with_rules(state, Project(name="speech", limit=2)), decide, NOW)
    assert [(one.job, one.project, one.before, one.after) for one in found.changes] == [
        ("a", "speech", 4, 2),
        ("b", "vision", 4, 6),
    ]
    assert found.known and all(one.within_s == 0 for one in found.changes)
    assert "speech" in found.changes[0].reason or "b" in found.changes[0].reason


def test_what_happens_anyway_is_left_out() -> None:
    state = market([job("a", granted=2), job("starts", 1, 1)], nodes(4))
    assert decide(state, NOW), "the second one starts now"
    assert foresee(state, with_rules(state, Project(name="other", limit=1)), decide, NOW).changes == ()


def test_a_job_that_would_wait_instead_of_start_says_for_which_limit() -> None:
    state = market([job("starts", 2, 2, project="speech")], nodes(4))
    [change] = foresee(state, with_rules(state, Project(name="speech", limit=1)), decide, NOW).changes
    assert (change.before, change.after) == (2, 0) and "speech" in change.reason and "limit" in change.reason


def test_borrowers_of_equal_priority_are_preempted_only_after_their_grace() -> None:
    borrower = job("borrower", 4, 4, granted=4, project="vision", submitted_at=NOW - 500)
    waits = job("waits", 4, 4, project="speech", submitted_at=NOW - 1)
    state = market([borrower, waits], nodes(4))
    found = foresee(state, with_rules(state, Project(name="speech", guaranteed=4)), decide, NOW)
    assert [(one.job, one.before, one.after, one.within_s) for one in found.changes] == [
        ("borrower", 4, 0, RECLAIM_AFTER_S),
        ("waits", 0, 4, RECLAIM_AFTER_S),
    ]
