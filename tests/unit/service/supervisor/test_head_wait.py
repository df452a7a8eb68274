"""Only time in which the head could have answered, and the supervisor have noticed, counts."""

from shoal_service.supervisor.journal import SLICE_S, HeadWait


def after(wait: HeadWait, *slices: tuple[float, float]) -> HeadWait:
    for began, ended in slices:
        wait = wait.after(began, ended)
    return wait


def test_a_head_that_does_not_answer_counts_as_away_after_a_quarter_of_a_second() -> None:
    wait = HeadWait(0.0, 1000)
    slices = [(n * SLICE_S, (n + 1) * SLICE_S) for n in range(10)]
    assert not after(wait, *slices[:5]).is_over and after(wait, *slices[:6]).is_over


def test_a_supervisor_that_wakes_late_has_waited_one_slice() -> None:
    wait = after(HeadWait(0.0, 1000), (0.0, 10.0))
    assert wait.waited_s == SLICE_S and not wait.is_over


def test_the_time_before_the_head_was_asked_does_not_count() -> None:
    assert after(HeadWait(7.0, 0), (6.99, 7.01)).waited_s < 0.02
    assert after(HeadWait(7.0, 0), (6.0, 6.5)).waited_s == 0.0


def test_a_large_record_takes_longer() -> None:
    slices = [(n * SLICE_S, (n + 1) * SLICE_S) for n in range(8)]
    assert after(HeadWait(0.0, 0), *slices).is_over
    assert not after(HeadWait(0.0, 4_000_000), *slices).is_over
