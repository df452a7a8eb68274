"""A requested profile reaches the worker of its rank with its generation; its end reaches the control plane."""

from doubles.event_loop import until
from doubles.supervisor_bench import SupervisorBench
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.profiles import Category, Profiled, ProfileRequest, StepTimes

REQUEST = ProfileRequest(number=1, rank=1, steps=2)
RESULT = Profiled(
    generation=1, number=1, rank=1, times=(StepTimes(step=2, seconds={Category.COMPUTE: 0.1}),), held_s=0.01
)


async def test_a_request_goes_to_the_worker_of_its_rank_and_its_result_to_the_control_plane() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.direct(profile=REQUEST)
    profiled, other = bench.workers.group[1], bench.workers.group[0]
    await until(lambda: profiled.profiles == [(1, REQUEST)], "it is sent, with the generation")
    assert other.profiles == []
    profiled.report(RESULT)
    await until(lambda: bench.reports.profiles == (RESULT,), "it is reported")
    bench.direct(profile=REQUEST, granted=1)  # the directive is repeated until the control plane has stored the end
    bench.workers.train()
    await until(lambda: bench.status.step == 2, "training goes on")
    assert profiled.profiles == [(1, REQUEST)] and bench.reports.profiles == (RESULT,)


async def test_a_worker_that_is_killed_in_mid_profile_ends_the_request_and_not_the_job() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.direct(profile=REQUEST)
    profiled = bench.workers.group[1]
    await until(lambda: profiled.profiles, "it is sent")
    profiled.die()
    await until(lambda: bench.reports.profiles, "it ended")
    [ended] = bench.reports.profiles
    assert (ended.number, ended.generation) == (1, 1)
    assert ended.error.startswith("the worker of rank 1 was lost in mid-profile, after step 1")
    await bench.advance_until(lambda: bench.workers.group and bench.workers.group[0].assignment.generation == 2)
    bench.workers.form(1)
    bench.workers.train()
    await until(lambda: bench.status.step == 2, "training goes on")
    assert [worker.profiles for worker in bench.workers.group] == [[] for _ in bench.workers.group]


async def test_a_restarted_supervisor_repeats_the_request_of_its_journal() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.direct(profile=REQUEST, pinned=(str(CheckpointName(1, 1, 1)),))  # the pin is written to the journal
    profiled = bench.workers.group[1]
    await until(lambda: profiled.profiles == [(1, REQUEST)], "it is sent")
    await until(lambda: bench.entry.directive is not None and bench.entry.directive.profile == REQUEST, "journal")
    await bench.restart()
    await until(lambda: profiled.profiles == [(1, REQUEST), (1, REQUEST)], "the worker ignores a number it has had")
    profiled.report(RESULT)
    await until(lambda: bench.reports.profiles == (RESULT,), "it is reported")
