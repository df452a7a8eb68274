"""The executor with fakes all around it: events in, commands out, the journal before the commands."""

from doubles.event_loop import settle, until
from doubles.supervisor_bench import SPEC, SupervisorBench
from shoal_service.cluster.node_table import NodeTable
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.desired import Desired
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase


async def test_an_attempt_starts_trains_commits_and_ends() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    assert bench.stage is Stage.RUNNING
    assert [start.index for start in bench.fleet.starts] == [0, 1]
    bench.workers.train(3)
    bench.workers.finish()
    end = await bench.end()
    assert (end.reason, end.step) == (EndReason.FINISHED, 4)
    assert [name.step for name in bench.catalog.markers] == [4]
    reports = bench.reports
    assert [point.step for point in reports.series] == [1, 2, 3, 4]
    assert [(view.step, view.state) for view in reports.checkpoints] == [(4, "committed")]


async def test_the_journal_is_written_before_the_commands_are_performed() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    first_calls = [bench.log.index("start"), bench.log.index("run")]
    assert all("journal" in bench.log[:at] for at in first_calls)
    before_run = bench.log[bench.log.index("start") : bench.log.index("run")]
    assert "journal" in before_run, "the assignments are in the journal before the workers get them"


async def test_the_newest_step_is_in_the_journal_after_two_seconds_without_a_command() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    for _ in range(2):
        await bench.clock.advance(2.1)
        bench.workers.train()
    await until(lambda: bench.entry.state.progress.step == 3)


async def test_an_unusable_storage_ends_the_attempt_before_a_worker_starts() -> None:
    bench = SupervisorBench()
    bench.catalog.is_unusable = True
    bench.start()
    end = await bench.end()
    assert end.reason is EndReason.STORAGE_FAILED and "permission denied" in end.message
    assert bench.fleet.starts == []


async def test_user_code_that_cannot_be_loaded_ends_the_attempt() -> None:
    bench = SupervisorBench()
    bench.workers.start_error = ErrorReport(
        type="ImportError", message="no torchvision", traceback="...", phase=Phase.PREPARING
    )
    bench.start()
    end = await bench.end()
    assert end.failure is not None and end.failure.type == "ImportError"


async def test_a_lost_worker_is_replaced_and_the_group_forms_again() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    survivor, lost = bench.workers.group
    lost.die()
    await bench.advance_until(lambda: survivor.assignment is not None and survivor.assignment.generation == 2)
    bench.workers.form(start_step=0)
    bench.workers.train()
    await bench.advance_until(lambda: survivor.yields)
    survivor.leave(ExitKind.YIELDED)
    await bench.advance_until(lambda: len(bench.workers.group) == 2)
    first, second = bench.workers.group
    assert first is survivor and second.info.worker_id == bench.fleet.starts[2].worker_id
    assert second.assignment is not None and second.assignment.generation == 3
    [incident] = bench.reports.incidents
    assert (incident.cause, incident.ranks, incident.closed) == (IncidentCause.WORKER_DIED, (1,), True)


async def test_survivors_are_interrupted_and_their_snapshots_are_not_forgotten() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    survivor = bench.workers.group[0]
    bench.workers.group[1].die()
    await bench.clock.advance(1.0)
    assert survivor.interrupts == [1] and survivor.num_forgotten == 0


async def test_a_dead_node_is_one_loss_of_all_its_workers() -> None:
    bench = SupervisorBench()
    bench.fleet.node_of = {0: "doomed", 1: "doomed"}
    await bench.start_and_train()
    bench.nodes.show(NodeTable(dead=frozenset({"doomed"})))
    await settle()
    assert not bench.fleet.knows(0) and not bench.fleet.knows(1)
    assert bench.fleet.killed == [], "the head knows that they are dead"
    [incident] = bench.reports.incidents
    assert (incident.cause, incident.ranks, incident.node_id) == (IncidentCause.NODE_DIED, (0, 1), "doomed")
    assert incident.witness == "node watch"


async def test_the_hosts_of_the_workers_and_of_the_head_are_watched_and_a_silent_one_is_left_out() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    [first, second] = [bench.worker(index).info.node_id for index in (0, 1)]
    raylets = {first: ("10.0.0.1", 1), second: ("10.0.0.2", 2), "head": ("10.0.0.3", 3), "other": ("10.0.0.4", 4)}
    bench.nodes.show(NodeTable(raylets=raylets, head="head"))
    await settle()
    assert sorted(bench.hosts.watched) == sorted({first, second, "head"}) and bench.hosts.head == "head"
    bench.worker(1).cut_off()
    await bench.clock.advance(2.0)
    bench.hosts.show({second: "no answer to 6 connects in 1.6 s"})
    await bench.advance_until(lambda: [w.info for w in bench.workers.group] == [bench.worker(0).info])
    assert "node.silent" in bench.events() and "worker.lost" not in bench.events()


async def test_a_restarted_supervisor_knows_which_nodes_were_silent() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    worker = bench.worker(1)
    node_id = worker.info.node_id
    worker.cut_off()
    await bench.clock.advance(2.0)
    bench.hosts.show({node_id: "no answer to 6 connects in 1.6 s"})
    await bench.advance_until(lambda: len(bench.workers.group) == 1 and bench.stage is Stage.FORMING)
    await bench.restart()
    await settle()
    assert bench.hosts.silent_at_start == {node_id}
    worker.reconnect()
    bench.hosts.show({})
    await bench.advance_until(lambda: 1 in worker.interrupts)


