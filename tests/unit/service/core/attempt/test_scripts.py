"""Jobs that run a script: how its groups end, what counts as progress, and what an error of one rank means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kit.worlds.attempt.parts import step_report
from shoal_service.core.attempt import hangs
from shoal_service.core.attempt.deadlines import find_wait
from shoal_service.core.attempt.machine import open_attempt
from shoal_service.core.attempt.messages import (
    Commit,
    CompareModels,
    Directed,
    FindCheckpoint,
    NodesAvoided,
    RequestYield,
    Run,
    StartWorker,
)
from shoal_service.core.attempt.state.attempt import LONG_S, UpdatePhase
from shoal_service.core.attempt.state.parts import AvoidedNode, Stage
from shoal_service.core.desired import Desired
from shoal_service.core.endings import REPEATED, LostAttempt
from shoal_service.core.goodput import Category, recovering, show
from shoal_service.supervisor.reporting.status import Readings, job_state, make_status
from shoal_workers.contract.exception_causes import ErrorClass
from shoal_workers.contract.job import EndReason, IncidentCause, JobState
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase
from shoal_workers.contract.worker_reports import ValidationReport

NewWorld = Callable[..., Any]
GRACE_S = 2.0


def script_world(new_world: NewWorld, workers: int = 3, **settings: Any) -> Any:
    return new_world(workers=workers, script={"file": "train.py", "grace_s": GRACE_S}, **settings)


def raised(message: str = "boom", *, mistake: str = "") -> ErrorReport:
    return ErrorReport(type="ValueError", message=message, traceback="tb", phase=Phase.SCRIPT, mistake=mistake)


def finish(world: Any) -> None:
    for worker in world.group():
        world.leave(worker, ExitKind.FINISHED)
    world.deliver_all()


def run_long(world: Any) -> None:
    world.pass_time(LONG_S)


def pass_grace(world: Any) -> None:
    """The others may raise the same error; then they are woken."""
    world.pass_time(world.state.config.timeouts.user_error_grace_s)
    world.obey_interrupts()
    world.deliver_all()


# how an attempt begins and ends


def test_no_checkpoint_is_looked_for_and_none_is_saved(new_world: NewWorld) -> None:
    world = script_world(new_world)
    assert open_attempt(world.state) == () and world.state.stage is Stage.STARTING
    world.open(then=6)
    finish(world)
    assert world.count(FindCheckpoint) == world.count(Commit) == 0
    [first] = {c.assignment.layout for c in world.commands if isinstance(c, Run)}
    assert first == Layout(dp_replicate=3)


def test_a_script_that_has_ended_on_every_rank_is_done(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    finish(world)
    assert world.end.reason is EndReason.FINISHED and world.end.step == 5
    assert world.end.message == "train.py has ended with status 0 on every rank after 5 steps"


def test_a_script_without_reports_is_done_too(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=0)
    finish(world)
    assert world.end.reason is EndReason.FINISHED
    assert world.end.message == "train.py has ended with status 0 on every rank"


def test_a_rank_that_is_done_waits_for_the_others_without_a_deadline(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    first, *others = world.group()
    world.leave(first, ExitKind.FINISHED)
    world.deliver_all()
    assert world.state.stage is Stage.SWITCHING and job_state(world.state) is JobState.RUNNING
    wait = find_wait(world.state)
    assert wait.until is None and wait.message == "the script to end on the other ranks"
    for worker in others:
        world.beat(worker.index, beat=1)
    world.pass_time(200.0)
    assert world.end is None and world.incidents() == []
    finish(world)
    assert world.end.reason is EndReason.FINISHED


def test_a_lost_worker_that_was_done_costs_nothing(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    world.leave(world.group()[0], ExitKind.FINISHED)
    world.deliver_all()
    world.die(0)
    world.deliver_all()
    assert world.incidents() == []
    finish(world)
    assert world.end.reason is EndReason.FINISHED


# requests


@pytest.mark.parametrize(("desired", "reason"), [(Desired.PAUSE, EndReason.PAUSED)])
def test_a_pause_asks_the_script_to_end_and_commits_nothing(
    new_world: NewWorld, desired: Desired, reason: EndReason
) -> None:
    world = script_world(new_world).open(then=5)
    world.direct(desired=desired)
    assert world.count(RequestYield) == 3 and world.state.stage is Stage.SWITCHING
    wait = find_wait(world.state)
    assert wait.message.startswith("the processes of the script to end")
    assert wait.until == world.now + world.state.config.timeouts.switch_s + GRACE_S
    world.advance()
    assert world.end.reason is reason and world.count(Commit) == 0


def test_a_preempted_script_says_that_it_goes_on_from_its_own_checkpoint(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    world.direct(is_preempted=True)
    world.advance()
    assert world.end.reason is EndReason.PREEMPTED
    assert world.end.message == "its script was asked to end, and goes on from its own checkpoint."


def test_a_resize_starts_the_script_again_and_counts_the_steps_that_it_repeats(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=8)
    world.direct(granted=2)
    for worker in world.group():  # it saves nothing when it is asked to end
        world.leave(worker, ExitKind.YIELDED)
    world.deliver_all()
    world.script_step = 4
    world.join()
    assert world.world_size == 2 and world.state.progress.step == 8, "where it goes on is not known yet"
    assert world.events("generation.formed")[-1]["start_step"] is None
    world.run(1)
    assert (world.state.progress.step, world.state.group.start_step) == (5, 4)
    assert world.state.history.steps_lost == 4 and world.incidents() == []


def test_a_rank_that_was_done_before_it_was_asked_to_end_does_not_break_the_group(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    world.direct(granted=2)
    first, *others = world.group()
    world.leave(first, ExitKind.FINISHED)
    for worker in others:
        world.leave(worker, ExitKind.YIELDED)
    world.deliver_all()
    assert world.state.stage is Stage.FORMING and world.world_size == 2 and world.incidents() == []


def test_a_validation_that_a_script_logs_is_noted_and_decides_nothing(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=10)
    report = ValidationReport(
        generation=world.state.group.generation, step=10, at=world.now, loss=0.5, bits_per_byte=None, samples=0
    )
    world.send(world.group()[0], report)
    world.deliver_all()
    assert world.state.stage is Stage.RUNNING and not world.state.is_finishing
    assert world.state.history.standing is not None and world.state.history.standing.judged_step == 10
    world.run(1)
    assert world.state.progress.step == 11


# losses


def test_the_first_report_of_the_next_group_closes_the_incident(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=10)
    world.script_step = 7
    world.lose(1)
    [incident] = world.incidents()
    assert world.state.stage is Stage.RUNNING and not incident.closed and incident.steps_lost is None
    world.run(1)
    [incident] = world.incidents()
    assert incident.closed and incident.steps_lost == 3 == world.state.history.steps_lost
    assert (incident.state_source, incident.bytes_moved, incident.restore_s) == (None, None, None)
    assert incident.from_layout == "" and incident.to_layout == ""


def test_without_reports_the_incident_closes_once_the_group_has_formed(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=0)
    world.lose(1)
    [incident] = world.incidents()
    assert incident.closed and (incident.steps_lost, incident.first_step_s) == (None, None)


def test_a_killed_process_of_the_script_is_an_incident_and_its_worker_stays(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    world.kill_script(world.group()[1])
    world.recover()
    world.run(1)
    [incident] = world.incidents()
    assert (incident.cause, incident.witness) == (IncidentCause.SCRIPT_DIED, "rank 1")
    assert incident.message == "rank 1: a process of the script was killed by a signal"
    assert incident.action == "re-form" and world.state.group.workers == (0, 1, 2)


@pytest.mark.parametrize("kind", [ExitKind.USER_ERROR, ExitKind.COLLECTIVE_FAILED])
def test_errors_after_the_death_of_a_worker_are_its_consequences(new_world: NewWorld, kind: ExitKind) -> None:
    world = script_world(new_world).open(then=5)
    world.die(1)
    for worker in world.group():
        world.leave(worker, kind, raised("connection closed by peer"))
    world.recover()
    assert world.end is None and world.world_size == 2
    assert world.incidents()[0].cause is IncidentCause.WORKER_DIED


def test_an_error_that_arrives_before_the_death_is_its_consequence(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    world.leave(world.group()[0], ExitKind.USER_ERROR, raised("connection closed by peer"))
    world.deliver_all()
    assert world.end is None and world.state.stage is Stage.QUIESCING
    world.die(1)
    world.deliver_all()
    pass_grace(world)
    assert world.end is None and world.state.stage is Stage.FORMING


def test_an_error_that_arrives_before_the_killed_process_is_its_consequence(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    first, second, third = world.group()
    world.leave(first, ExitKind.USER_ERROR, raised("connection closed by peer"))
    world.deliver_all()
    world.leave(second, ExitKind.SCRIPT_DIED)
    world.leave(third, ExitKind.USER_ERROR, raised("connection closed by peer"))
    world.deliver_all()
    assert world.end is None and world.state.stage is Stage.FORMING
    assert world.incidents()[0].cause is IncidentCause.SCRIPT_DIED


def test_a_crash_is_the_scripts_own_fault_also_after_a_death(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    world.die(1)
    first, third = world.group()
    world.leave(first, ExitKind.USER_ERROR, raised("train.py was killed by signal 11 (SIGSEGV).", mistake="crash"))
    world.leave(third, ExitKind.INTERRUPTED)
    world.deliver_all()
    assert world.end.reason is EndReason.USER_ERROR and world.end.failure.ranks == (0,)


def test_an_error_of_its_own_ends_the_attempt_although_a_survivor_is_stuck(new_world: NewWorld) -> None:
    world = script_world(new_world, workers=2).open(then=5)
    world.workers[1].is_stuck = True
    world.leave(world.group()[0], ExitKind.USER_ERROR, raised("shape mismatch"))
    world.deliver_all()
    world.pass_time(1.0 + world.state.config.timeouts.quiesce_s + GRACE_S + 0.5)
    assert world.end.reason is EndReason.USER_ERROR and world.end.failure.message == "shape mismatch"


def test_the_first_error_is_the_cause_of_those_that_follow(new_world: NewWorld) -> None:
    """As torchrun has it: the others raise what a lost peer makes them raise."""
    world = script_world(new_world).open(then=5)
    first, second, third = world.group()
    world.leave(third, ExitKind.USER_ERROR, raised("shape mismatch"))
    world.now += 0.1
    for worker in (first, second):
        world.leave(worker, ExitKind.USER_ERROR, raised("connection closed by peer"))
    world.deliver_all()
    assert world.end.reason is EndReason.USER_ERROR
    assert (world.end.failure.message, world.end.failure.ranks) == ("shape mismatch", (2,))


# time


def test_a_survivor_has_the_grace_of_the_script_before_it_is_killed(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    world.workers[0].is_stuck = True
    world.die(1)
    world.deliver_all()
    world.pass_time(world.state.config.timeouts.quiesce_s + GRACE_S - 0.25)
    assert world.state.pool.worker(0) is not None
    world.pass_time(0.25)
    assert world.state.pool.worker(0) is None


def test_a_script_hangs_no_sooner_than_after_five_minutes(new_world: NewWorld) -> None:
    world = script_world(new_world, health={"hang_floor_s": 3.0}).open(then=6)
    for index in range(3):
        world.beat(index, beat=1, step=0, phase=Phase.SCRIPT)
    assert hangs.threshold_s(world.state) == hangs.SCRIPT_S == 300.0
    world.pass_time(29.0)
    assert not hangs.find_standstill(world.state, world.now)
    world.pass_time(1.5)
    assert hangs.find_standstill(world.state, world.now).reason.startswith("rank 0 has made no progress for 30.5 s")
    world.pass_time(268.5)
    assert world.state.stage is Stage.RUNNING
    world.pass_time(1.5)
    assert world.state.incident.cause is IncidentCause.HUNG
    assert "a script at least 300 s" in world.state.incident.message


def test_a_longer_floor_and_slow_steps_move_the_threshold_of_a_script(new_world: NewWorld) -> None:
    floor = script_world(new_world, health={"hang_floor_s": 900.0}).open(then=1)
    assert hangs.threshold_s(floor.state) == 900.0
    slow = script_world(new_world, health={"hang_factor": 10.0}).open(then=0)
    slow.step_s = dict.fromkeys(slow.step_s, 0.0) | {slow.state.group.layout.shard: 60.0}
    slow.run(1)
    assert hangs.threshold_s(slow.state) == 600.0
    slow.direct(granted=1)
    assert hangs.threshold_s(slow.state) == 600.0 + GRACE_S, "it is asked to end, and may save"


def test_groups_that_fail_at_their_start_end_the_attempt(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=0)
    for _ in range(20):
        if world.end is not None:
            break
        world.kill_script(world.group()[0])
        world.recover()
        world.until(Stage.RUNNING, Stage.ENDED)
    assert world.end.reason is EndReason.RECOVERY_BUDGET
    assert "6 re-formations in a row reported no new step and ran for less than 60 s" in world.end.message


def test_a_group_that_runs_for_a_minute_has_made_progress(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=0)
    for _ in range(8):
        world.kill_script(world.group()[0])
        world.recover()
        world.until(Stage.RUNNING)
        assert world.state.budgets.fruitless == 1
        run_long(world)
        assert world.state.budgets.fruitless == 0
    finish(world)
    assert world.end.reason is EndReason.FINISHED and world.end.has_run_long


def broken(line: str = "train.py:8") -> ErrorReport:
    return raised("Connection closed by peer").model_copy(update={"type": "RuntimeError", "line": line})


def leave_alone(world: Any, *, has_output: bool = False, line: str = "train.py:8") -> None:
    """Rank 1 ends with status 0, and rank 0 is in a collective."""
    first, second = world.group()
    world.leave(second, ExitKind.FINISHED)
    world.now += 0.1
    world.leave(first, ExitKind.COLLECTIVE_FAILED, broken(line), has_output=has_output)
    world.deliver_all()


def again(world: Any) -> bool:
    """Whether another group runs, for a minute and more."""
    world.until(Stage.RUNNING, Stage.ENDED)
    if world.end is None:
        run_long(world)
    return world.end is None


def test_the_same_end_of_a_script_three_times_in_a_row_ends_the_job_however_long_it_ran(new_world: NewWorld) -> None:
    world = script_world(new_world, workers=2).open(then=0)
    for expected in (True, True, False):
        leave_alone(world)
        assert again(world) is expected
    assert world.end.reason is EndReason.USER_ERROR and world.end.failure.mistake == REPEATED
    assert world.end.message == (
        "rank 1 of train.py ended with status 0 while others still trained (rank 0 was at train.py:8), 3 times in a "
        "row without a new step or a file with new content."
    )
    assert world.end.failure.ranks == (1,)


def test_progress_and_another_place_begin_the_count_of_equal_ends_anew(new_world: NewWorld) -> None:
    world = script_world(new_world, workers=2).open(then=0)
    for has_output in (False, False, True, False):
        leave_alone(world, has_output=has_output)
        assert again(world)
    world.run(1)  # a new step
    for _ in range(2):
        leave_alone(world)
        assert again(world)
    for line in ("train.py:9", "train.py:8", "train.py:9"):
        for worker in world.group():
            world.leave(worker, ExitKind.COLLECTIVE_FAILED, broken(line))
        world.deliver_all()
        assert again(world)


def test_lost_workers_are_no_ends_of_the_script(new_world: NewWorld) -> None:
    world = script_world(new_world, workers=2, min_workers=2).open(then=0)
    for _ in range(5):
        world.die(world.group()[1].index)
        world.leave(world.group()[0], ExitKind.COLLECTIVE_FAILED, broken())
        world.deliver_all()
        world.start_all()
        world.recover()
        assert again(world)
    assert world.state.health.program_end is None


def killed(kind: str = "Signal14", words: str = "was killed by signal 14 (SIGALRM)") -> ErrorReport:
    return raised(f"the process of train.py {words}", mistake="exit_status").model_copy(update={"type": kind})


def die_by(world: Any, error: ErrorReport | None, *, has_output: bool = False) -> None:
    """The process of rank 1 is killed, and the collective of rank 0 breaks first."""
    first, second = world.group()
    world.leave(first, ExitKind.COLLECTIVE_FAILED, broken(), has_output=has_output)
    world.now += 0.1
    world.leave(second, ExitKind.SCRIPT_DIED, error)
    world.deliver_all()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Signal14", "was killed by signal 14 (SIGALRM)"),
        ("Signal9", "was killed by signal 9 (SIGKILL)"),
        ("OutOfMemory", "was killed by the kernel: out of memory"),
    ],
)
def test_the_same_signal_three_times_in_a_row_ends_the_job_however_long_it_ran(
    new_world: NewWorld, kind: str, words: str
) -> None:
    world = script_world(new_world, workers=2).open(then=0)
    for expected in (True, True, False):
        die_by(world, killed(kind, words))
        assert again(world) is expected
    assert world.end.reason is EndReason.USER_ERROR and world.end.failure.mistake == REPEATED
    assert world.end.message == (
        f"the process of train.py {words}, on rank 1, 3 times in a row without a new step or a file with new content."
    )
    assert world.end.failure.ranks == (1,)


def test_progress_another_signal_a_notice_and_a_guardian_begin_the_count_of_signals_anew(new_world: NewWorld) -> None:
    world = script_world(new_world, workers=2).open(then=0)
    for has_output in (False, False, True, False):
        die_by(world, killed(), has_output=has_output)
        assert again(world)
    world.run(1)
    for error in (killed(), killed("Signal24"), killed(), killed("Signal24"), None, None, None):
        die_by(world, error)
        assert again(world)
    counted = world.state.health.program_end
    assert counted.words.startswith("Signal24") and counted.times == 1
    world.feed(NodesAvoided((AvoidedNode(node_id="n1", reason="drain requested", deadline=world.now + 1000.0),)))
    die_by(world, killed("Signal24"))
    assert world.state.health.program_end == counted, "a worker that has to leave gets signals"


def test_a_fault_that_comes_a_third_time_is_final(new_world: NewWorld) -> None:
    full = raised("no space left on device").model_copy(update={"type": "OSError", "error_class": ErrorClass.SYSTEM})
    world = script_world(new_world, workers=2, min_workers=2).open(then=5)
    for _ in range(3):
        first, second = world.group()
        world.leave(second, ExitKind.FINISHED)
        world.now += 3.0
        world.leave(first, ExitKind.WORKER_FAULT, full)
        world.deliver_all()
        world.start_all()
        world.recover()
        world.until(Stage.RUNNING, Stage.ENDED)
    assert world.end.reason is EndReason.USER_ERROR and world.end.failure.mistake == REPEATED
    assert world.end.message == (
        "OSError: no space left on device, on rank 0, 3 times in a row without a new step or a file with new content. "
        "Before, rank 1 had ended with status 0."
    )


def test_an_error_says_whether_the_attempt_had_run_for_long(new_world: NewWorld) -> None:
    for seconds in (0.0, LONG_S):
        world = script_world(new_world).open(then=0)
        world.pass_time(seconds)
        for worker in world.group():
            world.leave(worker, ExitKind.USER_ERROR, raised())
        world.deliver_all()
        assert world.end.reason is EndReason.USER_ERROR and world.end.has_run_long is bool(seconds)


def test_a_lost_worker_is_replaced_after_a_minute_if_no_step_is_reported(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    world.lose(1)
    started = world.count(StartWorker)
    world.pass_time(LONG_S - 1.0)
    assert world.count(StartWorker) == started, "a worker that starts would slow the first step down"
    world.pass_time(1.0)
    assert world.count(StartWorker) == started + 1 and world.state.incident is not None


# code


def update(world: Any) -> None:
    world.direct(code="b" * 64)
    world.start_all()


def test_new_code_starts_the_script_again_and_its_first_new_step_accepts_it(new_world: NewWorld) -> None:
    world = script_world(new_world, workers=2).open(then=5)
    update(world)
    assert world.count(CompareModels) == 0 and world.state.stage is Stage.SWITCHING
    world.cooperate()
    world.until(Stage.RUNNING)
    assert world.state.code.current == "b" * 64 and world.state.code.update.phase is UpdatePhase.TRIAL
    world.run(1)
    assert world.state.code.update is None and len(world.events("code.updated")) == 1


def test_new_code_that_fails_at_its_start_is_rolled_back(new_world: NewWorld) -> None:
    world = script_world(new_world, workers=2).open(then=5)
    update(world)
    world.cooperate()
    world.until(Stage.RUNNING)
    for worker in world.group():
        world.leave(worker, ExitKind.USER_ERROR, raised("a new mistake"))
    world.deliver_all()
    assert world.end is None and world.state.code.current == "" and world.events("code.rolled_back")
    world.until(Stage.RUNNING)
    world.run(1)
    assert world.end is None and world.state.progress.step == 7


# what is shown and booked


def test_what_a_script_does_not_report_is_not_shown(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=0)
    status = make_status(world.state, Readings(), spec_version=1, now=world.now)
    assert status.state is JobState.RUNNING and status.layout == ""
    unknown = ("loss", "lr", "grad_norm", "tokens", "tokens_per_s", "num_parameters", "total_steps", "eta_s", "step_at")
    assert [name for name in unknown if getattr(status, name) is not None] == []
    assert (status.data_share, status.node_loss, status.worker_loss) == (None, None, None)
    assert [one.type for one in status.conditions] == ["WorkersReady", "Progressing"]


def test_time_without_reports_is_productive(new_world: NewWorld) -> None:
    world = script_world(new_world, workers=8).open(then=0)
    world.pass_time(100.0)
    world.lose(1)
    booked = show(world.state.ledger)
    assert booked.seconds[Category.PRODUCTIVE] == pytest.approx(8 * 100.0, rel=0.01)


def test_the_time_until_the_first_report_of_a_group_is_not_productive(new_world: NewWorld) -> None:
    world = script_world(new_world, workers=8).open(then=1)
    starting = show(world.state.ledger).seconds[Category.STARTING]
    world.pass_time(10.0)
    world.run(1)
    assert show(world.state.ledger).seconds[Category.PRODUCTIVE] == pytest.approx(80.0)
    world.script_step = 1
    world.kill_script(world.group()[1])
    world.recover()
    world.pass_time(20.0)
    world.run(1)
    booked = show(world.state.ledger)
    assert booked.recovering[IncidentCause.SCRIPT_DIED] == pytest.approx(160.0)
    assert recovering(IncidentCause.SCRIPT_DIED) in world.state.ledger.booked
    world.pass_time(10.0)
    world.run(1)
    booked = show(world.state.ledger)
    assert booked.seconds[Category.PRODUCTIVE] == pytest.approx(160.0) and booked.seconds[Category.STARTING] == starting


def test_a_directive_with_the_settings_of_a_script_changes_nothing(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    directives = [event for event in world.history if isinstance(event, Directed)]
    world.direct()
    assert world.state.stage is Stage.RUNNING and not directives


def test_a_script_may_say_with_its_steps_when_it_ends(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    first = world.group()[0]
    world.send(first, step_report(first.run, 6, world.now).model_copy(update={"total_steps": 40}))
    world.deliver_all()
    assert world.state.history.total_steps == 40
    world.kill_script(world.group()[1])
    world.recover()
    assert world.state.history.total_steps == 40, "the next group need not say it again"


def test_a_drained_node_is_left_early_enough_for_the_grace_of_the_script(new_world: NewWorld) -> None:
    world = script_world(new_world).open(then=5)
    timeouts = world.state.config.timeouts
    deadline = world.now + timeouts.leave_margin_s + GRACE_S + 1.0
    world.feed(NodesAvoided((AvoidedNode(node_id="n2", reason="drain requested", deadline=deadline),)))
    world.pass_time(0.75)
    assert world.state.stage is Stage.RUNNING, "it waits for a worker that takes its place"
    world.pass_time(0.25)
    assert world.state.stage is Stage.SWITCHING and world.count(RequestYield) == 3


def test_an_attempt_after_a_lost_cluster_counts_the_steps_that_the_script_repeats(new_world: NewWorld) -> None:
    lost = LostAttempt(
        attempt=1, at=990.0, last_report_at=980.0, generation=3, workers=2, layout="", step=10, message="gone"
    )
    world = script_world(new_world, workers=2, lost=lost)
    world.state = replace(world.state, progress=replace(world.state.progress, step=10))
    world.script_step = 8
    world.open(then=0)
    assert not world.incidents()[0].closed, "it has reported steps before, so it will again"
    world.run(1)
    [incident] = world.incidents()
    assert (incident.cause, incident.closed, incident.steps_lost) == (IncidentCause.CLUSTER_LOST, True, 2)


def test_an_error_after_another_rank_had_ended_names_the_ranks_of_both(new_world: NewWorld) -> None:
    world = script_world(new_world, workers=2, min_workers=2).open(then=5)
    first, second = world.group()
    world.leave(second, ExitKind.FINISHED)
    world.now += 3.0
    world.leave(first, ExitKind.USER_ERROR, raised("no rank is left"))
    world.deliver_all()
    world.until(Stage.ENDED)
    error = world.end.failure.sentence
    assert world.end.sentence == f"{error}, on rank 0. Before, rank 1 had ended with status 0."
