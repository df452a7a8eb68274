"""Passes of the control loop: what starts one, what the policy is asked, and the pause after a slow one."""

import pytest
from sqlalchemy import insert, select

from doubles.control_bench import ControlBench, node
from doubles.event_loop import settle
from shoal_service.clusters.wire import Reservation, RoomKind
from shoal_service.control.control_loop import pauses_after
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.explaining import GrowthLimit
from shoal_service.core.scheduling.market import Decision, MarketState, Preempt, Resize, Start, WorkerNeed
from shoal_service.reports import PendingEvent
from shoal_service.store import histories, queueing, submissions
from shoal_service.store.database import job_specs, jobs
from shoal_service.store.store import Store
from shoal_service.views import ElasticityPatch, JobPatch, JobStatus
from shoal_workers.contract.ids import worker_name
from shoal_workers.contract.job import EndReason, JobState


async def test_a_new_job_starts_a_pass_without_waiting_for_the_period(bench: ControlBench) -> None:
    async with bench.running():
        await bench.clock.advance(0.21)
        job_id = bench.submit()
        await settle()
        assert bench.state(job_id) is JobState.STARTING


async def test_a_request_does_not_wait_for_the_end_of_the_pause_after_a_slow_pass_and_a_report_does(
    store: Store,
) -> None:
    passes: list[float] = []

    def policy(state: MarketState, now: float) -> list[Decision]:
        bench.clock.take(0.1)
        passes.append(bench.clock.time())
        return decide(state, now)

    bench = ControlBench(store, policy=policy)
    job_id = bench.submit()
    async with bench.running():
        await bench.clock.advance(3.0)
        del passes[:]
        await bench.clock.advance(2.0)
        last = passes[-1]
        await bench.clock.advance(last + 0.3 - bench.clock.time())
        bench.cluster.supervisors[job_id, 1].report(PendingEvent(at=0.0, type="generation.formed", data={}))
        await bench.clock.advance(0.2)
        assert passes[-1] == last, "the pause is nine times as long as the pass"
        bench.submit()
        await settle()
        assert passes[-1] > last


async def test_a_job_that_does_not_fit_waits_with_a_note_and_starts_when_there_is_room(store: Store) -> None:
    bench = ControlBench(store, node(cpus=1.0))
    job_id = bench.submit(elasticity={"min_workers": 2, "max_workers": 2})
    async with bench.running():
        waiting = store.get_job(job_id).status
        assert (waiting.state, waiting.reason) == (JobState.QUEUED, "capacity") and waiting.message
        assert bench.cluster.supervisors == {}
        bench.cluster.nodes = (node(cpus=1.0), node("n2", cpus=1.0))
        await bench.clock.advance(3.0)
        assert bench.state(job_id) is JobState.STARTING


async def test_a_thousand_jobs_that_can_never_fit_do_not_hide_the_next_one(store: Store, bench: ControlBench) -> None:
    bench.submit(elasticity={"min_workers": 9, "max_workers": 9})
    with store._database.write() as tx:  # a copy of the row takes less time than a submission
        [job], [spec] = (tx.execute(select(table)).mappings().all() for table in (jobs, job_specs))
        copies = range(job["num"] + 1, job["num"] + 1001)
        tx.execute(insert(jobs), [{**job, "num": num, "id": f"job-{num}"} for num in copies])
        tx.execute(insert(job_specs), [{**spec, "job_num": num} for num in copies])
    fits = bench.submit()
    async with bench.running():
        assert bench.state(fits) is JobState.STARTING


async def test_a_node_that_comes_starts_a_pass_without_waiting_for_the_period(store: Store) -> None:
    bench = ControlBench(store, node(cpus=1.0))
    job_id = bench.submit(elasticity={"min_workers": 2, "max_workers": 2})
    async with bench.running():
        await bench.clock.advance(0.21)
        bench.cluster.change_nodes(node(cpus=1.0), node("n2", cpus=1.0))
        await settle()
        assert bench.state(job_id) is JobState.STARTING


