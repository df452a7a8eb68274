import pytest

from shoal_api.cli.errors import CliError
from shoal_api.cli.session import match_job
from shoal_service.views import JobSummary
from shoal_workers.contract.job import JobState


def job(job_id: str, name: str, created_at: float = 0.0, state: JobState = JobState.RUNNING) -> JobSummary:
    return JobSummary(id=job_id, name=name, state=state, created_at=created_at, updated_at=0)


JOBS = [job("abc1", "one"), job("abd2", "two"), job("abd2x", "abc1"), job("zz", "two", 5.0)]


def test_an_exact_id_wins_over_a_name_and_a_beginning() -> None:
    assert match_job("abc1", JOBS).id == "abc1"
    assert match_job("abd2", JOBS).id == "abd2"


def test_a_unique_name_or_beginning_is_enough() -> None:
    assert match_job("one", JOBS).id == "abc1"
    assert match_job("z", JOBS).id == "zz"


def test_an_ambiguous_reference_lists_the_newest_first() -> None:
    with pytest.raises(CliError) as caught:
        match_job("two", JOBS)
    assert caught.value.exit_code == 2
    assert caught.value.details[0].startswith("zz")


def test_an_unknown_reference_suggests_the_nearest_name() -> None:
    with pytest.raises(CliError) as caught:
        match_job("onne", JOBS)
    assert caught.value.exit_code == 4
    assert "'one'" in caught.value.hint


def test_an_empty_reference_matches_no_job() -> None:
    with pytest.raises(CliError):
        match_job("", JOBS)


def test_a_job_that_goes_on_wins_over_ended_ones_of_the_same_name() -> None:
    ended = [job("e1", "lm", 1.0, JobState.SUCCEEDED), job("e2", "lm", 9.0, JobState.FAILED)]
    assert match_job("lm", [*ended, job("r1", "lm", 5.0)]).id == "r1"
    with pytest.raises(CliError):
        match_job("lm", ended)
    with pytest.raises(CliError):
        match_job("lm", [*ended, job("r1", "lm", 5.0), job("r2", "lm", 6.0, JobState.QUEUED)])
