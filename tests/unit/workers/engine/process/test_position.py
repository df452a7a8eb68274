"""The clock of phases: each moment of the training thread is booked once."""

from __future__ import annotations

import time

import pytest

from shoal_workers.contract.messages import Phase, StepPart
from shoal_workers.engine.process.position import Position


def test_each_moment_is_booked_once_and_waiting_is_taken_out_of_its_phase() -> None:
    waited = [5.0]
    began = time.monotonic()
    position = Position(waited_s=lambda: waited[0])
    position.enter(Phase.FORWARD)
    before = position.part_seconds()
    position.enter(Phase.BACKWARD)
    waited[0] += 40.0
    position.enter(Phase.OPTIMIZER)
    after = position.part_seconds()
    assert after[StepPart.COMMUNICATION] - before[StepPart.COMMUNICATION] == 40.0
    assert after[StepPart.BACKWARD] == pytest.approx(-40.0, abs=1.0)
    assert after[StepPart.FORWARD] > before[StepPart.FORWARD] and after[StepPart.OPTIMIZER] == 0
    assert 0 < sum(after.values()) <= time.monotonic() - began


def test_batches_are_taken_out_of_the_phase_in_which_they_were_made() -> None:
    position = Position()
    position.begin(1)
    position.spent_on_data(2.0)
    position.spent_on_data(3.0, in_phase=Phase.IDLE)
    spent = position.part_seconds()
    assert (spent[StepPart.DATA], spent[StepPart.FORWARD], spent[StepPart.OTHER]) == (3.0, -2.0, -1.0)
    position.begin(2)
    position.spent_on_data(0.5)
    assert position.part_seconds()[StepPart.DATA] == 3.5, "each generation counts from 0"


def test_a_reader_keeps_what_it_has_read() -> None:
    position = Position()
    position.enter(Phase.FORWARD)
    read = position.part_seconds()
    kept = dict(read)
    position.enter(Phase.BACKWARD)
    assert dict(read) == kept != dict(position.part_seconds())
