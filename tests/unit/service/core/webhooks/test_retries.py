"""The schedule of attempts: back-off, its bounds, and when events are given up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_service.core.webhooks.retries import Retries, RetryPolicy, after_failure

POLICY = RetryPolicy(first_s=1.0, longest_s=60.0, give_up_s=1000.0)


def _fail(before: Retries, waiting: list[float], now: float, spread: float = 0.5) -> Retries:
    return after_failure(before, waiting, now=now, spread=spread, policy=POLICY).retries


def test_pauses_double_up_to_the_longest() -> None:
    retries, now, pauses = Retries(), 0.0, []
    for _ in range(9):
        retries = _fail(retries, [0.0], now)
        assert retries.next_at is not None
        pauses.append(retries.next_at - now)
        now = retries.next_at
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert retries.failing_since == 0.0


def test_lanes_that_fail_together_are_not_tried_together() -> None:
    first, second = (_fail(Retries(), [0.0], 100.0, spread) for spread in (0.0, 1.0))
    assert (first.next_at, second.next_at) == (100.75, 101.25)


def test_an_event_is_given_up_after_it_has_waited_long_enough_for_a_receiver_that_fails() -> None:
    since = Retries(num_failed=20, failing_since=500.0)
    waiting = [10.0, 400.0, 600.0, 601.0]
    assert after_failure(since, waiting, now=1499.0, spread=0.5, policy=POLICY).num_given_up == 0
    assert after_failure(since, waiting, now=1500.0, spread=0.5, policy=POLICY).num_given_up == 2
    assert after_failure(since, waiting, now=1600.0, spread=0.5, policy=POLICY).num_given_up == 3


def test_an_event_that_is_old_at_its_first_attempt_gets_the_whole_time() -> None:
    verdict = after_failure(Retries(), [0.0], now=1e9, spread=0.5, policy=POLICY)
    assert verdict.num_given_up == 0
    assert verdict.reason == "failure 1 in 0 s, next attempt in 1.0 s"


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=8).map(sorted),
    st.floats(0, 1e6),
    st.integers(0, 2000),
    st.floats(0, 1),
)
def test_there_is_always_a_next_attempt_in_bounded_time_and_what_is_given_up_is_the_oldest(
    waiting: list[float], now: float, num_failed: int, spread: float
) -> None:
    before = Retries(num_failed=num_failed, failing_since=now / 2 if num_failed else None)
    verdict = after_failure(before, waiting, now=now, spread=spread, policy=POLICY)
    assert verdict.retries.next_at is not None
    assert 0 < verdict.retries.next_at - now <= POLICY.longest_s * 1.25 + 1e-6
    assert verdict.retries.num_failed == num_failed + 1
    assert 0 <= verdict.num_given_up <= len(waiting)
    kept = waiting[verdict.num_given_up :]
    assert all(now - max(at, before.failing_since or now) < POLICY.give_up_s for at in kept[:1])


def test_a_time_in_the_future_is_not_due() -> None:
    assert Retries().is_due(0.0) and Retries(next_at=5.0).is_due(5.0)
    assert not Retries(next_at=5.0).is_due(4.9)
