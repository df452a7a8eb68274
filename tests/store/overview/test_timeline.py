"""The fleet over time: the workers of each job, who gave what to whom, and the worker-seconds of projects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_service.core.endings import AttemptEnd
from shoal_service.core.goodput import Category
from shoal_service.store import Lease, Store, driving, timeline
from shoal_workers.contract.job import EndReason, JobState

Submit = Callable[..., str]
Begin = Callable[..., Any]


def test_the_lane_of_a_job_changes_with_its_workers_and_the_decisions_say_why(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    giver, receiver, waits = submit(project="one"), submit(project="two"), submit(project="one")
    begin(giver).report(JobState.RUNNING)
    begin(receiver).report(JobState.RUNNING)
    grant = store.writing(driving.set_grant, lease.epoch)
    grant(receiver, workers=3, reason="Each worker adds more here.", now=20.0)
    take = store.writing(driving.preempt, lease.epoch)
    take(giver, reason="Priority 5 before 0.", beneficiary=receiver, now=30.0)

    found = store.reading(timeline.read)(since=0.0, until=100.0)
    assert [job.id for job in found.jobs] == [receiver, giver], "the newest first, and none that never started"
    assert waits not in {one.job for one in found.decisions}
    newest = found.decisions[0]
    assert (newest.at, newest.job, newest.after, newest.to) == (30.0, giver, 0, receiver)
    assert (newest.to_name, newest.reason) == (store.get_job(receiver).name, "Priority 5 before 0.")
    granted = found.decisions[1]
    assert (granted.at, granted.job, granted.after, granted.to) == (20.0, receiver, 3, "")
    assert granted.reason == "Each worker adds more here." and granted.words.startswith("granted 3 workers")
    assert found.jobs[0].granted[-1] == 3
    for job in found.jobs:
        assert len(job.at) == len(job.workers) == len(job.granted) == len(job.states) > 0
    assert {one.project for one in found.projects} == {"one", "two"}
    assert all(one.total == sum(one.seconds.values()) > 0 for one in found.projects)
    assert all(Category.QUEUED in one.seconds for one in found.projects)


def test_a_window_begins_with_what_was_there_before_and_leaves_out_what_had_ended(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    ended, lasting = submit(), submit()
    end = AttemptEnd(reason=EndReason.FINISHED, message="", step=10)
    begin(ended).report(JobState.RUNNING, end=end)
    begin(lasting).report(JobState.RUNNING)
    found = store.reading(timeline.read)(since=1e6, until=2e6)
    assert [(job.id, job.at) for job in found.jobs] == [(lasting, (1e6,))] and found.decisions == ()


def test_only_the_jobs_of_visible_projects_are_shown(store: Store, submit: Submit, begin: Begin, lease: Lease) -> None:
    mine, theirs = submit(project="mine"), submit(project="theirs")
    begin(mine)
    begin(theirs)
    take = store.writing(driving.preempt, lease.epoch)
    take(mine, reason="Priority.", beneficiary=theirs, now=30.0)
    found = store.reading(timeline.read)(since=0.0, until=100.0, visible={"mine"})
    assert {job.id for job in found.jobs} == {mine} == {one.job for one in found.decisions}
    assert {one.project for one in found.projects} == {"mine"}
    assert found.decisions[0].to_name == theirs, "not the name of a job that is not visible"
