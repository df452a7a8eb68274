from __future__ import annotations

from shoal_service.supervisor.restart_limit import MAX_SHORT_LIVES, SHORT_LIFE_S, is_crash_loop


def births(*lives_s: float) -> list[float]:
    """When each life began, given how long each lasted; the last one has just begun."""
    return [1000.0 + sum(lives_s[:n]) for n in range(len(lives_s) + 1)]


def test_a_first_life_is_no_loop() -> None:
    assert not is_crash_loop(births())


def test_many_short_lives_in_a_row_are_a_loop() -> None:
    assert not is_crash_loop(births(*[2.0] * (MAX_SHORT_LIVES - 1)))
    assert is_crash_loop(births(*[2.0] * MAX_SHORT_LIVES))


def test_one_life_that_was_long_enough_forgives_those_before_it() -> None:
    assert not is_crash_loop(births(*[2.0] * 50, SHORT_LIFE_S, *[2.0] * (MAX_SHORT_LIVES - 1)))


def test_a_supervisor_killed_now_and_then_lives_for_ever() -> None:
    assert not is_crash_loop(births(*[SHORT_LIFE_S + 5] * 1000))
