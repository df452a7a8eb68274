"""Each moment of a step belongs to one category; waiting and making batches are taken out of the phase around them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shoal_workers.contract.messages import Phase
from shoal_workers.contract.profiles import Category
from shoal_workers.engine.profiling.recording import PhaseClock, Reading, Span


@dataclass
class Clocks:
    at_s: float = 100.0
    waited_s: float = 3.0
    data_s: float = 0.5

    def pass_(self, seconds: float, *, waiting: float = 0.0, data: float = 0.0) -> None:
        self.at_s += seconds
        self.waited_s += waiting
        self.data_s += data

    def read(self) -> Reading:
        return Reading(self.at_s, self.waited_s, self.data_s)


def _one_step(clocks: Clocks, clock: PhaseClock, number: int) -> None:
    clocks.pass_(0.1)  # before the first phase
    clock.enter(Phase.FORWARD)
    clocks.pass_(1.0, data=0.2)
    clock.enter(Phase.BACKWARD)
    clocks.pass_(2.0, waiting=0.7)
    clock.enter(Phase.OPTIMIZER)
    clocks.pass_(0.4, waiting=0.1)
    clock.enter(Phase.SNAPSHOT)
    clocks.pass_(0.3)
    clock.enter(Phase.VALIDATING)
    clocks.pass_(5.0, waiting=2.0, data=1.0)
    clock.enter(Phase.SAVING)
    clocks.pass_(0.6)
    clock.end_step(number)


def test_the_categories_of_a_step_add_up_to_its_length() -> None:
    clocks = Clocks()
    clock = PhaseClock(clocks.read)
    _one_step(clocks, clock, 41)
    [times] = clock.times
    assert times.step == 41 and times.total_s == pytest.approx(9.4)
    assert times.seconds == {
        Category.COMPUTE: pytest.approx(0.8 + 1.3),
        Category.COMMUNICATION: pytest.approx(0.8),
        Category.DATA: pytest.approx(0.2),
        Category.OPTIMIZER: pytest.approx(0.3),
        Category.SNAPSHOT: pytest.approx(0.3),
        Category.CHECKPOINT: pytest.approx(0.6),
        Category.VALIDATION: pytest.approx(5.0),
        Category.OTHER: pytest.approx(0.1),
    }


def test_each_step_begins_where_the_last_one_ended() -> None:
    clocks = Clocks()
    clock = PhaseClock(clocks.read)
    for number in (1, 2, 3):
        _one_step(clocks, clock, number)
    assert [times.step for times in clock.times] == [1, 2, 3]
    assert [times.total_s for times in clock.times] == pytest.approx([9.4] * 3)
    assert [span.name for span in clock.steps] == ["1", "2", "3"]
    assert [span.begin_s for span in clock.steps] == pytest.approx([100.0, 109.4, 118.8])
    assert clock.steps[-1].end_s == pytest.approx(128.2)


def test_the_phases_are_kept_as_spans_for_the_trace() -> None:
    clocks = Clocks()
    clock = PhaseClock(clocks.read)
    clock.enter(Phase.FORWARD)
    clocks.pass_(1.0)
    clock.enter(Phase.BACKWARD)
    clocks.pass_(2.0)
    clock.end_step(1)
    assert clock.phases == [Span("forward", 100.0, 101.0), Span("backward", 101.0, 103.0)]
