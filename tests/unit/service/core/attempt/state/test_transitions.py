"""The table of transitions is complete, reachable and obeyed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.parts import TRANSITIONS, CurrentStage, Running, Stage
from shoal_service.core.attempt.turn import Turn
from shoal_service.planner import plan
from shoal_service.supervisor.reporting.status import job_state
from shoal_workers.contract.job import JobState

NewWorld = Callable[..., Any]
_REQUIRED = {stage: {"durable": False} for stage in (Stage.SWITCHING, Stage.QUIESCING)}


def test_every_stage_has_a_row_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(Stage)
    reached, frontier = {Stage.OPENING}, [Stage.OPENING]
    while frontier:
        for stage in TRANSITIONS[frontier.pop()] - reached:
            reached.add(stage)
            frontier.append(stage)
    assert reached == set(Stage)


def test_every_stage_but_the_last_can_end() -> None:
    assert all(Stage.ENDED in after for stage, after in TRANSITIONS.items() if stage is not Stage.ENDED)
    assert TRANSITIONS[Stage.ENDED] == frozenset()


def test_a_transition_that_is_not_in_the_table_is_a_fault_of_ours(new_world: NewWorld) -> None:
    with pytest.raises(AssertionError, match="opening -> running"):
        Turn(new_world().state, 0.0, plan).enter(Running(since=0.0))


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("has_formed", [True, False])
def test_every_stage_shows_as_a_state_in_which_an_attempt_may_be(
    new_world: NewWorld, stage: Stage, has_formed: bool
) -> None:
    state: Attempt = new_world().state
    current = TypeAdapter(CurrentStage).validate_python({"stage": stage, "since": 0.0, **_REQUIRED.get(stage, {})})
    state = replace(state, current=current, history=replace(state.history, has_formed=has_formed))
    assert job_state(state).holds_workers
    assert job_state(state) is not JobState.QUEUED
