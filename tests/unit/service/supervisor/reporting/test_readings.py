"""The shares of time that a status shows, from what workers report."""

import pytest

from kit.worlds.attempt.new_world import make_world
from shoal_service.supervisor.reporting.status import Readings, status_of
from shoal_workers.contract.messages import Phase, Progress
from shoal_workers.contract.worker_reports import StepReport


def _step(step: int, compute_s: tuple[float, ...], *, generation: int = 1) -> StepReport:
    fixed = {"at": 1.0, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 10, "world_size": len(compute_s)}
    return StepReport(generation=generation, step=step, step_s=1.0, compute_s=compute_s, **fixed)


def _progress(at: float, data_s: float, *, generation: int = 1) -> Progress:
    return Progress(generation=generation, phase=Phase.FORWARD, step=1, at=at, data_s=data_s)


def test_what_the_ranks_do_not_compute_is_communication() -> None:
    readings = Readings()
    assert readings.communication_share is None
    readings.add(_step(1, (0.75, 0.25)))
    assert readings.communication_share == 0.5
    readings.add(_step(2, (1.0, 1.0)))
    assert readings.communication_share == pytest.approx(0.45), "a moving average"
    readings.add(_step(3, (1.0, 1.0), generation=2))
    assert readings.communication_share == 0.0, "another group starts afresh"


@pytest.mark.parametrize(("gpus", "shown"), [(0, 0.5), (1, None)])
def test_on_gpus_no_share_of_communication_is_shown(gpus: int, shown: float | None) -> None:
    """There the training thread does not wait, so what is measured is 0 whatever the collectives take."""
    world = make_world(workers=2, worker={"gpus": gpus}).open(then=1)
    readings = Readings()
    readings.add(_step(1, (0.75, 0.25)))
    assert status_of(world.state, readings, spec_version=1, now=world.now).communication_share == shown


def test_the_rank_with_the_slowest_data_counts() -> None:
    readings = Readings()
    for index, data_s in ((3, 1.0), (5, 3.0)):
        readings.add_progress(index, _progress(10.0, 0.0))
        readings.add_progress(index, _progress(10.5, 0.5))  # too short to be measured
        readings.add_progress(index, _progress(14.0, data_s))
    assert readings.data_share((3, 5)) == 0.75
    assert readings.data_share((3,)) == 0.25
    assert readings.data_share((7,)) is None


def test_a_new_generation_measures_its_data_from_zero() -> None:
    readings = Readings()
    readings.add_progress(3, _progress(10.0, 8.0))
    readings.add_progress(3, _progress(20.0, 0.5, generation=2))
    assert readings.data_share((3,)) is None
    readings.add_progress(3, _progress(22.0, 1.5, generation=2))
    assert readings.data_share((3,)) == 0.5
