"""The fleet over time: the workers of each job, who gave what to whom, and the worker-seconds of projects."""

from collections.abc import Callable
from typing import Any

import pytest

from kit.views import incident_view
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.workers import IncidentClosed, IncidentOpened
from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.worker_changes import ChangeKind
from shoal_service.fleet_views import WorkerFlow
from shoal_service.store import Lease, Store, driving, timeline
from shoal_workers.contract.job import EndReason, IncidentCause, JobState

Submit = Callable[..., str]
Begin = Callable[..., Any]


def test_the_lane_of_a_job_changes_with_its_workers_and_the_decisions_say_why(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    giver, receiver, waits = submit(project="one"), submit(project="two"), submit(project="one")
    begin(giver).report(JobState.RUNNING)
    begin(receiver).report(JobState.RUNNING)
    grant = store.writing(driving.set_grant, lease.epoch)
    grant(receiver, workers=5, reason="Each worker adds more here.", flows=((giver, 2),), now=20.0)
    take = store.writing(driving.preempt, lease.epoch)
    take(giver, reason="Priority 5 before 0.", beneficiary=receiver, flows=((receiver, 1),), now=30.0)

    found = store.reading(timeline.read)(since=0.0, until=100.0)
    assert [job.id for job in found.jobs] == [receiver, giver], "the newest first, and none that never started"
    assert waits not in {one.job for one in found.decisions}
    newest = found.decisions[0]
    assert (newest.at, newest.kind, newest.job, newest.after) == (30.0, ChangeKind.PREEMPT, giver, 0)
    assert newest.others == (WorkerFlow(job=receiver, name=store.get_job(receiver).name, workers=1),)
    assert (newest.free, newest.reason) == (newest.before - 1, "Priority 5 before 0.")
    granted = found.decisions[1]
    assert (granted.at, granted.kind, granted.job, granted.after) == (20.0, ChangeKind.GROW, receiver, 5)
    assert [(one.job, one.workers) for one in granted.others] == [(giver, 2)]
    assert granted.free == 5 - granted.before - 2
    assert granted.reason == "Each worker adds more here." and granted.words.startswith("granted 5 workers")
    assert found.jobs[0].granted[-1] == 5
    for job in found.jobs:
        assert len(job.at) == len(job.workers) == len(job.granted) == len(job.states) > 0


def test_a_decision_of_an_older_release_names_the_job_for_which_another_was_preempted(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    giver, receiver = submit(), submit()
    begin(giver)
    take = store.writing(driving.preempt, lease.epoch)
    take(giver, reason="Priority 5 before 0.", beneficiary=receiver, now=30.0)
    preempted = store.reading(timeline.read)(since=0.0, until=100.0).decisions[0]
    assert [(one.job, one.workers) for one in preempted.others] == [(receiver, preempted.before)]


def test_a_job_grows_because_another_one_has_ended_or_was_paused(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    ended, grows = submit(), submit()
    end = AttemptEnd(reason=EndReason.FINISHED, message="all steps done", step=10)
    begin(grows).report(JobState.RUNNING)
    begin(ended).report(JobState.RUNNING, end=end)
    ended_at = store.get_job(ended).ended_at
    grant = store.writing(driving.set_grant, lease.epoch)
    workers = store.get_job(grows).status.desired_workers
    grant(grows, workers=9, reason="Got workers that were free.", now=ended_at + 2)

    grown, left, *_ = store.reading(timeline.read)(since=0.0, until=ended_at + 10).decisions
    assert (left.kind, left.job, left.after) == (ChangeKind.LEAVE, ended, 0) and "SUCCEEDED" in left.reason
    assert left.before == left.free > 0
    assert (grown.kind, grown.job, grown.others) == (ChangeKind.GROW, grows, ())
    assert [(one.job, one.workers) for one in grown.freed_by] == [(ended, min(left.free, grown.free))]
    assert [(one.job, one.workers) for one in left.taken_by] == [(grows, min(left.free, grown.free))]
    assert workers < 9


def test_a_lost_worker_and_the_group_after_it_are_changes_with_their_cause(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    job = submit()
    begin(job).report(JobState.RUNNING)
    record = store.writing(driving.record_event, lease.epoch)
    opened = IncidentOpened(
        id=1,
        cause=IncidentCause.NODE_DIED,
        witness="ray",
        ranks=(1, 2),
        message="its node is gone",
        generation=1,
        workers=4,
        step=7,
    )
    closed = IncidentClosed(
        id=1,
        cause=IncidentCause.NODE_DIED,
        action="re-formed",
        detect_s=0.1,
        recovery_s=0.5,
        steps_lost=0,
        from_workers=4,
        to_workers=3,
        state_source=None,
        bytes_moved=None,
    )
    record(job, opened, now=20.0)
    record(job, closed, now=22.0)
    back, lost, *_ = store.reading(timeline.read)(since=0.0, until=100.0).decisions
    assert (lost.kind, lost.before, lost.after, lost.free) == (ChangeKind.LOST, 4, 2, 0)
    assert "node_died" in lost.reason and "its node is gone" in lost.reason
    assert (back.kind, back.before, back.after) == (ChangeKind.RECOVERED, 2, 3)


def test_a_worker_that_is_known_to_be_lost_only_after_its_incident_opened_is_a_change(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    job = submit()
    incident = incident_view(
        witness="rank 0",
        worker_ids=("worker-1",),
        at=20.0,
        from_workers=2,
        closed=False,
        message="process 7 was killed",
    )
    begin(job).report(JobState.RUNNING, incidents=(incident,))
    opened = IncidentOpened(
        id=1,
        cause=IncidentCause.COLLECTIVE_FAILED,
        witness="rank 0",
        ranks=(),
        message="",
        generation=1,
        workers=2,
        step=7,
    )
    store.writing(driving.record_event, lease.epoch)(job, opened, now=20.1)
    lost, *_ = store.reading(timeline.read)(since=0.0, until=100.0).decisions
    assert (lost.kind, lost.before, lost.after) == (ChangeKind.LOST, 2, 1)
    assert "worker_died of rank 1" in lost.reason and "process 7 was killed" in lost.reason


def test_goodput_of_a_project_is_that_of_the_window_by_interval_and_by_cause(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    one, two = submit(project="one"), submit(project="two")
    for job in (one, two):
        begin(job).report(JobState.RUNNING)
    found = store.reading(timeline.read)(since=0.0, until=100.0)
    assert [project.project for project in found.projects] == ["one", "two"]
    assert (found.edges[0], found.edges[-1]) == (0.0, 100.0)
    for project in found.projects:
        assert project.total == sum(project.seconds.values()) > 0 and Category.QUEUED in project.seconds
        for category, amounts in project.by_interval.items():
            assert len(amounts) == len(found.edges) - 1
            assert sum(amounts) == pytest.approx(project.seconds[category], abs=0.1 * len(amounts))
    later = store.reading(timeline.read)(since=1e6, until=2e6)
    assert [(project.total, project.seconds) for project in later.projects] == [(0.0, {}), (0.0, {})]


def test_seconds_of_recovery_are_counted_by_the_cause_of_the_incident(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    job = submit()
    seconds = {Category.PRODUCTIVE: 30.0, Category.RECOVERING: 12.0}
    causes = {IncidentCause.NODE_DIED: 8.0, IncidentCause.WORKER_DIED: 4.0}
    goodput = Goodput(seconds=seconds, recovering=causes, total=42.0, at=50.0)
    begin(job).report(JobState.RUNNING, status_goodput=goodput)
    [found] = store.reading(timeline.read)(since=0.0, until=100.0).projects
    assert found.seconds[Category.RECOVERING] == pytest.approx(12.0)
    assert found.recovering == pytest.approx(causes)


def test_a_window_begins_with_what_was_there_before_and_leaves_out_what_had_ended(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    ended, lasting = submit(), submit()
    end = AttemptEnd(reason=EndReason.FINISHED, message="", step=10)
    begin(ended).report(JobState.RUNNING, end=end)
    begin(lasting).report(JobState.RUNNING)
    found = store.reading(timeline.read)(since=1e6, until=2e6)
    assert [(job.id, job.at) for job in found.jobs] == [(lasting, (1e6,))] and found.decisions == ()
    assert {one.project for one in found.projects} == {"default"}


def test_only_the_jobs_of_visible_projects_are_shown(store: Store, submit: Submit, begin: Begin, lease: Lease) -> None:
    mine, theirs = submit(project="mine"), submit(project="theirs")
    begin(mine)
    begin(theirs)
    take = store.writing(driving.preempt, lease.epoch)
    take(mine, reason="Priority.", beneficiary=theirs, now=30.0)
    found = store.reading(timeline.read)(since=0.0, until=100.0, visible={"mine"})
    assert {job.id for job in found.jobs} == {mine} == {one.job for one in found.decisions}
    assert {one.project for one in found.projects} == {"mine"}
    assert found.decisions[0].others[0].name == theirs, "not the name of a job that is not visible"


def test_the_use_of_a_project_is_summed_by_period_without_time_in_the_queue(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    """A job that crosses an edge counts on both sides, by its account at the edge."""
    crosses, within, waits = submit(project="one"), submit(project="one"), submit(project="two")
    early = Goodput(
        seconds={Category.PRODUCTIVE: 40.0, Category.QUEUED: 500.0, Category.DEGRADED: 3.0}, total=543.0, at=40.0
    )
    late = Goodput(
        seconds={Category.PRODUCTIVE: 100.0, Category.QUEUED: 500.0, Category.STARTING: 20.0}, total=620.0, at=160.0
    )
    attempt = begin(crosses)
    attempt.report(JobState.RUNNING, status_goodput=early, now=40.0)
    attempt.report(JobState.RUNNING, status_goodput=late, now=160.0)
    done = Goodput(seconds={Category.PRODUCTIVE: 7.0}, total=7.0, at=20.0)
    begin(within).report(JobState.RUNNING, status_goodput=done, now=20.0)

    first, second = store.reading(timeline.usage)([0.0, 100.0, 200.0])
    assert (first.project, first.since, first.until, first.num_jobs) == ("one", 0.0, 100.0, 2)
    assert first.productive_s == pytest.approx(70.0 + 7.0), "half of the seconds between the two reports"
    assert first.worker_s == pytest.approx(70.0 + 10.0 + 7.0)
    assert (second.since, second.num_jobs) == (100.0, 1)
    assert (second.productive_s, second.worker_s) == (pytest.approx(30.0), pytest.approx(40.0))
    assert waits not in {first.project, second.project}
    assert store.reading(timeline.usage)([0.0, 200.0], visible=frozenset({"two"})) == ()
    assert [row.project for row in store.reading(timeline.usage)([0.0, 200.0], project="one")] == ["one"]
