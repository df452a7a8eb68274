from shoal_service.supervisor.supervisor import MAX_SHORT_RUNS, SHORT_RUN_S, is_crash_loop


def starts(*durations_s: float) -> list[float]:
    """When each run began, given how long each of the earlier ones lasted; the last one has just begun."""
    return [1000.0 + sum(durations_s[:n]) for n in range(len(durations_s) + 1)]


def test_a_first_start_is_not_a_crash_loop() -> None:
    assert not is_crash_loop(starts())


def test_many_short_runs_in_a_row_are_a_crash_loop() -> None:
    assert not is_crash_loop(starts(*[2.0] * (MAX_SHORT_RUNS - 1)))
    assert is_crash_loop(starts(*[2.0] * MAX_SHORT_RUNS))


def test_one_long_run_resets_the_count_of_short_ones() -> None:
    assert not is_crash_loop(starts(*[2.0] * 50, SHORT_RUN_S, *[2.0] * (MAX_SHORT_RUNS - 1)))


def test_a_supervisor_that_is_killed_from_time_to_time_is_restarted_without_limit() -> None:
    assert not is_crash_loop(starts(*[SHORT_RUN_S + 5] * 1000))