async def test_resources_that_others_have_reserved_are_not_granted(store: Store) -> None:
    bench = ControlBench(store, node(cpus=4.0))
    bench.cluster.foreign = {"n1": 3.0}
    first = bench.submit(elasticity={"min_workers": 1, "max_workers": 4}, priority=1)
    second = bench.submit(elasticity={"min_workers": 1, "max_workers": 4})
    async with bench.running():
        assert store.get_job(first).status.desired_workers == 1
        assert bench.state(second) is JobState.QUEUED
        [seen] = bench.loop.snapshot().nodes
        assert (seen.cpus_of_others, seen.gpus_of_others) == (3.0, 0.0)
        bench.cluster.foreign = {}
        await bench.clock.advance(3.0)
        assert bench.state(second) is JobState.STARTING


async def test_the_reason_of_a_start_is_in_the_history_of_the_job(store: Store, bench: ControlBench) -> None:
    job_id = bench.submit()
    async with bench.running():
        [started] = [event for event in store.reading(histories.read_events)(job_id) if event.type == "job.state"]
        assert (
            started.data["message"] == "Starting with 2 workers of 1 to 2 (1 CPU each)."
            and started.data["workers"] == 2
        )


async def test_a_preempted_attempt_saves_and_ends_and_its_job_returns_to_the_queue(store: Store) -> None:
    preempted = False

    def policy(state: MarketState, now: float) -> list[Decision]:
        if state.jobs[0].granted or preempted:
            return [] if preempted else [Preempt(state.jobs[0].job_id, "priority 50 before 0.", "job-b")]
        return [Start(state.jobs[0].job_id, 2, "there is room.")]

    bench = ControlBench(store, policy=policy)
    job_id = bench.submit()
    async with bench.running():
        supervisor = bench.cluster.supervisors[job_id, 1]
        supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, workers=2, step=7, checkpoint_step=4), ())
        supervisor.report()
        await bench.clock.advance(2.0)
        preempted = True
        assert supervisor.directives[-1].is_preempted and supervisor.directives[-1].granted == 2
        events = {event.type: event for event in store.reading(histories.read_events)(job_id)}
        assert events["job.preempted"].data == {
            "workers": 2,
            "beneficiary": "job-b",
            "reason": "priority 50 before 0.",
        }
        assert bench.cluster.supervisors[job_id, 1] is supervisor and bench.state(job_id) is JobState.RUNNING
        supervisor.outbox.set_status(
            JobStatus(state=JobState.PAUSING, reason="preempted", workers=2, step=8, checkpoint_step=8), ()
        )
        supervisor.end(AttemptEnd(reason=EndReason.PREEMPTED, message="saved at step 8.", step=8))
        await bench.clock.advance(1.0)
        status = store.get_job(job_id).status
        assert (status.state, status.step, status.lost) == (JobState.QUEUED, 8, None)


async def test_workers_are_taken_before_they_are_given_and_both_in_one_pass(store: Store) -> None:
    def policy(state: MarketState, now: float) -> list[Decision]:
        first, *others = sorted(state.jobs, key=lambda job: job.submitted_at)
        if not first.granted:
            return [Start(first.job_id, 4, "there is room.")]
        return [Start(other.job_id, 3, "urgent.") for other in others if not other.granted] + [
            Resize(first.job_id, 1, "gave 3 workers to another job.") for other in others if not other.granted
        ]

    bench = ControlBench(store, node(cpus=4.0), policy=policy)
    first = bench.submit(elasticity={"min_workers": 1, "max_workers": 4})
    async with bench.running():
        second = bench.submit(elasticity={"min_workers": 1, "max_workers": 4})
        await bench.clock.advance(0.25)
        assert bench.cluster.supervisors[first, 1].directives[-1].granted == 1
        assert bench.cluster.supervisors[second, 1].config.granted == 3
        [granted] = [event for event in store.reading(histories.read_events)(first) if event.type == "job.granted"]
        assert granted.data == {"from": 4, "to": 1, "reason": "gave 3 workers to another job."}


