"""Profiles and system metrics of jobs over REST and with the client."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_api.client import BadRequest
from shoal_api.client.errors import ApiError
from shoal_service.core.system_metrics import SystemMetric, SystemSample
from shoal_service.reports import SupervisorReports
from shoal_service.store import reporting
from shoal_service.views import JobStatus, ProfileState
from shoal_workers.contract.job import JobState
from shoal_workers.contract.profiles import Category, Profiled, ProfileFile, StepTimes

NAME = "trace-rank0-g1.json.gz"
CONTENT = b"\x1f\x8b" + bytes(range(256)) * 8192


def _end(service: Any, job_id: str, **changes: Any) -> None:
    """The supervisor reports a result."""
    times = (StepTimes(step=5, seconds={Category.COMPUTE: 0.2}),)
    item = Profiled(generation=1, number=1, rank=0, times=times, held_s=0.01, **changes)
    status = JobStatus(state=JobState.RUNNING)
    reports = SupervisorReports(attempt=1, seq=2, status=status, profiles=(item,))
    service.store.writing(reporting.apply, service.epoch)(job_id, reports, now=time.time())


def test_a_profile_is_requested_read_and_its_files_are_downloaded(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise()
    asked = service.client.request_profile(job_id, steps=2)
    assert (asked.number, asked.state, asked.steps) == (1, ProfileState.REQUESTED, 2)
    place = Path(service.checkpoint_url) / job_id / "profiles" / "profile-000001"
    place.mkdir(parents=True)
    (place / NAME).write_bytes(CONTENT)
    _end(service, job_id, files=(ProfileFile(name=NAME, bytes=len(CONTENT)),))
    [view] = service.client.profiles(job_id)
    assert view == service.client.profile(job_id, 1) and view.state is ProfileState.DONE
    assert view.mean_s(Category.COMPUTE) == 0.2
    out = io.BytesIO()
    service.client.save_profile_file(job_id, 1, NAME, out)
    assert out.getvalue() == CONTENT
    answer = service.http.get(f"/v1/jobs/{job_id}/profiles/1/files/{NAME}")
    assert (
        answer.headers["content-type"] == "application/gzip" and "attachment" in answer.headers["content-disposition"]
    )
    (place / NAME).unlink()
    with pytest.raises(ApiError) as error:
        service.client.save_profile_file(job_id, 1, NAME, out)
    assert error.value.code == "profile-not-found" and "not in the storage" in str(error.value)


def test_without_a_body_rank_0_is_profiled_for_three_steps(service: Any, supervise: Callable[..., str]) -> None:
    answer = service.http.post(f"/v1/jobs/{supervise()}/profiles")
    assert answer.status_code == 201
    assert (answer.json()["rank"], answer.json()["steps"]) == (0, 3)


def test_what_is_not_possible_is_said(service: Any, supervise: Callable[..., str], spec: Any) -> None:
    queued, job_id = service.client.submit(spec).id, supervise()
    service.client.request_profile(job_id)
    for call, code in (
        (lambda: service.client.request_profile(queued), "request-conflict"),
        (lambda: service.client.request_profile(job_id), "profile-open"),
        (lambda: service.client.profile(job_id, 7), "profile-not-found"),
        (lambda: service.client.save_profile_file(job_id, 1, NAME, io.BytesIO()), "profile-not-found"),
        (lambda: service.client.save_profile_file(job_id, 1, "..%2Fshoal.db", io.BytesIO()), "not-found"),
        (lambda: service.client.save_profile_file(job_id, 1, "shoal.db", io.BytesIO()), "invalid-request"),
    ):
        with pytest.raises(ApiError) as error:
            call()
        assert error.value.code == code


@pytest.mark.parametrize("body", [{"steps": 0}, {"steps": 21}, {"rank": -1}, {"ranks": 1}])
def test_an_impossible_request_is_refused(service: Any, supervise: Callable[..., str], body: dict[str, int]) -> None:
    assert service.http.post(f"/v1/jobs/{supervise()}/profiles", json=body).status_code == 422


def test_a_storage_that_the_server_cannot_reach_is_named(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise()
    service.client.request_profile(job_id)
    place = Path(service.checkpoint_url) / job_id / "profiles" / "profile-000001"
    place.parent.mkdir(parents=True)
    place.write_text("a file where the directory should be")
    _end(service, job_id, files=(ProfileFile(name=NAME, bytes=3),))
    with pytest.raises(ApiError) as error:
        service.client.save_profile_file(job_id, 1, NAME, io.BytesIO())
    assert error.value.code == "storage-away" and "NotADirectoryError" in str(error.value)


def test_a_file_that_a_job_has_linked_to_is_not_given(
    service: Any, supervise: Callable[..., str], tmp_path: Path
) -> None:
    job_id = supervise()
    service.client.request_profile(job_id)
    _end(service, job_id, files=(ProfileFile(name=NAME, bytes=3),))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / NAME).write_text("an administrator's token")
    place = Path(service.checkpoint_url) / job_id / "profiles" / "profile-000001"
    place.mkdir(parents=True)
    (place / NAME).symlink_to(tmp_path / "secret" / NAME)
    for _ in range(2):
        with pytest.raises(ApiError) as error:
            service.client.save_profile_file(job_id, 1, NAME, io.BytesIO())
        assert error.value.code == "profile-not-found"
        if not place.is_symlink():
            (place / NAME).unlink()
            place.rmdir()
            place.symlink_to(tmp_path / "secret")


SAMPLES = tuple(
    SystemSample(at=1000.0 + 10 * number, generation=1, values={"busy": (0.5, 0.25, 0.75, 1.0)}) for number in range(3)
)


def test_a_metric_comes_as_columns_by_rank(service: Any, supervise: Callable[..., str]) -> None:
    found = service.client.system(supervise(system=SAMPLES))
    assert (found.metric, found.metrics, found.width_s) == (SystemMetric.BUSY, (SystemMetric.BUSY,), 10.0)
    assert found.at == (1000.0, 1010.0, 1020.0) and found.ranks == (0, 1, 2, 3)
    assert found.values == ((0.5,) * 3, (0.25,) * 3, (0.75,) * 3, (1.0,) * 3)


def test_some_ranks_and_a_later_time_are_chosen(service: Any, supervise: Callable[..., str]) -> None:
    found = service.client.system(supervise(system=SAMPLES), ranks="0,2-9000000", after=1005.0)
    assert found.ranks == (0, 2, 3) and found.at == (1010.0, 1020.0)


@pytest.mark.parametrize("ranks", ["a", "1-", "-1", "1,,2", "1;2"])
def test_ranks_that_are_no_numbers_are_refused(service: Any, supervise: Callable[..., str], ranks: str) -> None:
    with pytest.raises(BadRequest) as caught:
        service.client.system(supervise(system=SAMPLES), ranks=ranks)
    assert "0,4-7" in str(caught.value)


def test_a_job_that_has_measured_nothing_has_empty_columns(service: Any, supervise: Callable[..., str]) -> None:
    assert service.client.system(supervise()).at == ()
