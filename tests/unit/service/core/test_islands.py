"""When a round of islands closes, with which of them, and what the announcements of an island's ranks make."""

from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.island_rounds import announcement, contribution
from shoal_service.core.islands import Contribution, close_round, merge_announcements
from shoal_workers.contract.islands import IslandsSpec, RoundDecision

THREE = IslandsSpec(num=3, grace_s=20.0)


def _close(
    arrived: Mapping[int, float], training: Collection[int], now: float, spec: IslandsSpec = THREE
) -> list[int] | None:
    """The members of round 7. `arrived`: when each island was first seen."""
    islands = range(spec.num)
    arrivals = {contribution(one, islands=islands): at for one, at in arrived.items()}
    decision = close_round(7, spec, arrivals, training, now)
    assert decision is None or {*decision.absent} == {*islands} - {*arrived}
    return None if decision is None else [member.island for member in decision.members]


def test_a_round_closes_at_once_when_all_islands_that_train_have_arrived() -> None:
    assert _close({2: 100.0, 0: 100.0, 1: 100.0}, {0, 1, 2}, 100.0) == [0, 1, 2]
    assert _close({0: 100.0, 2: 100.0}, {0, 1, 2}, 100.0) is None
    assert _close({0: 100.0, 2: 100.0}, {0, 2}, 100.0) == [0, 2], "island 1 has ended"


def test_islands_that_have_ended_since_stay_members() -> None:
    assert _close({0: 100.0, 1: 100.0}, {1}, 100.0) == [0, 1]
    assert _close({0: 100.0}, set(), 100.0) == [0]


def test_a_quorum_closes_it_before_the_others_have_waited_for_all_of_the_grace() -> None:
    arrived = {0: 100.0, 1: 114.0}
    assert _close(arrived, {0, 1, 2}, 114.9) is None
    assert _close(arrived, {0, 1, 2}, 115.0) == [0, 1], "3/4 of the grace since the first"


def test_fewer_than_the_quorum_never_close_it_while_another_one_trains() -> None:
    assert _close({0: 100.0}, {0, 1, 2}, 1e9) is None
    assert _close({0: 100.0}, {0, 1, 2}, 1e9, IslandsSpec(num=3, quorum=1)) == [0]
    assert _close({0: 100.0, 1: 100.0}, {0, 1, 2}, 1e9, IslandsSpec(num=3, quorum=3)) is None


def test_a_round_whose_islands_changed_with_the_steps_of_the_job_is_of_all_of_them() -> None:
    """Island 0 has sent to it as one of a pair, before `stop.steps` was lowered."""
    spec = IslandsSpec(num=3, topology="pairs")
    arrived = {contribution(0, islands=(0, 1)): 100.0, contribution(1, islands=(0, 1, 2)): 100.0}
    assert close_round(7, spec, arrived, {0, 1, 2}, 100.0) is None, "island 2 is on its way"
    assert close_round(7, spec, {**arrived, contribution(2, islands=(0, 1, 2)): 101.0}, {0, 1, 2}, 101.0) is not None


def test_a_pair_waits_for_its_partner_alone_and_closes_without_one_that_is_late() -> None:
    def close(now: float, *islands: int, training: Collection[int] = range(4)) -> RoundDecision | None:
        arrived = {contribution(island, islands=(1, 3)): 100.0 for island in islands}
        return close_round(7, IslandsSpec(num=4, topology="pairs"), arrived, training, now)

    decision = close(100.0, 1, 3)
    assert decision is not None
    assert [(member.island, member.weight) for member in decision.members] == [
        (1, 0.5),
        (3, 0.5),
    ] and decision.absent == ()
    assert close(114.9, 3) is None
    late = close(115.0, 3)
    assert late is not None
    assert [(member.island, member.weight) for member in late.members] == [(3, 1.0)] and late.absent == (1,)
    assert close(100.0, 3, training=(0, 2, 3)) == late, "island 1 has ended"


def test_nothing_has_arrived() -> None:
    assert _close({}, {0, 1, 2}, 1e9) is None
    assert _close({}, set(), 1e9) is None


def test_the_weight_of_a_member_is_its_share_of_the_tokens() -> None:
    pair = (0, 1)
    arrived = {
        contribution(1, tokens=300, islands=pair): 1.0,
        contribution(0, tokens=100, step=25, islands=pair): 2.0,
    }
    decision = close_round(0, IslandsSpec(num=2), arrived, {0, 1}, 3.0)
    assert decision is not None
    members = [(member.island, member.weight, member.step, member.directory) for member in decision.members]
    assert members == [(0, 0.25, 25, "island-0/step-25"), (1, 0.75, 50, "island-1/step-50")]


_SPECS = st.integers(1, 8).flatmap(
    lambda num: st.builds(
        IslandsSpec, num=st.just(num), quorum=st.none() | st.integers(1, num), grace_s=st.floats(0, 100)
    )
)
_ARRIVED = st.dictionaries(st.integers(0, 7), st.tuples(st.floats(0, 1000), st.integers(1, 10**12)), max_size=8)


@given(_SPECS, _ARRIVED, st.sets(st.integers(0, 7)), st.floats(0, 1200))
def test_a_decision_has_what_arrived_and_no_less_than_the_quorum(
    spec: IslandsSpec, arrivals: dict[int, tuple[float, int]], training: set[int], now: float
) -> None:
    spec = spec.model_copy(update={"num": 8})
    arrived = {contribution(island, tokens=tokens, islands=range(8)): at for island, (at, tokens) in arrivals.items()}
    decision = close_round(3, spec, arrived, training, now)
    if decision is None:
        assert not arrived or training - arrivals.keys()
        return
    _check(decision, arrived)
    assert training <= arrivals.keys() or len(decision.members) >= spec.least_members
    again = close_round(3, spec, dict(reversed(arrived.items())), training, now)
    assert again == decision, "the order in which islands arrive changes no bit of the weights"


def _check(decision: RoundDecision, arrived: Mapping[Contribution, float]) -> None:
    by_island = {sent.island: sent for sent in arrived}
    assert decision.round == 3
    assert [member.island for member in decision.members] == sorted(by_island)
    assert sum(member.weight for member in decision.members) == pytest.approx(1.0)
    total = sum(sent.tokens for sent in arrived)
    for member in decision.members:
        one = by_island[member.island]
        assert (member.step, member.directory) == (one.step, one.directory)
        assert member.weight == pytest.approx(one.tokens / total)


def test_the_announcements_of_all_ranks_make_a_contribution() -> None:
    announced = [announcement(rank, world_size=3, island=2, num_bytes=10 + rank) for rank in (2, 0, 1)]
    merged = merge_announcements("island-2/x", announced)
    assert merged is not None
    assert (merged.island, merged.num_bytes, merged.directory) == (2, 33, "island-2/x")
    first = announced[1]
    assert (merged.from_step, merged.step, merged.tokens) == (first.from_step, first.part.step, first.tokens)


@pytest.mark.parametrize("ranks", [(), (0,), (1,), (0, 0), (1, 1)])
def test_a_difference_of_which_a_part_is_missing_has_not_arrived(ranks: tuple[int, ...]) -> None:
    assert merge_announcements("d", [announcement(rank, world_size=2) for rank in ranks]) is None


@pytest.mark.parametrize(
    ("num", "quorum", "least"), [(1, None, 1), (2, None, 2), (3, None, 2), (4, None, 3), (4, 1, 1)]
)
def test_the_quorum_is_more_than_half_unless_it_is_set(num: int, quorum: int | None, least: int) -> None:
    assert IslandsSpec(num=num, quorum=quorum).least_members == least
