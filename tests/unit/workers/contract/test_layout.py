"""A pipeline is fed what torch's schedules accept, and no more than needed."""

from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.layout import Layout, Schedule, fed, micro_batches_fed


def test_without_a_pipeline_every_rank_is_fed_its_share() -> None:
    assert micro_batches_fed(Layout(dp_shard=3), 8) == 3


def test_1f1b_is_filled_up_to_its_stages() -> None:
    assert micro_batches_fed(Layout(pp=4, dp_shard=4), 8) == 4
    assert micro_batches_fed(Layout(pp=4, dp_shard=1), 8) == 8


def test_gpipe_and_zbv_are_never_filled_up() -> None:
    for schedule in (Schedule.GPIPE, Schedule.ZERO_BUBBLE_V):
        assert fed(schedule, pp=8, stages=16, share=1) == 1


def test_dualpipev_has_twice_as_many_stages_as_ranks() -> None:
    assert fed(Schedule.DUAL_PIPE_V, pp=4, stages=8, share=3) == 8


@given(st.integers(1, 64), st.integers(1, 400))
def test_interleaved_is_fed_the_least_that_torch_accepts(pp: int, share: int) -> None:
    """The rule is that of ScheduleInterleaved1F1B.__init__."""
    accepted = next(n for n in range(share, share + 400) if n % max(1, n // pp) == 0)
    assert fed(Schedule.INTERLEAVED, pp, 2 * pp, share) == accepted
