"""The executor with fakes all around it: events in, commands out, the journal before the commands; hanging and absent
storage, an absent head, and the end of an attempt."""

from doubles.event_loop import settle, until
from doubles.supervisor_bench import SPEC, SupervisorBench
from shoal_service.cluster.node_table import NodeTable
from shoal_service.core.attempt.state.parts import AvoidedNode, Stage
from shoal_service.core.desired import Desired
from shoal_service.supervisor.journal import SLICE_S, HeadWait
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SaveFailed, ValidationReport


async def test_an_attempt_starts_trains_commits_and_ends(bench: SupervisorBench) -> None:
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


async def test_the_journal_is_written_before_the_commands_are_performed(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    first_calls = [bench.log.index("start"), bench.log.index("run")]
    assert all("journal" in bench.log[:at] for at in first_calls)
    before_run = bench.log[bench.log.index("start") : bench.log.index("run")]
    assert "journal" in before_run, "the assignments are in the journal before the workers get them"


async def test_the_newest_step_is_in_the_journal_after_two_seconds_without_a_command(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    for _ in range(2):
        await bench.clock.advance(2.1)
        bench.workers.train()
    await until(lambda: bench.entry.state.progress.step == 3)


async def test_an_unusable_storage_ends_the_attempt_before_a_worker_starts(bench: SupervisorBench) -> None:
    bench.catalog.is_unusable = True
    bench.start()
    end = await bench.end()
    assert end.reason is EndReason.STORAGE_FAILED and "permission denied" in end.message
    assert bench.fleet.starts == []


async def test_a_lost_worker_is_replaced_and_the_group_forms_again(bench: SupervisorBench) -> None:
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


async def test_a_dead_node_is_one_loss_of_all_its_workers(bench: SupervisorBench) -> None:
    bench.fleet.node_of = {0: "doomed", 1: "doomed"}
    await bench.start_and_train()
    bench.nodes.show(NodeTable(dead=frozenset({"doomed"})))
    await settle()
    assert not bench.fleet.knows(0) and not bench.fleet.knows(1)
    assert bench.fleet.killed == [], "the head knows that they are dead"
    [incident] = bench.reports.incidents
    assert (incident.cause, incident.ranks, incident.node_id) == (IncidentCause.NODE_DIED, (0, 1), "doomed")
    assert incident.witness == "node watch"


async def test_the_hosts_of_the_workers_and_of_the_head_are_watched_and_a_silent_one_is_left_out(
    bench: SupervisorBench,
) -> None:
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


async def test_a_restarted_supervisor_knows_which_nodes_were_silent(bench: SupervisorBench) -> None:
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


async def test_a_directive_changes_what_differs_and_a_repeated_one_changes_nothing(bench: SupervisorBench) -> None:
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


async def test_avoided_nodes_are_those_of_the_directive_and_those_that_ray_drains(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.direct(avoid=(AvoidedNode(node_id="a", reason="drain requested"),))
    bench.nodes.show(NodeTable(draining={"b": 9000.0}))
    await until(lambda: len(bench.entry.state.target.avoided) == 2)
    by_ray = bench.entry.state.target.avoided[1]
    assert (by_ray.node_id, by_ray.reason, by_ray.deadline) == ("b", "drained by Ray", 9000.0)
    bench.nodes.show(NodeTable())
    await until(lambda: [node.node_id for node in bench.entry.state.target.avoided] == ["a"])


async def test_directives_after_the_end_are_ignored(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.direct(desired=Desired.CANCEL)
    await bench.end()
    bench.direct(granted=1)
    await settle()
    assert bench.entry.end is not None


async def test_a_failed_commit_is_reported_and_training_continues(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.catalog.is_away = True
    for worker in bench.workers.group:
        worker.save()
    await until(lambda: "checkpoint.failed" in bench.events())
    assert bench.stage is Stage.RUNNING
    assert [view.state for view in bench.reports.checkpoints] == ["failed"]


async def test_a_supervisor_with_a_successor_commits_nothing(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.storage.starts.append(bench.clock.time() + 1)  # its successor, on another node
    for worker in bench.workers.group:
        worker.save()
    await settle()
    assert bench.catalog.markers == {}


class TestRestart:
    async def test_live_workers_are_found_and_continue_training(self, bench: SupervisorBench) -> None:
        await bench.start_and_train()
        await bench.restart()
        await until(lambda: "supervisor.restarted" in bench.events())
        [event] = [e for e in bench.reports.events if str(e.type) == "supervisor.restarted"]
        assert (event.data["found"], event.data["of"]) == (2, 2)
        assert bench.fleet.starts == [] and bench.reports.incidents == ()
        bench.workers.train(3)
        bench.workers.finish()
        assert (await bench.end()).reason is EndReason.FINISHED

    async def test_dead_workers_are_lost_and_replaced(self, bench: SupervisorBench) -> None:
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

    async def test_workers_that_died_with_their_node_are_lost_by_the_death_of_the_node(
        self, bench: SupervisorBench
    ) -> None:
        await bench.start_and_train()
        bench.workers.group[1].die()
        await bench.restart(dead_nodes=frozenset({"node-1"}))
        await settle()
        [incident] = bench.reports.incidents
        assert (incident.cause, incident.node_id) == (IncidentCause.NODE_DIED, "node-1")

    async def test_a_worker_that_was_still_starting_is_prepared_again(self, bench: SupervisorBench) -> None:
        bench.start()
        await until(lambda: len(bench.fleet.starts) == 2)
        await bench.restart()
        await until(lambda: len(bench.workers.group) == 2)
        assert bench.fleet.starts == []

    async def test_after_the_end_only_the_end_is_reported_again(self, bench: SupervisorBench) -> None:
        await bench.start_and_train()
        bench.direct(desired=Desired.CANCEL)
        await bench.end()
        await bench.restart()
        assert (await bench.end()).reason is EndReason.CANCELLED
        assert bench.fleet.starts == []


def _reason(bench: SupervisorBench) -> str:
    [condition] = [c for c in bench.status.conditions if c.type == "CheckpointHealthy"]
    return str(condition.reason)


async def test_a_commit_that_hangs_is_given_up_and_no_second_thread_is_lost_to_it() -> None:
    bench = SupervisorBench(granted=1)
    await bench.start_and_train()
    bench.catalog.hangs = True
    [worker] = bench.workers.group
    worker.save()
    await until(lambda: len(bench.catalog.hanging) == 1, "the commit hangs")
    limit_s = bench.config.spec.timeouts.commit_s
    await bench.advance_until(lambda: "checkpoint.failed" in bench.events(), limit_s + 1)
    assert "did not answer within 120 s (timeouts.commit_s)" in bench.reports.events[-1].data["message"]
    assert _reason(bench) == "SaveFailed"

    bench.workers.train()
    await until(lambda: bench.status.step == 2, "training goes on")
    worker.save()
    await until(lambda: bench.events().count("checkpoint.failed") == 2, "the next commit fails at once")
    [hanging] = bench.catalog.hanging

    bench.catalog.hangs = False
    hanging.answer(OSError("an answer that comes too late"))
    bench.workers.train()
    await until(lambda: bench.status.step == 3, "training goes on")
    worker.save()
    await until(lambda: "checkpoint.committed" in bench.events(), "storage that answers again is used")
    assert _reason(bench) == "Saving"


async def test_a_part_that_stalls_is_a_condition_of_its_own() -> None:
    bench = SupervisorBench(granted=1)
    await bench.start_and_train()
    [worker] = bench.workers.group
    error = "the storage accepted nothing for 120 s (timeouts.save_s)"
    worker.report(SaveFailed(generation=1, step=1, rank=0, directory="/d", error=error, is_stalled=True))
    await until(lambda: "checkpoint.failed" in bench.events(), "it is reported")
    assert _reason(bench) == "StorageStalled"


async def test_a_storage_outage_of_seconds_at_the_start_is_waited_for_and_shown(bench: SupervisorBench) -> None:
    bench.catalog.is_away = True
    bench.start()
    await bench.clock.advance(6.0)
    assert "does not answer and is asked again: OSError: the storage does not answer" in bench.status.message
    assert bench.status.deadline == 1000.0 + bench.config.spec.checkpoint.wait_s
    assert bench.events() == ["checkpoint.storage_away"] and bench.fleet.starts == []
    bench.catalog.is_away = False
    await bench.advance_until(lambda: len(bench.workers.group) == 2)
    assert bench.status.note.startswith("waits for the group to form")


async def test_nothing_is_written_into_a_directory_that_lacks_what_the_job_has_committed(
    bench: SupervisorBench,
) -> None:
    bench.config = bench.config.model_copy(update={"newest": str(CheckpointName(8, 0, 1))})
    bench._open()
    bench.start()
    await bench.clock.advance(6.0)
    assert bench.catalog.begun == {} and bench.fleet.starts == []
    assert "is asked again: it has no checkpoint, and the job has committed step-0" in bench.status.message
    assert bench.status.checkpoint_step == 8
    bench.catalog.damaged = {CheckpointName(9, 0, 1)}  # the mount is back
    end = await bench.end()
    assert end.reason is EndReason.DAMAGED_CHECKPOINT and [*bench.catalog.begun] == [1]


async def test_a_damaged_only_marker_is_shown_and_ends_the_attempt(bench: SupervisorBench) -> None:
    bench.catalog.damaged = {CheckpointName(8, 0, 1)}
    bench.start()
    end = await bench.end()
    assert end.reason is EndReason.DAMAGED_CHECKPOINT and "step-000000000008-a0-g1" in end.message
    assert [(view.step, view.state) for view in bench.reports.checkpoints] == [(8, "damaged")]


def after(wait: HeadWait, *slices: tuple[float, float]) -> HeadWait:
    for began, ended in slices:
        wait = wait.after(began, ended)
    return wait


def test_a_head_that_does_not_answer_counts_as_away_after_a_quarter_of_a_second() -> None:
    wait = HeadWait(0.0, 1000)
    slices = [(n * SLICE_S, (n + 1) * SLICE_S) for n in range(10)]
    assert not after(wait, *slices[:5]).is_over and after(wait, *slices[:6]).is_over


def test_a_supervisor_that_wakes_late_has_waited_one_slice() -> None:
    wait = after(HeadWait(0.0, 1000), (0.0, 10.0))
    assert wait.waited_s == SLICE_S and not wait.is_over


def test_the_time_before_the_head_was_asked_does_not_count() -> None:
    assert after(HeadWait(7.0, 0), (6.99, 7.01)).waited_s < 0.02
    assert after(HeadWait(7.0, 0), (6.0, 6.5)).waited_s == 0.0


def test_a_large_record_takes_longer() -> None:
    slices = [(n * SLICE_S, (n + 1) * SLICE_S) for n in range(8)]
    assert after(HeadWait(0.0, 0), *slices).is_over
    assert not after(HeadWait(0.0, 4_000_000), *slices).is_over


async def test_at_the_end_snapshots_are_removed_and_idle_workers_are_killed_together(bench: SupervisorBench) -> None:
    bench.fleet.node_of = {0: "shared", 1: "shared"}
    await bench.start_and_train()
    bench.workers.train(3)
    first, second = bench.workers.group
    first.print("last words")
    bench.workers.finish()
    await bench.end()
    assert sorted(bench.fleet.killed) == [0, 1] and bench.workers.by_name == {}
    assert first.num_forgotten + second.num_forgotten == 1, "by one worker of the node"
    assert _ending(bench) == ["forget_snapshots", "kill", "kill"]
    assert "last words" in [line.text for line in bench.reports.logs]
    assert not bench.nodes.is_started


async def test_workers_that_train_are_killed_before_the_last_one_of_their_node_removes_the_snapshots_again(
    bench: SupervisorBench,
) -> None:
    bench.fleet.node_of = {0: "shared", 1: "shared"}
    await bench.start_and_train()
    first, second = bench.workers.group
    bench.direct(desired=Desired.CANCEL)
    await bench.end()
    assert sorted(bench.fleet.killed) == [0, 1] and bench.workers.by_name == {}
    assert first.num_forgotten + second.num_forgotten == 2, "once before the other worker ends, once after"
    assert _ending(bench) == ["forget_snapshots", "kill", "forget_snapshots", "kill"]


async def test_a_validation_report_that_the_end_of_run_overtakes_is_in_the_last_status(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.workers.train(3)
    group = bench.workers.group
    for worker in group:
        worker.save()
    await until(lambda: bench.catalog.markers)
    for worker in group:
        worker.holds_long_polls = True
    group[0].report(ValidationReport(generation=1, step=4, loss=1.25, bits_per_byte=None, samples=4, at=0.0))
    for worker in group:
        worker.leave(ExitKind.FINISHED, is_durable=True)
    await bench.end()
    assert bench.status.val_loss == 1.25
    assert [point.val_loss for point in bench.reports.series][-1] == 1.25


async def test_torn_checkpoints_are_removed_at_the_end(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.catalog.files[CheckpointName(2, 1, 1)] = {"shard-00000.bin": 1}
    bench.direct(desired=Desired.CANCEL)
    end = await bench.end()
    assert end.reason is EndReason.CANCELLED
    assert bench.catalog.files == {}


async def test_a_storage_that_does_not_answer_at_the_end_does_not_keep_the_attempt(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.catalog.is_away = True
    bench.direct(desired=Desired.CANCEL)
    assert (await bench.end()).reason is EndReason.CANCELLED


def _ending(bench: SupervisorBench) -> list[str]:
    return [call for call in bench.log if call in ("forget_snapshots", "kill")]
