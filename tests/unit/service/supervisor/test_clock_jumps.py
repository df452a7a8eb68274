"""The wall clock jumps, because it was set or because the machine was suspended: no deadline comes nearer by that."""

import pytest

from doubles.event_loop import settle
from doubles.supervisor_bench import SPEC, SupervisorBench
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.supervisor.executor import TICK_S
from shoal_workers.contract.fault_tolerance import ElasticitySpec
from shoal_workers.contract.job import EndReason

_WAIT_S = 60.0
_TWO = SPEC.model_copy(update={"elasticity": ElasticitySpec(min_workers=2, max_workers=2, wait_s=_WAIT_S)})


async def _waiting() -> SupervisorBench:
    """An attempt that needs two workers, and may only have one after it has lost the other."""
    bench = SupervisorBench(spec=_TWO)
    await bench.start_and_train()
    bench.direct(granted=1, elasticity=_TWO.elasticity)
    bench.workers.group[1].die()
    await bench.advance_until(lambda: bench.stage is Stage.WAITING)
    return bench


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_a_waiting_job_waits_for_its_whole_time_whatever_the_wall_clock_does(jump_s: float) -> None:
    bench = await _waiting()
    bench.clock.jump(jump_s)
    await bench.clock.advance(_WAIT_S / 2)
    assert bench.stage is Stage.WAITING, "half of elasticity.wait_s has passed"
    deadline = bench.status.deadline
    assert deadline is not None
    assert deadline == pytest.approx(bench.clock.time() + _WAIT_S / 2, abs=2.0), "as the clock shows it now"
    end = await bench.end()
    assert end.reason is EndReason.CAPACITY_TIMEOUT
    assert bench.clock.time() == pytest.approx(deadline, abs=2.0)


@pytest.mark.parametrize("after_s", [-0.1, 0.0, 0.1, 0.2])
async def test_the_end_of_an_attempt_arrives_if_the_clock_jumps_before_the_tick_that_ends_it(after_s: float) -> None:
    """`after_s`: so long after the deadline. Ticks are 0.25 s apart, so the next one is the first after it."""

    bench = await _waiting()
    await bench.clock.advance(1.0)
    await bench.clock.advance(bench.status.deadline + after_s - bench.clock.time())
    bench.clock.jump(3600.0)
    end = await bench.end()
    assert end.reason is EndReason.CAPACITY_TIMEOUT
    assert bench.entry.end == end, "a successor reports it, too"


async def test_a_healthy_group_is_not_called_hung_and_books_no_time_that_did_not_pass(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    before = bench.status.goodput.total
    bench.clock.jump(86400.0)
    await bench.clock.advance(2 * TICK_S)
    await settle()
    assert bench.stage is Stage.RUNNING and bench.status.incidents == 0
    bench.workers.train(3)
    bench.workers.finish()
    end = await bench.end()
    assert end.reason is EndReason.FINISHED
    assert bench.status.goodput.total - before < 60.0
