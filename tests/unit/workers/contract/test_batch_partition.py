"""The split of a batch, the orders of an assignment, micro-batches of a pipeline, and the pause before a retry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.backoff import backoff_s
from shoal_workers.contract.batch_partition import micro_batches_of_rank, randomness_seed, sample_at, sample_positions
from shoal_workers.contract.layout import Layout, Schedule, fed, fully_sharded, micro_batches_fed
from shoal_workers.contract.messages import Assignment, later_to_form_s

MICRO_BATCHES = st.integers(1, 300)
WORLDS = st.integers(1, 40)
SEEDS = st.integers(0, 2**32 - 1)


@given(MICRO_BATCHES, WORLDS)
def test_all_ranks_run_as_many_passes_and_padding_comes_last(num: int, world: int) -> None:
    for rank in range(world):
        weights = [m.weight for m in micro_batches_of_rank(num, rank, world)]
        assert len(weights) == -(-num // world)
        assert weights == sorted(weights, reverse=True)
        assert weights.count(0.0) <= 1


@given(MICRO_BATCHES, WORLDS)
def test_a_rank_reads_a_contiguous_slice_and_its_padding_is_a_valid_index(num: int, world: int) -> None:
    for rank in range(world):
        mine = micro_batches_of_rank(num, rank, world)
        real = [m.index for m in mine if m.weight]
        assert real == list(range(real[0], real[0] + len(real))) if real else True
        assert all(0 <= m.index < num for m in mine)


@given(st.integers(0, 10**9), st.integers(1, 64), st.integers(1, 64), WORLDS)
def test_a_step_reads_the_same_positions_at_every_world_size(step: int, num: int, micro: int, world: int) -> None:
    size = num * micro
    read = [
        position
        for rank in range(world)
        for m in micro_batches_of_rank(num, rank, world)
        if m.weight
        for position in sample_positions(step, m.index, global_size=size, micro_size=micro)
    ]
    assert read == list(range(step * size, (step + 1) * size))


@given(st.integers(50, 500), SEEDS, st.integers(0, 10**6))
def test_epochs_and_seeds_have_different_orders(num: int, seed: int, epoch: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [sample_at(epoch * num + i, num_samples=num, seed=seed) for i in range(num)]

    assert order(seed, epoch) != order(seed, epoch + 1)
    assert order(seed, epoch) != order(seed + 1, epoch)
    assert order(seed, epoch) != list(range(num))


@given(st.integers(1, 2**40), SEEDS, st.integers(0, 2**50))
def test_a_sample_is_known_from_its_position_alone_in_a_set_of_any_size(num: int, seed: int, position: int) -> None:
    sample = sample_at(position, num_samples=num, seed=seed)
    assert 0 <= sample < num
    assert sample == sample_at(position, num_samples=num, seed=seed)


def test_the_order_covers_the_complete_set() -> None:
    """Every tenth of an epoch reads from every tenth of the samples, about evenly."""
    num = 10_000
    for tenth in range(10):
        read = [sample_at(tenth * 1000 + i, num_samples=num, seed=7) // 1000 for i in range(1000)]
        assert all(60 < read.count(part) < 150 for part in range(10))


def test_the_order_never_changes_between_versions() -> None:
    """A resumed job must read what it would have read: changing these numbers breaks every running job."""
    assert [sample_at(i, num_samples=10, seed=0) for i in range(10)] == [6, 8, 9, 5, 2, 4, 7, 1, 0, 3]
    assert sample_at(123_456_789_012, num_samples=1_000_003, seed=42) == 758_983
    assert randomness_seed(1, 2, 3) == 7_510_213_797_696_614_745


@given(SEEDS, st.integers(0, 10**9), st.integers(0, 10**4))
def test_randomness_seeds_fit_torch_and_differ_between_micro_batches_and_steps(seed: int, step: int, m: int) -> None:
    here = randomness_seed(seed, step, m)
    assert 0 <= here < 2**63
    others = {
        randomness_seed(seed, step + 1, m),
        randomness_seed(seed, step, m + 1),
        randomness_seed(seed + 1, step, m),
    }
    assert here not in others
    assert len(others) == 3


@pytest.mark.parametrize(("world_size", "later_s"), [(1, 0.0), (64, 0.0), (65, 0.05), (1024, 48.0), (16384, 816.0)])
def test_the_deadlines_of_forming_grow_with_the_group(world_size: int, later_s: float) -> None:
    assignment = Assignment(
        job_id="job",
        attempt=1,
        generation=1,
        rank=0,
        layout=fully_sharded(world_size),
        store_host="10.0.0.1",
        store_port=1,
        restore_from=None,
        store_timeout_s=60.0,
        connect_timeout_s=15.0,
    )
    assert later_to_form_s(world_size) == pytest.approx(later_s)
    assert assignment.rendezvous_s == pytest.approx(60.0 + later_s)
    assert assignment.connect_s == pytest.approx(15.0 + later_s)


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


def test_the_pause_doubles_up_to_the_longest() -> None:
    assert [backoff_s(failures, first_s=0.5, longest_s=3.0) for failures in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff_s(10_000, first_s=1.0, longest_s=60.0) == 60.0


@pytest.mark.parametrize(("spread", "pause_s"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)])
def test_the_spread_shortens_it_by_up_to_a_half(spread: float, pause_s: float) -> None:
    assert backoff_s(2, first_s=1.0, spread=spread) == pause_s
