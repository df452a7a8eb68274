"""Worker reports and commands of the machine become the reports, shares, notes and samples that users read."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kit.worlds.attempt.new_world import make_world
from shoal_service.clock import SystemClock
from shoal_service.core.attempt.messages import Emit, End, NodesSilent, ShowIncident, SuspectNode
from shoal_service.core.attempt.state.attempt import (
    Attempt,
    AttemptConfig,
    CheckpointIndex,
    Group,
    GroupBefore,
    GroupProgress,
    History,
    Incident,
    Target,
)
from shoal_service.core.attempt.state.parts import Running, Worker, WorkerPool
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.catalogue import describe
from shoal_service.core.events.training import CheckpointCommitted, CheckpointFailed, GenerationForming
from shoal_service.core.persistent import Table
from shoal_service.reports import SupervisorReports
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.reporting.reporter import Outbox, Reporter, SystemSampler
from shoal_service.supervisor.reporting.status import Readings, keep_since, make_incident_view, make_status
from shoal_service.views import CheckpointView, Condition, ConditionType, JobStatus
from shoal_workers.contract.job import EndReason, IncidentCause, JobState, StateSource
from shoal_workers.contract.messages import LogLine, Phase, Progress, Stacks, WorkerInfo, WorkerPoll, WorkerUse
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import GroupFormed, StepReport, ValidationReport

SPEC = JobSpec.model_validate({"stop": {"steps": 12}, "task": "m:T"})
CONFIG = SupervisorConfig(job_id="j", attempt=1, spec=SPEC, checkpoint_root="/c", granted=2, epoch=1, spec_version=4)


class Case:
    """A reporter, its outbox, and a running attempt of two workers."""

    def __init__(self) -> None:
        self.outbox = Outbox(1)
        self.reporter = Reporter(self.outbox, CONFIG, SystemClock())
        info = {"node_id": "n", "node_ip": "10.0.0.1", "store_port": 1, "device": "cpu"}
        workers = tuple(
            Worker(
                index=index,
                worker_id=f"worker-{index}",
                in_run=True,
                info=WorkerInfo(worker_id=f"worker-{index}", pid=40 + index, **info),
            )
            for index in (3, 5)
        )
        self.state = Attempt(
            config=AttemptConfig(job_id="j", attempt=1, checkpoint_root="/c"),
            target=Target(spec=SPEC, granted=2),
            current=Running(since=0.0),
            group=Group(generation=2, workers=(3, 5)),
            pool=WorkerPool(workers=Table(workers)),
            checkpoints=CheckpointIndex(newest="step-000000000004-a1-g2"),
            history=History(total_steps=12),
            progress=GroupProgress(step=4),
        )

    def reports(self) -> SupervisorReports:
        self.reporter.update_status(self.state)
        return self.outbox.pull(0, 0.0)

    def step(self, step: int, *, generation: int = 2, step_s: float = 0.5) -> None:
        report = StepReport(
            generation=generation,
            step=step,
            at=9.0,
            loss=2.5,
            grad_norm=1.0,
            lr=1e-3,
            tokens=100,
            step_s=step_s,
            world_size=2,
        )
        self.reporter.record_report(report, self.state)

    def validate(self, step: int) -> None:
        report = ValidationReport(generation=2, step=step, at=9.0, loss=2.0, bits_per_byte=2.9, samples=8)
        self.reporter.record_report(report, self.state)


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_step_becomes_a_point_and_the_status(case: Case) -> None:
    case.step(5)
    reports = case.reports()
    [point] = reports.series
    assert (point.step, point.loss, point.tokens_per_s, point.val_loss) == (5, 2.5, 200.0, None)
    assert reports.status.loss == 2.5 and reports.status.tokens_per_s == 200.0
    assert reports.status.state is JobState.RUNNING and reports.status.observed_generation == 4
    assert reports.status.eta_s == pytest.approx(8 * 0.5) and reports.status.checkpoint_step == 4


def test_the_average_of_the_step_time_starts_again_in_each_generation(case: Case) -> None:
    case.step(5, step_s=1.0)
    case.step(6, step_s=2.0)
    assert case.reports().status.tokens_per_s == pytest.approx(100 / 1.1)
    case.state = replace(case.state, group=replace(case.state.group, generation=3))
    case.step(7, generation=3, step_s=4.0)
    assert case.reports().status.tokens_per_s == pytest.approx(25.0)


def test_a_suspected_node_is_reported_to_the_service_and_to_the_history(case: Case) -> None:
    case.reporter.suspect_node(SuspectNode("node-7", "computes wrong"))
    reports = case.reports()
    [suspect], [event] = reports.suspects, reports.events
    assert (suspect.node_id, suspect.reason) == ("node-7", "computes wrong")
    assert (event.type, event.data) == ("node.suspected", {"node_id": "node-7", "reason": "computes wrong"})
    case.outbox.pull(reports.seq, 0.0)
    assert case.reports().suspects == (), "reported once"


def test_a_validation_is_an_event_and_completes_the_point_of_its_step(case: Case) -> None:
    case.step(5)
    case.validate(5)
    case.validate(9)
    reports = case.reports()
    assert [p.val_loss for p in reports.series] == [None, 2.0], "the second of a step overwrites the first in the store"
    assert [e.type for e in reports.events] == ["validation", "validation"]
    assert reports.events[0].data == {"step": 5, "loss": 2.0, "bits_per_byte": 2.9}
    assert reports.status.val_bits_per_byte == 2.9


def test_metrics_of_the_task_are_in_the_points_the_status_and_the_event(case: Case) -> None:
    step = StepReport(
        generation=2,
        step=5,
        at=9.0,
        loss=2.5,
        grad_norm=1.0,
        lr=1e-3,
        tokens=100,
        step_s=0.5,
        world_size=2,
        metrics={"acc": 0.25},
    )  # fmt: skip - one report, not eleven lines
    case.reporter.record_report(step, case.state)
    validated = ValidationReport(
        generation=2, step=5, at=9.0, loss=2.0, bits_per_byte=None, samples=8, metrics={"acc": 0.5}
    )
    case.reporter.record_report(validated, case.state)
    reports = case.reports()
    assert [(p.metrics, p.val_metrics) for p in reports.series] == [({"acc": 0.25}, {}), ({"acc": 0.25}, {"acc": 0.5})]
    assert (reports.status.metrics, reports.status.val_metrics) == ({"acc": 0.25}, {"acc": 0.5})
    [event] = reports.events
    assert event.data["metrics"] == {"acc": 0.5}
    assert describe(event.type, event.data).message == "validation after step 5: loss 2.0000, acc 0.5"


def test_log_lines_carry_the_current_rank_of_the_worker(case: Case) -> None:
    poll = WorkerPoll(
        worker_id="worker-5",
        seq=1,
        reports=(),
        logs=(LogLine(at=1.0, stream="stdout", text="hello"),),
        progress=Progress(generation=2, phase=Phase.BACKWARD, step=4, at=1.0),
    )
    case.reporter.record_poll(5, poll, case.state)
    reports = case.reports()
    [line] = reports.logs
    assert (line.rank, line.worker_id, line.text) == (1, "worker-5", "hello")
    assert [(w.rank, w.phase, w.state) for w in reports.workers] == [
        (0, "idle", "training"),
        (1, "backward", "training"),
    ]


def test_log_lines_of_a_former_worker_keep_its_id(case: Case) -> None:
    poll = WorkerPoll(
        worker_id="worker-1",
        seq=1,
        reports=(),
        logs=(LogLine(at=1.0, stream="stderr", text="bye"),),
        progress=Progress(generation=1, phase=Phase.IDLE, step=0, at=1.0),
    )
    case.reporter.record_poll(1, poll, case.state)
    [line] = case.reports().logs
    assert (line.rank, line.worker_id) == (None, "worker-1")


def test_the_layout_of_a_forming_generation_is_shown(case: Case) -> None:
    forming = GenerationForming(
        generation=2, workers=2, layout="fsdp2", reason="why", source=StateSource.INITIAL, restore=None, step=0
    )
    case.reporter.carry_out([Emit(forming)], case.state)
    reports = case.reports()
    assert (reports.status.layout, reports.status.layout_reason) == ("fsdp2", "why")
    assert reports.events[0].type == "generation.forming"


def test_the_size_of_the_model_is_known_once_a_group_has_formed(case: Case) -> None:
    formed = GroupFormed(
        generation=2, at=1.0, start_step=4, total_steps=12, form_s=0, build_s=0, restore_s=0, num_parameters=123
    )
    case.reporter.record_report(formed, case.state)
    assert case.reports().status.num_parameters == 123


def test_a_failed_save_is_a_condition_until_one_succeeds(case: Case) -> None:
    case.reporter.carry_out([Emit(CheckpointFailed(message="disk full"))], case.state)
    condition = {c.type: c for c in case.reports().status.conditions}["CheckpointHealthy"]
    assert (condition.status, condition.reason, condition.message) == (False, "SaveFailed", "disk full")
    case.reporter.carry_out([Emit(CheckpointCommitted(name="x", step=1, generation=1))], case.state)
    condition = {c.type: c for c in case.reports().status.conditions}["CheckpointHealthy"]
    assert (condition.status, condition.message) == (True, "")


def test_nothing_remains_after_the_last_step(case: Case) -> None:
    case.state = replace(case.state, progress=GroupProgress(step=12))
    case.step(12)
    assert case.reports().status.eta_s is None, "not 0 ms"


def test_every_condition_says_since_when() -> None:
    case, started_at = Case(), SystemClock().time()
    first = {c.type: c for c in case.reports().status.conditions}
    assert set(first) == set(ConditionType), "every type that is promised is made"
    assert all(condition.since >= started_at for condition in first.values())
    case.reporter.carry_out([Emit(CheckpointFailed(message="disk full"))], case.state)
    failed = {c.type: c for c in case.reports().status.conditions}
    unchanged = set(ConditionType) - {ConditionType.CHECKPOINT_HEALTHY}
    assert {type_: failed[type_] for type_ in unchanged} == {type_: first[type_] for type_ in unchanged}
    assert failed[ConditionType.CHECKPOINT_HEALTHY].since > first[ConditionType.CHECKPOINT_HEALTHY].since


@pytest.mark.parametrize(
    ("before", "now_is", "since"),
    [
        (None, (True, 0.0), 50.0),
        (None, (False, 30.0), 30.0),
        ((True, 20.0), (True, 5.0), 20.0),
        ((True, 20.0), (False, 40.0), 40.0),
        ((True, 20.0), (False, 10.0), 50.0),
        ((False, 40.0), (True, 5.0), 50.0),
        ((False, 40.0), (False, 45.0), 40.0),
    ],
)
def test_since_is_the_last_change_of_the_status(
    before: tuple[bool, float] | None, now_is: tuple[bool, float], since: float
) -> None:
    def condition(status: bool, since: float) -> Condition:
        return Condition(type=ConditionType.PROGRESSING, status=status, reason="r", message="m", since=since)

    known = () if before is None else (condition(*before),)
    [dated] = keep_since((condition(*now_is),), known, 50.0)
    assert (dated.status, dated.since) == (now_is[0], since)


def test_incidents_checkpoints_and_the_end_are_reported(case: Case) -> None:
    incident = Incident(
        id=1,
        cause=IncidentCause.STUCK,
        witness="deadline",
        ranks=(1,),
        worker_ids=("s",),
        before=GroupBefore(generation=2, num_workers=2),
        at=1.0,
    )
    checkpoint = CheckpointView(step=4, url="u", state="committed", attempt=1, generation=2)
    end = AttemptEnd(reason=EndReason.FINISHED, message="m", step=12)
    case.reporter.add(checkpoint)
    case.reporter.carry_out([ShowIncident(incident), End(end)], case.state)
    reports = case.reports()
    assert (
        reports.incidents == (make_incident_view(incident, closed_at=None),)
        and reports.checkpoints == (checkpoint,)
        and reports.end == end
    )


def test_an_end_for_lack_of_progress_says_where_the_ranks_were(case: Case) -> None:
    group, where = GroupBefore(generation=2, num_workers=2), "rank 1 is in its code (a.py:3 f)"
    incident = Incident(id=1, cause=IncidentCause.HUNG, witness="w", ranks=(), worker_ids=(), before=group, at=1.0)
    case.reporter.carry_out([ShowIncident(incident)], case.state)
    case.reporter.keep_stacks(1, Stacks(at=1.0, generation=2, reason="r", clusters=(), summary=where))
    end = AttemptEnd(reason=EndReason.RECOVERY_BUDGET, message="6 re-formations; last: hung", step=12)
    case.reporter.carry_out([End(end)], case.state)
    told = case.reports().end
    assert told is not None
    assert told.message == f"6 re-formations; last: hung; before, {where}"


def script_case() -> Case:
    case = Case()
    spec = JobSpec.model_validate({"script": {"file": "train.py"}})
    case.state = replace(case.state, target=Target(spec=spec, granted=2), history=History())
    return case


def test_what_a_script_does_not_report_is_missing_in_its_points_and_its_status() -> None:
    case = script_case()
    report = StepReport(
        generation=2, step=5, at=9.0, loss=2.5, grad_norm=None, lr=None, tokens=None, step_s=0.5, world_size=2
    )
    case.reporter.record_report(report, case.state)
    reports = case.reports()
    [point] = reports.series
    assert point.loss == 2.5 and all(map(math.isnan, (point.grad_norm, point.lr, point.tokens_per_s)))
    status = reports.status
    assert (status.loss, status.step, status.step_at) == (2.5, 5, 9.0)
    assert (status.grad_norm, status.lr, status.tokens, status.tokens_per_s) == (None, None, None, None)


def test_the_last_step_of_a_script_is_a_point_also_if_it_comes_after_its_end() -> None:
    case = script_case()
    case.step(5, generation=1)
    reports = case.reports()
    assert [point.step for point in reports.series] == [5] and reports.status.loss is None


def test_system_metrics_are_reported_by_rank_and_acknowledged_ones_are_not_sent_again(case: Case) -> None:
    for index, cores in ((3, 1.0), (5, 2.0)):
        progress = Progress(generation=2, phase=Phase.FORWARD, step=4, at=8.0)
        use = WorkerUse(at=8.0, cpu_cores=cores)
        poll = WorkerPoll(worker_id=f"worker-{index}", seq=0, reports=(), logs=(), progress=progress, use=use)
        case.reporter.record_poll(index, poll, case.state)
    reports = case.reports()
    [sample] = reports.system
    assert sample.values["cpu_cores"] == (1.0, 2.0) and sample.generation == 2
    assert SupervisorReports.model_validate_json(reports.model_dump_json()) == reports
    assert case.outbox.pull(reports.seq, 0.0).system == ()


Change = Callable[[Any], None]


def status(world: Any) -> JobStatus:
    return make_status(world.state, Readings(), spec_version=1, now=world.now)


def condition(world: Any, type_: ConditionType) -> Condition:
    return next(condition for condition in status(world).conditions if condition.type is type_)


def silent(world: Any) -> None:
    world.stop(2)
    world.pass_time(2.0)
    world.feed(NodesSilent({"n2": "no answer"}))
    world.recover()
    world.run(1)


def lost(world: Any) -> None:
    world.lose(2)
    world.run(1)
    world.pass_time(0.25)


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (silent, "NodeSilent", "1 worker left out until node n2 answers"),
        (lost, "Starting", "1 worker starting, or waiting for room on a node"),
    ],
)
def test_the_reason_of_a_smaller_group_is_in_its_condition_and_its_note(
    change: Change, reason: str, words: str
) -> None:
    world = make_world(workers=3, memory=True).open(then=2)
    ready = condition(world, ConditionType.WORKERS_READY)
    assert ready.status and status(world).note == ""
    change(world)
    ready = condition(world, ConditionType.WORKERS_READY)
    assert (ready.status, ready.reason) == (False, reason)
    assert ready.message == f"2 of 3 granted workers in the group: {words}"
    assert status(world).note == words


def test_workers_that_the_layout_does_not_use_are_named_with_the_way_out() -> None:
    """Two of six workers were idle, and nothing said why."""
    world = make_world(workers=6, memory=True, batch={"global_size": 4, "micro_size": 1}).open(then=2)
    world.pass_time(4.0)
    assert len(world.state.group.workers) == 4
    ready = condition(world, ConditionType.WORKERS_READY)
    assert ready.reason == "LayoutUsesFewer"
    assert "2 workers idle: for 6 workers the planner's layout is fsdp4, which uses 4" in ready.message
    assert status(world).note and "`parallelism` of the spec" in status(world).note


def test_a_back_off_is_named() -> None:
    world = make_world(workers=3, memory=True).open(then=2)
    lost(world)
    budgets = replace(world.state.budgets, grow_not_before=world.now + 60.0)
    world.state = replace(world.state, budgets=budgets)
    world.start_all()
    world.pass_time(4.0)
    assert condition(world, ConditionType.WORKERS_READY).reason == "GrowsLater"


def test_growth_that_does_not_pay_is_named_with_the_way_out() -> None:
    world = make_world(workers=4, memory=True).open(then=6)
    world.lose(3)
    world.run(1)
    world.break_collectives()
    world.recover()
    world.run(1)
    closed = world.state.health.last_closed
    assert closed is not None and closed.incident.after is not None
    incident = replace(closed.incident, formed_at=closed.incident.after.forming_at + 30.0)
    health = replace(world.state.health, last_closed=replace(closed, incident=incident))
    history = replace(world.state.history, num_incidents=10, incidents_since=world.now - 200.0)
    world.state = replace(world.state, history=history, health=health)
    world.start_all()
    world.pass_time(4.0)
    ready = condition(world, ConditionType.WORKERS_READY)
    assert (ready.status, ready.reason) == (False, "GrowsWithNextIncident")
    assert "1 worker idle: after 10 incidents" in ready.message
    assert "Raise elasticity.min_workers to 4 to grow now" in ready.message
    world.pass_time(1.0)
    assert condition(world, ConditionType.WORKERS_READY).message == ready.message


def test_a_standstill_is_shown_at_once() -> None:
    world = make_world(workers=3, memory=True, health={}).open(then=6)
    for index in (0, 1, 2):
        world.beat(index, beat=10)
    assert condition(world, ConditionType.PROGRESSING).status
    world.pass_time(2.0)
    progressing = condition(world, ConditionType.PROGRESSING)
    assert (progressing.status, progressing.reason) == (False, "Standstill")
    assert progressing.message == status(world).note
    assert progressing.message.startswith("rank 0 has made no progress for 2.0 s, in backward after step 6; ")


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
    assert make_status(world.state, readings, spec_version=1, now=world.now).communication_share == shown


def test_the_rank_with_the_slowest_data_counts() -> None:
    readings = Readings()
    for index, data_s in ((3, 1.0), (5, 3.0)):
        readings.add_progress(index, _progress(10.0, 0.0))
        readings.add_progress(index, _progress(10.5, 0.5))  # too short to be measured
        readings.add_progress(index, _progress(14.0, data_s))
    assert readings.data_share((3, 5)) == 0.75
    assert readings.data_share((3,)) == 0.25
    assert readings.data_share((7,)) is None


def use(at: float, cores: float) -> WorkerUse:
    return WorkerUse(at=at, cpu_cores=cores)


def test_a_measurement_that_polls_repeat_counts_once() -> None:
    sampler = SystemSampler()
    for measured in (use(1.0, 1.0), use(1.0, 1.0), use(6.0, 3.0)):
        sampler.add(7, 0, measured, 1)
    sample = sampler.take(1, now=9.0, now_mono=100.0)
    assert sample is not None and sample.values["cpu_cores"] == (2.0,) and (sample.at, sample.generation) == (9.0, 1)


def test_the_next_sample_comes_after_its_interval_and_has_new_measurements_only() -> None:
    sampler = SystemSampler()
    sampler.add(7, 0, use(1.0, 1.0), 1)
    assert sampler.take(1, now=9.0, now_mono=100.0) is not None
    sampler.add(7, 0, use(6.0, 3.0), 1)
    assert sampler.take(1, now=18.0, now_mono=109.9) is None
    sample = sampler.take(1, now=19.0, now_mono=110.0)
    assert sample is not None and sample.values["cpu_cores"] == (3.0,)
    assert sampler.take(1, now=40.0, now_mono=131.0) is None, "nothing was measured"


def test_a_new_generation_begins_with_nothing_and_workers_without_a_rank_do_not_count() -> None:
    sampler = SystemSampler()
    sampler.add(7, 0, use(1.0, 1.0), 1)
    sampler.add(8, 0, use(2.0, 5.0), 2)
    sampler.add(9, None, use(2.0, 9.0), 2)
    sample = sampler.take(2, now=9.0, now_mono=100.0)
    assert sample is not None and sample.generation == 2 and sample.values["cpu_cores"] == (5.0, None)
