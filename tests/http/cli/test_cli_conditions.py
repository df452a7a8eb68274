"""Conditions, orders, columns and files of the table of jobs; and commands for several jobs."""

import csv
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from shoal_service.store.errors import JobNotFound
from shoal_workers.contract.job import EndReason, JobState


@pytest.fixture
def trained(service: Any) -> list[Any]:
    """A slow job that trains, a fast one that trains, and a fast one that has ended."""
    slow = service.add_job(name="slow", optimizer={"lr": 1e-4}, labels={"team": "speech"})
    fast = service.add_job(name="fast", optimizer={"lr": 1e-2}, labels={"team": "speech", "lr": "1e-2"})
    over = service.add_job(name="over", optimizer={"lr": 1e-2})
    for job in (slow, fast, over):
        service.train(job)
    service.finish(over)
    return [slow, fast, over]


def ids(ran: Any) -> list[str]:
    return [one["id"] for one in ran.json()]


def test_jobs_are_listed_by_a_condition_in_an_order_with_columns(shoal: Any, trained: list[Any]) -> None:
    slow, fast, over = trained
    condition = 'lr > 1e-3 and state == "RUNNING" and label.team == "speech"'
    assert ids(shoal("jobs", "--where", condition, "--json")) == [fast.id]
    assert ids(shoal("jobs", "--sort=-lr,created", "--json")) == [over.id, fast.id, slow.id]
    ran = shoal("jobs", "--where", "not ended", "--sort", "lr", "--columns", "lr,loss,label.lr,created")
    heads, *rows = [line.split() for line in ran.out.splitlines() if line.strip()]
    assert heads == ["id", "name", "state", "lr", "loss", "label.lr", "created"]
    assert [row[:6] for row in rows] == [
        [slow.id, "slow", "RUNNING", "0.0001", "4", "-"],
        [fast.id, "fast", "RUNNING", "0.01", "4", "1e-2"],
    ]
    assert rows[0][6:] == ["2023-11-14", "22:13:20Z"]


def test_a_mistake_is_shown_at_its_place(shoal: Any, service: Any) -> None:
    ran = shoal("jobs", "--where", "lr > 3 and los < 2")
    assert ran.code == 2 and "there is no 'los'; near it are loss" in ran.err
    shown, marks = ran.err.splitlines()[1:3]
    assert shown[marks.index("^") :] == "los < 2" and marks.strip() == "^^^"
    assert "not a name" in shoal("jobs", "--sort", "lr,?").err
    assert "optimizer.lr" in shoal("jobs", "--fields").out
    refused = shoal("jobs", "--fields", "--where", "lr > 3", "--limit", "5")
    assert refused.code == 2 and "--fields cannot be combined with --where, --limit" in refused.err


def test_the_table_is_written_as_csv_and_parquet(shoal: Any, trained: list[Any], tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("jobs.csv", "jobs.parquet")]
    columns = "lr,label.team,data,ended"
    ran = shoal("jobs", "--columns", columns, "--sort", "name", "--csv", str(files[0]), "--parquet", str(files[1]))
    assert ran.code == 0 and ran.out == "" and "3 jobs in" in ran.err
    with files[0].open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert [(row["name"], row["lr"], row["label.team"]) for row in rows] == [
        ("fast", "0.01", "speech"),
        ("over", "0.01", ""),
        ("slow", "0.0001", "speech"),
    ]
    table = pyarrow.parquet.read_table(files[1]).to_pylist()
    assert [(row["name"], row["lr"], row["label.team"]) for row in table] == [
        ("fast", 0.01, "speech"),
        ("over", 0.01, None),
        ("slow", 0.0001, "speech"),
    ]
    assert [row["ended"] is None for row in table] == [True, False, True]
    assert table[0]["data"] == rows[0]["data"] == '{"corpus": "python-stdlib"}'
    printed = shoal("jobs", "--csv", "-", "--limit", "1")
    assert printed.out.startswith("id,name,state,reason,step") and len(printed.out.splitlines()) == 2


def test_jobs_that_fit_are_shown_counted_and_changed_after_a_question(
    shoal: Any, service: Any, trained: list[Any]
) -> None:
    slow, fast, over = trained
    ran = shoal("cancel", "--where", "lr > 1e-3")
    assert (
        ran.code == 2
        and "this would cancel 1 job, and there is no terminal to confirm it" in ran.err
        and fast.id in ran.err
    )
    assert service.store.get_job(fast.id).status.state is JobState.RUNNING
    assert ids(shoal("label", "--where", "lr > 1e-3", "kind=fast", "--yes", "--json")) == [over.id, fast.id]
    assert service.store.get_job(over.id).spec.labels == {"kind": "fast"}
    assert ids(shoal("pause", "--where", 'label.kind == "fast"', "-y", "--json")) == [fast.id]
    assert ids(shoal("cancel", "--where", "loss", "--label", "team=speech", "-y", "--json")) == [fast.id, slow.id]
    assert shoal("cancel", "--where", "lr > 1", "-y").code == 4
    assert "was given both" in shoal("cancel", slow.id, "--where", "loss", "-y").err
    assert "needs NAME=VALUE" in shoal("label", "--where", "loss", "-y").err and "needs JOB" in shoal("label").err


def test_ended_jobs_are_archived_taken_back_and_deleted(shoal: Any, service: Any, trained: list[Any]) -> None:
    slow, fast, over = trained
    assert ids(shoal("archive", "--where", "loss", "-y", "--json")) == [over.id], "others have not ended"
    assert "cannot be archived before it has ended" in shoal("archive", slow.id).err
    assert ids(shoal("jobs", "--json")) == [fast.id, slow.id]
    assert ids(shoal("jobs", "--archived", "--json")) == [over.id, fast.id, slow.id]
    assert shoal("show", "over").code == 0, "a name means an archived job too"
    assert shoal("archive", "--where", "loss", "-y").code == 4
    assert ids(shoal("unarchive", "--where", "loss", "-y", "--json")) == [over.id]
    shoal("cancel", fast.id)
    service.finish(fast, EndReason.CANCELLED)
    ran = shoal("delete", "--where", "ended", "-y", "--json")
    assert ids_of_deleted(ran) == [over.id, fast.id]
    with pytest.raises(JobNotFound):
        service.store.get_job(over.id)
    assert ids(shoal("jobs", "--json")) == [slow.id]


def ids_of_deleted(ran: Any) -> list[str]:
    return [one["job_id"] for one in ran.json()]


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
