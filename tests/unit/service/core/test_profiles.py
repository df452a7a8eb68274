"""A request for a profile goes to the worker of its rank once a group trains, and always ends."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.profiles import (
    GRACE_S,
    WAIT_S,
    WRITE_S,
    GroupFacts,
    Looked,
    ProfileCommand,
    ProfileEvent,
    ProfileState,
    Report,
    Reported,
    Send,
    Wanted,
    step,
)
from shoal_workers.contract.profiles import Profiled, ProfileRequest

REQUEST = ProfileRequest(number=3, rank=1, steps=2)
RUNNING = GroupFacts(generation=4, is_running=True, is_active=True, workers=(7, 9), alive=frozenset({7, 9}), step=40)
FORMING = replace(RUNNING, is_running=False, is_active=False)
RESULT = Profiled(generation=4, number=3, rank=1)


def _feed(*turns: tuple[ProfileEvent, GroupFacts, float]) -> tuple[ProfileState, list[ProfileCommand]]:
    state, given_ = ProfileState(), []
    for event, group, now in turns:
        state, commands = step(state, event, group, now)
        given_.extend(commands)
    return state, given_


def _reason(command: ProfileCommand) -> str:
    assert isinstance(command, Report)
    return command.item.error


def test_it_waits_for_a_group_and_goes_to_the_worker_of_its_rank_once() -> None:
    _, commands = _feed(
        (Wanted(REQUEST), FORMING, 0.0),
        (Looked(), FORMING, 50.0),
        (Looked(), RUNNING, 60.0),
        (Wanted(REQUEST), RUNNING, 61.0),
    )
    assert commands == [Send(9, 4, REQUEST)]


def test_a_result_ends_it_and_a_repeated_directive_does_not_begin_it_again() -> None:
    state, commands = _feed(
        (Wanted(REQUEST), RUNNING, 0.0),
        (Reported(RESULT), RUNNING, 1.0),
        (Wanted(REQUEST), RUNNING, 2.0),
        (Reported(RESULT), RUNNING, 3.0),
    )
    assert commands == [Send(9, 4, REQUEST), Report(RESULT)]
    assert state.request is None and state.ended == 3
    following = ProfileRequest(number=4, rank=0, steps=1)
    assert step(state, Wanted(following), RUNNING, 4.0)[1] == (Send(7, 4, following),)


def test_without_a_group_it_ends_with_a_reason() -> None:
    _, commands = _feed((Wanted(REQUEST), FORMING, 0.0), (Looked(), FORMING, WAIT_S))
    assert [_reason(one) for one in commands] == [f"no group of the job trained within {WAIT_S:g} s"]


def test_a_rank_that_the_group_does_not_have_is_named() -> None:
    _, commands = _feed((Wanted(REQUEST.model_copy(update={"rank": 2})), RUNNING, 0.0))
    assert [_reason(one) for one in commands] == ["the group has no rank 2: its ranks are 0 to 1"]


def test_the_loss_of_its_worker_ends_it_at_once() -> None:
    lost = replace(RUNNING, is_running=False, is_active=False, alive=frozenset({7}), step=41, cause="worker_died")
    _, (_, ended) = _feed((Wanted(REQUEST), RUNNING, 0.0), (Looked(), lost, 1.0))
    assert _reason(ended) == (
        "the worker of rank 1 was lost in mid-profile, after step 41 (worker_died); training goes on, ask again for "
        "another profile"
    )


@pytest.mark.parametrize("is_reported", [True, False])
def test_the_loss_of_another_worker_ends_it_unless_its_result_was_on_its_way(is_reported: bool) -> None:
    lost = replace(RUNNING, is_running=False, is_active=False, alive=frozenset({9}), step=41)
    formed = replace(RUNNING, generation=5, workers=(9, 11), alive=frozenset({9, 11}), step=41)
    turns: list[tuple[ProfileEvent, GroupFacts, float]] = [
        (Wanted(REQUEST), RUNNING, 0.0),
        (Looked(), lost, 1.0),
        (Looked(), formed, 2.0),
    ]
    if is_reported:
        turns.append((Reported(RESULT), formed, 3.0))
    turns.append((Looked(), formed, 1.0 + GRACE_S))
    _, commands = _feed(*turns)
    assert [type(one) for one in commands] == [Send, Report], "it is not repeated in another generation"
    assert (commands[1] == Report(RESULT)) is is_reported
    if not is_reported:
        assert "the group of generation 4 ended in mid-profile" in _reason(commands[1])


def test_a_worker_that_sends_no_result_after_its_steps_does_not_hold_the_request_for_ever() -> None:
    late = replace(RUNNING, step=43)
    _, commands = _feed(
        (Wanted(REQUEST), RUNNING, 0.0),
        (Looked(), replace(RUNNING, step=42), 1e6),  # steps may take hours
        (Looked(), late, 1e6 + 1),
        (Looked(), late, 1e6 + 1 + WRITE_S),
    )
    assert "sent no result within" in _reason(commands[1])


def test_the_control_plane_can_take_it_back_or_replace_it() -> None:
    state, commands = _feed(
        (Wanted(REQUEST), RUNNING, 0.0), (Wanted(None), RUNNING, 1.0), (Reported(RESULT), RUNNING, 2.0)
    )
    assert commands == [Send(9, 4, REQUEST)] and state.request is None
    newer = ProfileRequest(number=5, rank=0, steps=1)
    _, commands = _feed((Wanted(REQUEST), RUNNING, 0.0), (Wanted(newer), RUNNING, 1.0))
    assert commands == [Send(9, 4, REQUEST), Send(7, 4, newer)]


_FACTS = st.builds(
    GroupFacts,
    generation=st.integers(1, 3),
    is_running=st.booleans(),
    is_active=st.booleans(),
    workers=st.just((7, 9)),
    alive=st.sampled_from([frozenset({7, 9}), frozenset({7}), frozenset({9})]),
    step=st.integers(0, 9),
)


@given(st.lists(_FACTS, max_size=12))
def test_every_request_ends_exactly_once_whatever_the_group_does(history: list[GroupFacts]) -> None:
    state, (commands) = step(ProfileState(), Wanted(REQUEST), RUNNING, 0.0)
    reported = list(commands)
    for now, group in enumerate(history, 1):
        state, commands = step(state, Looked(), group, float(now))
        reported.extend(commands)
    gone = replace(RUNNING, generation=9, is_running=False, is_active=False)
    for now in (1e4, 1e4 + GRACE_S, 1e4 + WRITE_S, 1e4 + WRITE_S + GRACE_S):
        state, commands = step(state, Looked(), gone, now)
        reported.extend(commands)
    assert [type(one) for one in reported] == [Send, Report]
    assert state.request is None
