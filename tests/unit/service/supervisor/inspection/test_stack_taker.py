"""Stacks of a slow or halted group become a part of its incident; a requested profile reaches its worker."""

from doubles.event_loop import until
from doubles.supervisor_bench import SupervisorBench
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import Frame, Phase, Progress, WorkerStack
from shoal_workers.contract.profiles import Category, Profiled, ProfileRequest, StepTimes


def at(function: str) -> WorkerStack:
    return WorkerStack(worker_id="", frames=(Frame(function=function, file="a.py", line=1),), phase=Phase.FORWARD)


async def stand_still(bench: SupervisorBench) -> None:
    for index in (0, 1):
        worker = bench.worker(index)
        worker.progress = Progress(generation=1, phase=Phase.FORWARD, step=1, at=bench.clock.time(), counter=7)
        worker.print("now")
    await bench.advance_until(lambda: "has made no progress" in bench.status.note)


async def test_an_incident_of_a_group_that_stood_still_keeps_what_every_rank_did(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.worker(0).stack, bench.worker(1).stack = at("wait"), at("read")
    await stand_still(bench)
    await bench.advance_until(lambda: "wait" in bench.status.note and "read" in bench.status.note)
    await bench.advance_until(lambda: bench.reports.incidents, limit_s=120.0)
    bench.worker(0).stack = bench.worker(1).stack = at("interrupted")
    await until(lambda: "worker.stacks" in bench.events())
    [incident] = bench.reports.incidents
    assert incident.cause is IncidentCause.HUNG
    assert incident.stacks is not None
    assert [one.frames[0].function for one in incident.stacks.clusters] == ["wait", "read"]
    assert [one.ranks for one in incident.stacks.clusters] == [(0,), (1,)]
    assert bench.events().count("worker.stacks") == 1


async def test_stacks_of_a_standstill_that_ended_are_dropped(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    await stand_still(bench)
    bench.workers.train()
    await bench.advance_until(lambda: "has made no progress" not in bench.status.note)
    bench.worker(1).die()
    await bench.advance_until(lambda: bench.reports.incidents)
    [incident] = bench.reports.incidents
    assert (incident.cause, incident.stacks) == (IncidentCause.WORKER_DIED, None)
    assert "worker.stacks" not in bench.events()


async def test_stacks_are_taken_on_request_of_all_workers_or_of_one_rank(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.worker(1).stack = at("read")
    taker = bench.executor.inspection.stacks
    assert [one.ranks for one in (await taker.take("requested")).clusters] == [(0,), (1,)]
    [only] = (await taker.take("requested", rank=1)).clusters
    assert (only.ranks, only.frames[0].function) == ((1,), "read")


REQUEST = ProfileRequest(number=1, rank=1, steps=2)
RESULT = Profiled(
    generation=1, number=1, rank=1, times=(StepTimes(step=2, seconds={Category.COMPUTE: 0.1}),), held_s=0.01
)


async def test_a_request_goes_to_the_worker_of_its_rank_and_its_result_to_the_control_plane(
    bench: SupervisorBench,
) -> None:
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


async def test_a_worker_that_is_killed_in_mid_profile_ends_the_request_and_not_the_job(bench: SupervisorBench) -> None:
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


async def test_a_restarted_supervisor_repeats_the_request_of_its_journal(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.direct(profile=REQUEST, pinned=(str(CheckpointName(1, 1, 1)),))  # the pin is written to the journal
    profiled = bench.workers.group[1]
    await until(lambda: profiled.profiles == [(1, REQUEST)], "it is sent")
    await until(lambda: bench.entry.directive is not None and bench.entry.directive.profile == REQUEST, "journal")
    await bench.restart()
    await until(lambda: profiled.profiles == [(1, REQUEST), (1, REQUEST)], "the worker ignores a number it has had")
    profiled.report(RESULT)
    await until(lambda: bench.reports.profiles == (RESULT,), "it is reported")
