"""The control loop with a real store, a fake cluster and a fake clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from doubles.event_loop import run, settle
from doubles.fake_clock import FakeClock
from doubles.fake_cluster import FakeCluster
from shoal_service.cluster.errors import ClusterUnreachable, ConnectionStale
from shoal_service.control.config import ControlConfig
from shoal_service.control.control_loop import ControlLoop
from shoal_service.control.market.interim import first_come
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.nodes import FIRST_TEST_S, Node
from shoal_service.core.scheduling.market import Decision, MarketState, Policy, Preempt, Resize, Start
from shoal_service.reports import SuspectedNode
from shoal_service.store.store import Store
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, JobState

SPEC: dict[str, Any] = {
    "data": {"corpus": "python-stdlib"},
    "stop": {"steps": 4},
    "elasticity": {"min_workers": 1, "max_workers": 2},
}


def node(name: str = "n1", *, cpus: float = 2.0, alive: bool = True) -> Node:
    return Node(node_id=name, ip="10.0.0.1", alive=alive, cpus=cpus, gpus=0.0, memory_gib=8.0)


class Bench:
    def __init__(self, store: Store, *nodes: Node, owner: str = "me", policy: Policy = first_come) -> None:
        self.store = store
        self.clock = FakeClock()
        self.cluster = FakeCluster(nodes or (node(),))
        self.num_reconnected = 0
        config = ControlConfig(owner=owner, lease_ttl_s=9.0, checkpoint_url="/checkpoints")
        self.loop = ControlLoop(store, self.cluster, self.clock, config, policy=policy, reconnected=self._reconnected)

    def _reconnected(self) -> None:
        self.num_reconnected += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """After the first pass."""
        stop = asyncio.Event()
        task = asyncio.create_task(self.loop.run(stop))
        await settle()
        yield
        stop.set()
        await self.clock.advance(5.0)
        await task

    def submit(self, **spec: Any) -> str:
        document = parse_spec({**SPEC, **spec})
        return self.store.create_job(document, idempotency_key=None, now=self.clock.time())[0].id

    def state(self, job_id: str) -> JobState:
        return self.store.get_job(job_id).status.state


def test_a_job_that_cannot_be_read_is_quarantined_and_the_next_one_is_started(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        bad, good = bench.submit(), bench.submit()
        with store._database.write() as tx:
            tx.exec_driver_sql("UPDATE job_specs SET document = '{\"shards\": 3}' WHERE job_num = 1")
        async with bench.running():
            assert bench.state(good) is JobState.STARTING and bench.state(bad) is JobState.QUEUED
            await bench.clock.advance(5.0)
            events = [event.type for event in store.events(bad)]
            assert events.count("job.quarantined") == 1
            assert store.get_job(bad).status.reason == "quarantined"

    run(main())


def test_a_queued_job_that_fits_is_started_with_its_supervisor(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        job_id = bench.submit()
        async with bench.running():
            assert bench.state(job_id) is JobState.STARTING
            supervisor = bench.cluster.supervisors[job_id, 1]
            assert supervisor.config.granted == 2 and supervisor.config.epoch == 1
        assert store.current_lease() is None, "released at the end"
        assert not supervisor.is_released, "the supervisor goes on without a control plane"

    run(main())


def test_a_new_job_starts_a_pass_without_waiting_for_the_period(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        async with bench.running():
            await bench.clock.advance(0.21)
            job_id = bench.submit()
            await settle()
            assert bench.state(job_id) is JobState.STARTING

    run(main())


def test_a_job_that_does_not_fit_waits_with_a_note_and_starts_when_there_is_room(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store, node(cpus=1.0))
        job_id = bench.submit(elasticity={"min_workers": 2, "max_workers": 2})
        async with bench.running():
            waiting = store.get_job(job_id).status
            assert (waiting.state, waiting.reason) == (JobState.QUEUED, "capacity") and waiting.message
            assert bench.cluster.supervisors == {}
            bench.cluster.nodes = (node(cpus=1.0), node("n2", cpus=1.0))
            await bench.clock.advance(3.0)
            assert bench.state(job_id) is JobState.STARTING

    run(main())


def test_capacity_that_a_finished_job_returns_goes_to_the_next_one(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        first = bench.submit(elasticity={"min_workers": 2, "max_workers": 2})
        async with bench.running():
            await bench.clock.advance(1.0)
            second = bench.submit(elasticity={"min_workers": 2, "max_workers": 2})
            await bench.clock.advance(2.0)
            assert (bench.state(first), bench.state(second)) == (JobState.STARTING, JobState.QUEUED)
            bench.cluster.supervisors[first, 1].end(AttemptEnd(reason=EndReason.FINISHED, message="done", step=4))
            await bench.clock.advance(3.0)
            assert (bench.state(first), bench.state(second)) == (JobState.SUCCEEDED, JobState.STARTING)

    run(main())


def test_a_thousand_jobs_that_can_never_fit_do_not_hide_the_next_one(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        for _ in range(1001):
            bench.submit(elasticity={"min_workers": 9, "max_workers": 9})
        fits = bench.submit()
        async with bench.running():
            assert bench.state(fits) is JobState.STARTING

    run(main())


def test_a_node_that_comes_starts_a_pass_without_waiting_for_the_period(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store, node(cpus=1.0))
        job_id = bench.submit(elasticity={"min_workers": 2, "max_workers": 2})
        async with bench.running():
            await bench.clock.advance(0.21)
            bench.cluster.change_nodes(node(cpus=1.0), node("n2", cpus=1.0))
            await settle()
            assert bench.state(job_id) is JobState.STARTING

    run(main())


def test_resources_that_others_have_reserved_are_not_granted(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store, node(cpus=4.0))
        bench.cluster.foreign = {"n1": 3.0}
        first = bench.submit(elasticity={"min_workers": 1, "max_workers": 4}, priority=1)
        second = bench.submit(elasticity={"min_workers": 1, "max_workers": 4})
        async with bench.running():
            assert store.get_job(first).status.desired_workers == 1
            assert bench.state(second) is JobState.QUEUED
            bench.cluster.foreign = {}
            await bench.clock.advance(3.0)
            assert bench.state(second) is JobState.STARTING

    run(main())


def test_the_reason_of_a_start_is_in_the_history_of_the_job(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        job_id = bench.submit()
        async with bench.running():
            [started] = [event for event in store.events(job_id) if event.type == "job.state"]
            assert started.data["message"].startswith("Starts with 2 workers. ") and started.data["workers"] == 2

    run(main())


def test_a_preempted_attempt_saves_and_ends_and_its_job_returns_to_the_queue(store: Store) -> None:
    async def main() -> None:
        preempted = False

        def policy(state: MarketState, now: float) -> list[Decision]:
            if state.jobs[0].granted or preempted:
                return [] if preempted else [Preempt(state.jobs[0].job_id, "priority 50 before 0.", "job-b")]
            return [Start(state.jobs[0].job_id, 2, "there is room.")]

        bench = Bench(store, policy=policy)
        job_id = bench.submit()
        async with bench.running():
            supervisor = bench.cluster.supervisors[job_id, 1]
            supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, workers=2, step=7, checkpoint_step=4), ())
            supervisor.report()
            await bench.clock.advance(2.0)
            preempted = True
            assert supervisor.directives[-1].is_preempted and supervisor.directives[-1].granted == 2
            events = {event.type: event for event in store.events(job_id)}
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

    run(main())


def test_workers_are_taken_before_they_are_given_and_both_in_one_pass(store: Store) -> None:
    async def main() -> None:
        def policy(state: MarketState, now: float) -> list[Decision]:
            first, *others = sorted(state.jobs, key=lambda job: job.submitted_at)
            if not first.granted:
                return [Start(first.job_id, 4, "there is room.")]
            return [Start(other.job_id, 3, "urgent.") for other in others if not other.granted] + [
                Resize(first.job_id, 1, "gave 3 workers to another job.") for other in others if not other.granted
            ]

        bench = Bench(store, node(cpus=4.0), policy=policy)
        first = bench.submit(elasticity={"min_workers": 1, "max_workers": 4})
        async with bench.running():
            second = bench.submit(elasticity={"min_workers": 1, "max_workers": 4})
            await bench.clock.advance(0.25)
            assert bench.cluster.supervisors[first, 1].directives[-1].granted == 1
            assert bench.cluster.supervisors[second, 1].config.granted == 3
            [granted] = [event for event in store.events(first) if event.type == "job.granted"]
            assert granted.data == {"from": 4, "to": 1, "reason": "gave 3 workers to another job."}

    run(main())


def test_the_policy_is_asked_again_only_when_something_has_changed_or_after_some_seconds(store: Store) -> None:
    async def main() -> None:
        asked: list[float] = []

        def policy(state: MarketState, now: float) -> list[Decision]:
            asked.append(now)
            return []

        bench = Bench(store, policy=policy)
        bench.submit()
        async with bench.running():
            await bench.clock.advance(20.0)
            assert 5 <= len(asked) <= 12, "every two seconds or so"
            del asked[:]
            bench.submit()
            await settle()
            await bench.clock.advance(0.3)
            assert len(asked) == 1

    run(main())


def test_nothing_is_driven_while_another_control_plane_holds_the_lease(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        store.acquire_lease("other", ttl_s=6.0, now=bench.clock.time())
        job_id = bench.submit()
        async with bench.running():
            assert bench.state(job_id) is JobState.QUEUED
            assert bench.loop.snapshot().connected and bench.loop.snapshot().owner == "other"
            await bench.clock.advance(5.0)
            assert bench.state(job_id) is JobState.QUEUED
            await bench.clock.advance(4.0)
            assert bench.state(job_id) is JobState.STARTING, "the other's lease has expired"
            assert bench.loop.snapshot().owner == "me" and bench.loop.snapshot().epoch == 2

    run(main())


def test_the_lease_is_renewed_before_it_expires(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        async with bench.running():
            for _ in range(10):
                await bench.clock.advance(3.0)
                assert store.acquire_lease("other", ttl_s=9.0, now=bench.clock.time()) is None
            lease = store.current_lease()
            assert lease is not None and (lease.owner, lease.epoch) == ("me", 1)

    run(main())


def test_a_lost_lease_ends_the_driving_and_is_taken_again_when_it_is_free(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        job_id = bench.submit()
        async with bench.running():
            supervisor = bench.cluster.supervisors[job_id, 1]
            store.release_lease("me")
            store.acquire_lease("other", ttl_s=30.0, now=bench.clock.time())
            supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=1), ())
            await bench.clock.advance(9.0)
            num_pulls = len(supervisor.pulls)
            await bench.clock.advance(9.0)
            assert len(supervisor.pulls) == num_pulls, "nothing is pulled without the lease"
            store.release_lease("other")
            await bench.clock.advance(3.0)
            assert bench.state(job_id) is JobState.RUNNING
            assert bench.loop.snapshot().epoch == 3

    run(main())


def test_an_unreachable_head_keeps_the_last_view_and_supervisors_get_directives(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        job_id = bench.submit()
        async with bench.running():
            bench.cluster.error = ClusterUnreachable("no answer")
            await bench.clock.advance(3.0)
            view = bench.loop.snapshot()
            assert not view.connected and [n.node_id for n in view.nodes] == ["n1"]
            queued = bench.submit()
            store.request(job_id, Desired.PAUSE, now=bench.clock.time())
            await bench.clock.advance(3.0)
            assert bench.cluster.supervisors[job_id, 1].directives[-1].desired is Desired.PAUSE
            assert bench.state(queued) is JobState.QUEUED, "without the head nothing is started"
            bench.cluster.error = None
            await bench.clock.advance(3.0)
            assert bench.loop.snapshot().connected

    run(main())


def test_a_stale_connection_is_renewed_after_the_drivers_have_ended(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        job_id = bench.submit()
        async with bench.running():
            supervisor = bench.cluster.supervisors[job_id, 1]
            bench.cluster.error = ConnectionStale("the raylet of this driver is dead")
            await bench.clock.advance(6.0)
            assert bench.cluster.num_reconnects == bench.num_reconnected == 1
            supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=2), ())
            supervisor.report()
            await bench.clock.advance(3.0)
            assert bench.state(job_id) is JobState.RUNNING, "a new driver follows the same supervisor"

    run(main())


def test_a_failed_driver_is_replaced_in_the_next_pass(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        job_id = bench.submit()
        async with bench.running():
            supervisor = bench.cluster.supervisors[job_id, 1]
            supervisor.epoch = 99  # it obeys a newer control plane, for a moment
            supervisor.report()
            await bench.clock.advance(0.5)
            supervisor.epoch = 1
            supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=2), ())
            await bench.clock.advance(4.0)
            assert bench.state(job_id) is JobState.RUNNING

    run(main())


def test_a_suspected_node_is_not_used_until_its_test_has_passed(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store, node(), node("n2"))
        job_id = bench.submit()
        async with bench.running():
            supervisor = bench.cluster.supervisors[job_id, 1]
            supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=2), ())
            supervisor.report(SuspectedNode(at=bench.clock.time(), node_id="n2", reason="computes wrong"))
            await bench.clock.advance(2.5)
            assert [n.node_id for n in supervisor.directives[-1].avoid] == ["n2"]
            probation_s = store.get_job(job_id).spec.health.probation_s
            await bench.clock.advance(FIRST_TEST_S + 3.0)
            assert bench.cluster.tested == [("n2", "n1")]
            assert [n.node_id for n in supervisor.directives[-1].avoid] == ["n2"], (
                "a test that passes early is repeated"
            )
            await bench.clock.advance(probation_s)
            assert bench.cluster.tested == [("n2", "n1")] * 2
            await bench.clock.advance(3.0)
            assert supervisor.directives[-1].avoid == ()

    run(main())


def test_a_suspicion_of_one_job_keeps_the_node_for_others_until_a_second_job_shares_it(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store, node(cpus=4.0), node("n2", cpus=4.0))
        first, second = bench.submit(), bench.submit()
        async with bench.running():
            one, other = bench.cluster.supervisors[first, 1], bench.cluster.supervisors[second, 1]
            for supervisor in (one, other):
                supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=2), ())
                supervisor.report()
            one.report(SuspectedNode(at=bench.clock.time(), node_id="n2", reason="replay"))
            await bench.clock.advance(2.5)
            assert [n.node_id for n in one.directives[-1].avoid] == ["n2"]
            assert other.directives[-1].avoid == ()
            other.report(SuspectedNode(at=bench.clock.time(), node_id="n2", reason="the GPU failed"))
            await bench.clock.advance(2.5)
            assert [n.reason for n in other.directives[-1].avoid] == ["on probation: the GPU failed"]

    run(main())


def test_a_node_that_fails_its_test_stays_on_probation(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store, node(), node("n2"))
        bench.cluster.fault = "computes wrong"
        job_id = bench.submit()
        async with bench.running():
            supervisor = bench.cluster.supervisors[job_id, 1]
            supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=2), ())
            supervisor.report(SuspectedNode(at=bench.clock.time(), node_id="n2", reason="a collective hung"))
            await bench.clock.advance(FIRST_TEST_S + 6.0)
            assert bench.cluster.tested == [("n2", "n1")]
            [shown] = [n for n in bench.loop.snapshot().nodes if n.node_id == "n2"]
            assert "failed test 1: computes wrong" in shown.suspected and shown.on_probation
            assert supervisor.directives[-1].avoid != ()

    run(main())


def test_a_server_that_stops_saves_every_attempt_and_starts_none(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        job_id = bench.submit()
        shown: list[list[str]] = []
        stop = asyncio.Event()
        task = asyncio.create_task(bench.loop.run(stop))
        await settle()
        supervisor = bench.cluster.supervisors[job_id, 1]
        assert [directive.server_stops for directive in supervisor.directives] == [False]

        bench.loop.save_and_end(lambda rows: shown.append([row.id for row in rows]))
        await bench.clock.advance(1.0)
        assert supervisor.directives[-1].server_stops and supervisor.directives[-1].desired is Desired.RUN
        assert shown[-1] == [job_id] and not task.done()

        supervisor.end(AttemptEnd(reason=EndReason.SERVER_STOPPED, message="saved at step 3.", step=3))
        await bench.clock.advance(3.0)
        assert task.done(), "nothing is left to save"
        status = store.get_job(job_id).status
        assert (status.state, status.attempt, status.reason) == (JobState.QUEUED, 1, "server_stopped")
        assert supervisor.is_released and store.current_lease() is None

    run(main())


def test_a_server_that_is_hurried_notes_what_it_did_not_save(store: Store) -> None:
    async def main() -> None:
        bench = Bench(store)
        job_id = bench.submit()
        async with bench.running():
            supervisor = bench.cluster.supervisors[job_id, 1]
            supervisor.outbox.set_status(
                JobStatus(state=JobState.RUNNING, attempt=1, generation=2, workers=2, step=9, checkpoint_step=4), ()
            )
            supervisor.report()
            await bench.clock.advance(1.0)
            bench.loop.save_and_end(lambda rows: None)
        status = store.get_job(job_id).status
        assert (status.state, status.reason, status.step) == (JobState.QUEUED, "cluster_lost", 9)
        assert status.lost is not None
        assert (status.lost.attempt, status.lost.generation, status.lost.workers, status.lost.step) == (1, 2, 2, 9)

    run(main())


def test_the_lease_is_renewed_after_the_wall_clock_was_set_back(store: Store) -> None:
    """Another machine, whose clock was not, would take it."""

    async def main() -> None:
        bench = Bench(store)
        async with bench.running():
            bench.clock.jump(-3600.0)
            await bench.clock.advance(5.0)
            lease = store.current_lease()
            assert lease is not None and lease.expires_at <= bench.clock.time() + 9.0

    run(main())
