"""What a follower says of its job while the server does not answer: only what is known."""

from shoal_api.cli.follow import meanwhile
from shoal_service.views import JobStatus, JobView
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState


def job(state: JobState, reason: str = "") -> JobView:
    spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 30}})
    status = JobStatus(state=state, reason=reason)
    return JobView(id="j", name="n", spec=spec, spec_version=1, etag="e", created_at=0.0, updated_at=0.0, status=status)


def test_a_job_that_trains_continues_with_its_cluster_not_without_any() -> None:
    assert meanwhile(job(JobState.RUNNING)) == "the job continues as long as its Ray cluster runs"
    assert meanwhile(None) == "the job continues as long as its Ray cluster runs"


def test_a_server_that_has_stopped_in_order_is_said_to_have_saved_the_job() -> None:
    for state in (JobState.PAUSING, JobState.QUEUED):
        assert "the next server continues the job from its last step" in meanwhile(job(state, "server_stopped"))


def test_a_job_that_does_not_train_does_not_continue() -> None:
    assert meanwhile(job(JobState.QUEUED, "capacity")) == "the job is QUEUED"
