"""`pause`, `resume` and `cancel` of several jobs, by name and by label."""

from typing import Any

from shoal_workers.contract.job import JobState


def test_several_jobs_are_cancelled_together(shoal: Any, service: Any) -> None:
    first, second, third = (service.add_job(name=name) for name in ("first", "second", "third"))
    ran = shoal("cancel", "first", second.id, first.id)
    assert ran.code == 0 and [line.split()[:3] for line in ran.out.splitlines()] == [
        [first.id, "first", "CANCELLED"],
        [second.id, "second", "CANCELLED"],
    ]
    assert shoal("cancel", third.id, "--json").json()["status"]["state"] == "CANCELLED", "one job is one document"


def test_a_mistyped_name_changes_nothing(shoal: Any, service: Any) -> None:
    job = service.add_job(name="first")
    assert shoal("cancel", "first", "frist").code == 4
    assert service.store.get_job(job.id).status.state is JobState.QUEUED


def test_the_refusal_of_one_does_not_keep_the_others(shoal: Any, service: Any) -> None:
    first, second = service.add_job(name="first"), service.add_job(name="second")
    shoal("cancel", "first")
    ran = shoal("pause", "first", "second", "--json")
    changed, refused = ran.json()
    assert (ran.code, changed["id"], changed["status"]["state"]) == (2, second.id, "PAUSED")
    assert (refused["id"], refused["error"]["exit_code"]) == (first.id, 2)
    ran = shoal("pause", "first", "second")
    assert ran.code == 2 and ran.out.split()[:3] == [second.id, "second", "PAUSED"] and first.id in ran.err


def test_the_jobs_with_a_label_are_paused_resumed_and_after_a_question_cancelled(shoal: Any, service: Any) -> None:
    ours = [service.add_job(name=name, labels={"team": "speech"}) for name in ("first", "second")]
    other, gone = service.add_job(name="other"), service.add_job(name="gone", labels={"team": "speech"})
    shoal("cancel", gone.id)
    for verb, state in (("pause", JobState.PAUSED), ("resume", JobState.QUEUED)):
        assert len(shoal(verb, "--label", "team=speech", "--json").json()) == 2
        assert {service.store.get_job(job.id).status.state for job in ours} == {state}
    ran = shoal("cancel", "--label", "team")
    assert ran.code == 2 and "this would cancel 2 jobs" in ran.err and "--yes" in ran.err and "first" in ran.err
    assert shoal("cancel", "--label", "team", "--yes").code == 0
    assert {service.store.get_job(job.id).status.state for job in ours} == {JobState.CANCELLED}
    assert service.store.get_job(other.id).status.state is JobState.QUEUED
    ran = shoal("cancel", "--label", "team", "--yes")
    assert ran.code == 4 and "no job that has not ended has --label team" in ran.err


def test_neither_a_name_nor_a_label_and_both_are_refused(shoal: Any, service: Any) -> None:
    service.add_job(name="first")
    assert "needs JOB..., --label or --where, and was given neither" in shoal("pause").err
    assert "and was given both" in shoal("pause", "first", "--label", "team").err
