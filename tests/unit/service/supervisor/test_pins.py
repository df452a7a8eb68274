"""Pins reach the retention of a running attempt, and survive the death of its supervisor."""

from doubles.event_loop import until
from doubles.supervisor_bench import SPEC, SupervisorBench
from shoal_workers.contract.fault_tolerance import CheckpointSpec
from shoal_workers.contract.marker import CheckpointName

KEEPS_ONE = SPEC.model_copy(update={"checkpoint": CheckpointSpec(keep=1)})


def _steps(bench: SupervisorBench) -> list[int]:
    return sorted(name.step for name in bench.catalog.markers)


async def _save(bench: SupervisorBench, step: int) -> None:
    bench.workers.train()
    await until(lambda: bench.status.step == step, "a step is reported")
    [worker] = bench.workers.group
    worker.save()
    await until(lambda: bench.events().count("checkpoint.committed") == step - 1, "it is committed")


async def test_a_pinned_checkpoint_stays_and_a_restarted_supervisor_knows_the_pin() -> None:
    bench = SupervisorBench(granted=1, spec=KEEPS_ONE)
    await bench.start_and_train()
    await _save(bench, 2)
    await until(lambda: _steps(bench) == [2], "the first checkpoint")
    pin = str(CheckpointName(2, 1, 1))
    bench.direct(pinned=(pin,))
    await until(lambda: bench.entry.state.target.pinned == (pin,), "the pin is in the journal")
    await _save(bench, 3)
    await until(lambda: _steps(bench) == [2, 3], "the pinned one and the newest")
    await bench.restart()
    await until(lambda: bench.journal.written, "the successor goes on")
    assert bench.entry.state.target.pinned == (pin,)
    bench.direct(pinned=())
    await until(lambda: bench.entry.state.target.pinned == (), "the pin is taken away")


async def test_a_checkpoint_that_was_committed_just_before_is_deleted_too() -> None:
    """Both parts were reported before the first one was committed, as at the end of a fast job."""

    bench = SupervisorBench(granted=1, spec=KEEPS_ONE)
    await bench.start_and_train()
    bench.catalog.hangs = True
    [worker] = bench.workers.group
    bench.workers.train()
    await until(lambda: bench.status.step == 2, "a step is reported")
    worker.save()
    await until(lambda: len(bench.catalog.hanging) == 1, "the first commit is under way")
    bench.workers.train()
    await until(lambda: bench.status.step == 3, "a step is reported")
    worker.save()
    await until(lambda: len(bench.entry.state.checkpoints.committing) == 2, "the second one is asked for")
    bench.catalog.hangs = False
    bench.catalog.hanging[0].go_on()
    await until(lambda: bench.events().count("checkpoint.committed") == 2, "both are committed")
    await until(lambda: _steps(bench) == [3], "the newest alone is kept")