async def test_a_directive_changes_what_differs_and_a_repeated_one_changes_nothing() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    written = len(bench.journal.written)
    bench.direct()
    await settle()
    bench.direct()
    await settle()
    assert len(bench.journal.written) == written, "nothing differs from the attempt's own values"

    bench.direct(granted=1)
    await until(lambda: bench.entry.state.target.granted == 1)
    bench.direct(granted=1, elasticity=SPEC.elasticity.model_copy(update={"wait_s": 7.0}))
    await until(lambda: bench.entry.state.target.spec.elasticity.wait_s == 7.0)
    assert bench.entry.directive is not None and bench.entry.directive.granted == 1
    assert bench.reports.status.observed_generation == 2


async def test_a_smaller_grant_asks_the_group_to_stop_at_the_next_step() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.direct(granted=1)
    await until(lambda: bench.workers.group[0].yields)
    assert bench.stage is Stage.SWITCHING
    for worker in bench.workers.group:
        worker.leave(ExitKind.YIELDED)
    await until(lambda: len(bench.workers.group) == 1)


async def test_avoided_nodes_are_those_of_the_directive_and_those_that_ray_drains() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.direct(avoid=(AvoidedNode(node_id="a", reason="drain requested"),))
    bench.nodes.show(NodeTable(draining={"b": 9000.0}))
    await until(lambda: len(bench.entry.state.target.avoided) == 2)
    by_ray = bench.entry.state.target.avoided[1]
    assert (by_ray.node_id, by_ray.reason, by_ray.deadline) == ("b", "drained by Ray", 9000.0)
    bench.nodes.show(NodeTable())
    await until(lambda: [node.node_id for node in bench.entry.state.target.avoided] == ["a"])


async def test_directives_after_the_end_are_ignored() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.direct(desired=Desired.CANCEL)
    await bench.end()
    bench.direct(granted=1)
    await settle()
    assert bench.entry.end is not None


async def test_a_failed_commit_is_reported_and_training_continues() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.catalog.is_away = True
    for worker in bench.workers.group:
        worker.save()
    await until(lambda: "checkpoint.failed" in bench.events())
    assert bench.stage is Stage.RUNNING
    assert [view.state for view in bench.reports.checkpoints] == ["failed"]


async def test_a_supervisor_with_a_successor_commits_nothing() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.storage.starts.append(bench.clock.time() + 1)  # its successor, on another node
    for worker in bench.workers.group:
        worker.save()
    await settle()
    assert bench.catalog.markers == {}


class TestRestart:
    async def test_live_workers_are_found_and_continue_training(self) -> None:
        bench = SupervisorBench()
        await bench.start_and_train()
        await bench.restart()
        await until(lambda: "supervisor.restarted" in bench.events())
        [event] = [e for e in bench.reports.events if str(e.type) == "supervisor.restarted"]
        assert (event.data["found"], event.data["of"]) == (2, 2)
        assert bench.fleet.starts == [] and bench.reports.incidents == ()
        bench.workers.train(3)
        bench.workers.finish()
        assert (await bench.end()).reason is EndReason.FINISHED

    async def test_dead_workers_are_lost_and_replaced(self) -> None:
        bench = SupervisorBench()
        await bench.start_and_train()
        bench.workers.group[1].die()
        await bench.restart()
        survivor = bench.workers.group[0]
        await bench.advance_until(lambda: survivor.assignment is not None and survivor.assignment.life == 2)
        bench.workers.form()
        bench.workers.train()
        await bench.advance_until(lambda: bench.fleet.starts)
        [incident] = bench.reports.incidents
        assert (incident.witness, incident.ranks) == ("name lookup", (1,))
        assert [start.index for start in bench.fleet.starts] == [2]

    async def test_workers_that_died_with_their_node_are_lost_by_the_death_of_the_node(self) -> None:
        bench = SupervisorBench()
        await bench.start_and_train()
        bench.workers.group[1].die()
        await bench.restart(dead_nodes=frozenset({"node-1"}))
        await settle()
        [incident] = bench.reports.incidents
        assert (incident.cause, incident.node_id) == (IncidentCause.NODE_DIED, "node-1")

    async def test_a_run_that_ended_meanwhile_is_joined(self) -> None:
        bench = SupervisorBench()
        await bench.start_and_train()
        bench.workers.train(3)
        await until(lambda: bench.status.step == 4)
        bench.workers.finish()
        await bench.restart()
        assert (await bench.end()).reason is EndReason.FINISHED

    async def test_a_worker_that_was_still_starting_is_prepared_again(self) -> None:
        bench = SupervisorBench()
        bench.start()
        await until(lambda: len(bench.fleet.starts) == 2)
        await bench.restart()
        await until(lambda: len(bench.workers.group) == 2)
        assert bench.fleet.starts == []

    async def test_after_the_end_only_the_end_is_reported_again(self) -> None:
        bench = SupervisorBench()
        await bench.start_and_train()
        bench.direct(desired=Desired.CANCEL)
        await bench.end()
        await bench.restart()
        assert (await bench.end()).reason is EndReason.CANCELLED
        assert bench.fleet.starts == []
