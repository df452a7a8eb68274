"""The stacks of a group that stands still become a part of its incident; those of a slow rank become an event."""

from doubles.event_loop import until
from doubles.supervisor_bench import SupervisorBench
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import Frame, Phase, Progress, WorkerStack


def at(function: str) -> WorkerStack:
    return WorkerStack(worker_id="", frames=(Frame(function=function, file="a.py", line=1),), phase=Phase.FORWARD)


async def stand_still(bench: SupervisorBench) -> None:
    for index in (0, 1):
        worker = bench.worker(index)
        worker.progress = Progress(generation=1, phase=Phase.FORWARD, step=1, at=bench.clock.time(), counter=7)
        worker.print("now")
    await bench.advance_until(lambda: "has made no progress" in bench.status.note)


async def test_an_incident_of_a_group_that_stood_still_keeps_what_every_rank_did() -> None:
    bench = SupervisorBench()
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


async def test_stacks_of_a_standstill_that_ended_are_dropped() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    await stand_still(bench)
    bench.workers.train()
    await bench.advance_until(lambda: "has made no progress" not in bench.status.note)
    bench.worker(1).die()
    await bench.advance_until(lambda: bench.reports.incidents)
    [incident] = bench.reports.incidents
    assert (incident.cause, incident.stacks) == (IncidentCause.WORKER_DIED, None)
    assert "worker.stacks" not in bench.events()


async def test_stacks_are_taken_on_request_of_all_workers_or_of_one_rank() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.worker(1).stack = at("read")
    taker = bench.executor.inspection.stacks
    assert [one.ranks for one in (await taker.take("requested")).clusters] == [(0,), (1,)]
    [only] = (await taker.take("requested", rank=1)).clusters
    assert (only.ranks, only.frames[0].function) == ((1,), "read")
