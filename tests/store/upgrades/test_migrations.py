"""A database of an older version is opened by this one: its rows are read, in today's words."""

from __future__ import annotations

import json

from sqlalchemy import Connection, text

from shoal_service.core.events.base import Severity
from shoal_service.store import Store, histories, job_lists, metrics_snapshot
from shoal_service.store.database import Database
from shoal_service.store.migrate import migrate
from shoal_workers.contract.job import IncidentCause, JobState, StateSource
from shoal_workers.contract.messages import LogStream
from shoal_workers.contract.spec import JobSpec

WORKER = "job-old/1/2"
SAID = 'the user wrote "shard_died" and "shard_id"'
"""Text of a user that holds words which the migration replaces elsewhere."""

JOB = {
    "num": 1,
    "id": "job-old",
    "name": "fish",
    "state": "RUNNING",
    "desired": "run",
    "priority": 0,
    "spec_version": 1,
    "spec_hash": "0" * 64,
    "attempt": 1,
    "granted_workers": 2,
    "pulled_seq": 9,
    "event_seq": 6,
    "log_seq": 1,
    "failures": 0,
    "failure_step": 0,
    "created_at": 1.0,
    "updated_at": 2.0,
    "status": json.dumps(
        {
            "message": SAID,
            "goodput": {
                "seconds": {"productive": 5.0, "recovering": 2.0},
                "recovering": {"shard_died": 2.0},
                "total": 7.0,
            },
        }
    ),
    "workers": json.dumps(
        [
            {
                "shard_id": WORKER,
                "rank": 1,
                "state": "training",
                "node_id": "n1",
                "node_ip": "10.0.0.1",
                "pid": 7,
                "generation": 2,
                "phase": "forward",
                "step": 41,
            }
        ]
    ),
}
EVENTS = [
    ("job.created", {"name": "fish", "spec_version": 1}),
    ("worker.lost", {"shard_id": WORKER, "rank": 1, "cause": "shard_died", "message": SAID}),
    (
        "incident.opened",
        {
            "id": 1,
            "cause": "memory_lost",
            "witness": "rank 0",
            "ranks": [],
            "message": "gone",
            "generation": 1,
            "workers": 2,
            "step": 40,
        },
    ),
    ("memory.recalled", {"nodes": ["n1"], "steps": 5, "until": 9.0}),
    ("node.cleared", {"node_id": "n1", "suspected_s": 5.0, "was": "it hung"}),
    ("moon.risen", {"phase": "full"}),
]
INCIDENT = {
    "id": 1,
    "attempt": 1,
    "cause": "shard_died",
    "witness": "ray",
    "ranks": [1],
    "shard_ids": [WORKER],
    "generation": 1,
    "at": 3.0,
    "from_workers": 2,
    "state_source": "memory",
    "message": SAID,
    "closed": True,
}


def _write_old_rows(connection: Connection, spec: JobSpec) -> None:
    """What version 0003 of the schema held."""
    _insert(connection, "jobs", JOB)
    specs = {"job_num": 1, "version": 1, "accepted_at": 1.0, "document": spec.model_dump_json()}
    _insert(connection, "job_specs", specs)
    for seq, (type_, data) in enumerate(EVENTS, start=1):
        row = {
            "job_num": 1,
            "seq": seq,
            "at": float(seq),
            "type": type_,
            "data": json.dumps(data, separators=(",", ":")),
        }
        _insert(connection, "events", row)
    incident = {"job_num": 1, "attempt": 1, "id": 1, "cause": "shard_died", "closed": True}
    _insert(connection, "incidents", {**incident, "document": json.dumps(INCIDENT)})
    line = {"job_num": 1, "seq": 1, "at": 1.0, "rank": 1, "shard_id": WORKER, "stream": "stdout", "text": SAID}
    _insert(connection, "logs", line)


def _insert(connection: Connection, table: str, row: dict[str, object]) -> None:
    columns, values = ", ".join(row), ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO {table} ({columns}) VALUES ({values})"), row)


def test_rows_of_schema_0003_are_read_in_the_words_of_today(empty_url: str, spec: JobSpec) -> None:
    database = Database(empty_url)
    migrate(database, "0003")
    with database.write() as tx:
        _write_old_rows(tx.connection, spec)
    database.close()
    store = Store.open(empty_url)

    job = store.get_job("job-old")
    assert (job.status.state, job.status.message) == (JobState.RUNNING, SAID)
    assert [one.project for one in store.reading(job_lists.page)(project="default").items] == ["default"]
    assert job.status.goodput is not None
    assert job.status.goodput.recovering == {IncidentCause.WORKER_DIED: 2.0}
    [worker] = store.reading(histories.read_workers)("job-old")
    assert worker.worker_id == WORKER
    [line] = store.reading(histories.read_logs)("job-old")
    assert (line.worker_id, line.stream, line.text) == (WORKER, LogStream.STDOUT, SAID)

    [incident] = store.reading(histories.read_incidents)("job-old")
    assert (incident.cause, incident.worker_ids) == (IncidentCause.WORKER_DIED, (WORKER,))
    assert (incident.state_source, incident.message) == (StateSource.MEMORY, SAID)
    shown = store.reading(metrics_snapshot.read)(metrics_snapshot.LiveJobs(), now=3.0)
    assert shown.incidents_by_cause == {IncidentCause.WORKER_DIED: 1}

    events = store.reading(histories.read_events)("job-old")
    assert [(event.type, event.severity, event.message) for event in events] == [
        ("job.created", Severity.INFO, "job created as fish"),
        ("worker.lost", Severity.ERROR, f"worker 2 (rank 1) lost: worker_died, {SAID}"),
        ("incident.opened", Severity.ERROR, "incident snapshot_lost: gone"),
        (
            "snapshot.recovering",
            Severity.WARNING,
            "workers are started on 1 node to read the snapshots in memory there, which may save 5 steps",
        ),
        ("node.cleared", Severity.SUCCESS, "node n1 has passed its test after 5.0 s"),
        ("moon.risen", Severity.INFO, "moon.risen phase=full"),
    ]
    assert events[4].data["reason"] == "it hung"
    store.close()