async def test_the_policy_is_asked_again_only_when_something_has_changed_or_after_some_seconds(store: Store) -> None:
    asked: list[float] = []

    def policy(state: MarketState, now: float) -> list[Decision]:
        asked.append(now)
        return []

    bench = ControlBench(store, policy=policy)
    bench.submit()
    async with bench.running():
        await bench.clock.advance(20.0)
        assert 5 <= len(asked) <= 12, "every two seconds or so"
        del asked[:]
        bench.submit()
        await settle()
        await bench.clock.advance(0.3)
        assert len(asked) == 1


async def test_unmet_demand_is_asked_of_the_autoscaler_once_and_given_back(store: Store) -> None:
    bench = ControlBench(store, node(cpus=1.0), scale_out=True)
    job_id = bench.submit(elasticity={"min_workers": 2, "max_workers": 2})
    async with bench.running():
        await bench.clock.advance(10.0)
        assert bench.cluster.requested == [{RoomKind(WorkerNeed(cpus=1.0)): 2}]
        store.writing(submissions.request)(job_id, Desired.CANCEL, now=bench.clock.time())
        await bench.clock.advance(3.0)
        assert bench.cluster.requested == [{RoomKind(WorkerNeed(cpus=1.0)): 2}, {}]


async def test_a_scale_up_that_does_not_pay_is_refused_with_the_reason_in_history_status_and_queue(
    store: Store,
) -> None:
    bench = ControlBench(store, node(cpus=4.0))
    job_id = bench.submit(elasticity={"min_workers": 1, "max_workers": 1}, stop={"steps": 100})
    async with bench.running():
        supervisor = bench.cluster.supervisors[job_id, 1]
        for step in (50, 99):  # it is measured over some steps
            fields = {"workers": 1, "generation": 1, "step": step, "total_steps": 100, "eta_s": 0.2 * (100 - step)}
            supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, **fields), ())
            supervisor.report(PendingEvent(at=0.0, type="generation.formed", data={}))
            await bench.clock.advance(6.0)
        assert store.get_job(job_id).status.held_back is None, "it has all that it may have"
        store.writing(submissions.patch)(
            job_id, JobPatch(elasticity=ElasticityPatch(max_workers=4)), if_match=None, now=0.0
        )
        await bench.clock.advance(1.0)
        status = store.get_job(job_id).status
        assert status.desired_workers == 1 and status.held_back is not None
        answer = status.held_back
        assert answer.limit is GrowthLimit.PAUSE_COSTS_MORE and "costs a pause of" in answer.reason
        [event] = [event for event in store.reading(histories.read_events)(job_id) if event.type == "job.held_back"]
        assert event.message == f"stays at 1 of 4 workers: {event.data['reason']}"
        assert [one.job_id for one in store.reading(queueing.view)().held_back] == [job_id]


async def test_processes_are_expected_where_another_job_gives_workers_back(store: Store) -> None:
    bench = ControlBench(store, node(cpus=2.0), node("n2", cpus=2.0))
    holder = bench.submit(elasticity={"min_workers": 1, "max_workers": 4})
    async with bench.running():
        assert bench.cluster.places[holder] == {}, "the nodes were free"
        bench.cluster.reservations = [
            Reservation(worker_name(holder, 1, index), holder, f"n{index // 2 + 1}", WorkerNeed(cpus=1.0))
            for index in range(4)
        ]
        await bench.clock.advance(3.0)
        urgent = bench.submit(elasticity={"min_workers": 2, "max_workers": 2}, priority=50)
        await bench.clock.advance(3.0)
        assert bench.state(urgent) is JobState.STARTING
        assert bench.cluster.places[urgent] == {"n2": 2}


@pytest.mark.parametrize(
    ("pass_s", "requested_s", "reported_s"),
    [(0.0, 0.2, 0.2), (0.05, 0.2, 0.45), (0.3, 0.3, 1.0), (20.0, 1.0, 1.0)],
)
def test_a_request_waits_for_a_shorter_pause_than_reports_do(
    pass_s: float, requested_s: float, reported_s: float
) -> None:
    assert pauses_after(pass_s) == pytest.approx((requested_s, reported_s))
