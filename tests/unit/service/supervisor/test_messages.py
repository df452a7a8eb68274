"""Messages between control plane and supervisor survive pickling and JSON."""

import pickle

from kit.views import incident_view, series_point, worker_view
from shoal_service.core.attempt.state.attempt import Attempt, AttemptConfig, Target
from shoal_service.core.attempt.state.stages import Opening
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import PendingEvent, PendingLog, SupervisorReports, SuspectedNode
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.journal import JournalEntry, Unacknowledged
from shoal_service.views import CheckpointView, Condition, JobStatus
from shoal_workers.contract.fault_tolerance import ElasticitySpec
from shoal_workers.contract.job import EndReason, IncidentCause, JobState, UserFailure
from shoal_workers.contract.spec import JobSpec

SPEC = JobSpec.model_validate({"stop": {"steps": 12}, "task": "m:T", "data": {"paths": ["a", "b"]}})
DIRECTIVE = Directive(
    epoch=3, granted=2, desired=Desired.PAUSE, elasticity=ElasticitySpec(), parallelism="auto", spec_version=4
)
END = AttemptEnd(
    reason=EndReason.USER_ERROR,
    message="ValueError: boom",
    step=7,
    failure=UserFailure(type="ValueError", message="boom", traceback="tb", phase="forward", ranks=(0, 2), step=7),
)


def test_configuration_and_directives_survive_pickling_and_json() -> None:
    config = SupervisorConfig(
        job_id="j", attempt=1, spec=SPEC, checkpoint_root="/c", granted=2, epoch=3, spec_version=1, code_uri=None
    )
    for value in (config, DIRECTIVE):
        assert pickle.loads(pickle.dumps(value)) == value
        assert type(value).model_validate_json(value.model_dump_json()) == value


def test_reports_survive_pickling_and_json() -> None:
    reports = SupervisorReports(
        attempt=2,
        seq=(3 << 32) + 5,
        events=(PendingEvent(at=1.0, type="incident.opened", data={"ranks": [1], "cause": "stuck", "to": None}),),
        incidents=(
            incident_view(
                cause=IncidentCause.NODE_DIED,
                witness="run call",
                ranks=(1, 2),
                worker_ids=("a", "b"),
                node_id="n",
                generation=3,
                to_workers=2,
                steps_lost=1,
                closed=True,
            ),
        ),
        checkpoints=(CheckpointView(step=8, url="s3://b/c", state="committed", attempt=2, generation=3, bytes=9),),
        series=(series_point(8, at=1.0, loss=2.5, lr=1e-4, tokens_per_s=1e6, step_s=0.1, world_size=4, generation=3),),
        logs=(PendingLog(at=1.0, rank=None, worker_id="a", stream="stderr", text="é\x00"),),
        status=JobStatus(
            state=JobState.RECOVERING,
            conditions=(Condition(type="WorkersReady", status=False, reason="r", message="m", since=1.0),),
        ),
        workers=(worker_view(worker_id="a", node_id="n", node_ip="10.0.0.1", pid=7, generation=3, step=8),),
        end=END,
    )
    assert pickle.loads(pickle.dumps(reports)) == reports
    assert SupervisorReports.model_validate_json(reports.model_dump_json()) == reports


def test_a_journal_entry_survives_json() -> None:
    state = Attempt(
        config=AttemptConfig(job_id="j", attempt=1, checkpoint_root="/c"),
        target=Target(spec=SPEC, granted=2),
        current=Opening(since=1.0),
    )
    entry = JournalEntry(
        state=state,
        seq=9,
        unacknowledged=(
            Unacknowledged(seq=9, item=PendingEvent(at=1.0, type="worker.started", data={"pid": 7})),
            Unacknowledged(seq=10, item=SuspectedNode(at=2.0, node_id="n", reason="computes wrong")),
        ),
        end=END,
        directive=DIRECTIVE,
    )
    assert JournalEntry.model_validate_json(entry.model_dump_json()) == entry
