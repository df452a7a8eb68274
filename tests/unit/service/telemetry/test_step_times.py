from shoal_service.telemetry.metric import STEP_BOUNDS_S, StepTimes


def test_a_step_time_on_a_bound_belongs_to_it() -> None:
    times = StepTimes().add([STEP_BOUNDS_S[0], STEP_BOUNDS_S[-1] + 1])
    assert (times.counts[0], times.counts[-1], sum(times.counts)) == (1, 1, 2)


def test_it_survives_its_column_exactly() -> None:
    times = StepTimes().add([0.1, 0.2, 0.3]).add([7.7])
    assert StepTimes.read(times.text()) == times


def test_an_empty_column_and_other_buckets_begin_at_zero() -> None:
    assert StepTimes.read("") == StepTimes.read("1 2 3 0.5") == StepTimes()
