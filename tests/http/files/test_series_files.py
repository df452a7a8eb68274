"""The series as CSV and as Parquet: every value, every step, and an answer in words where a format is not there."""

import csv
import io
import math
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import pytest

from shoal_api.answers import FileFormat
from shoal_api.client import ApiError
from shoal_api.http.routes.histories import find_columns, iter_series_file
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.views import JobStatus
from shoal_workers.contract.job import JobState

PLAIN = ["step", "at", "loss", "grad_norm", "lr", "tokens_per_s", "step_s", "world_size", "generation", "val_loss"]


def point(step: int, **values: Any) -> SeriesPoint:
    known = {"grad_norm": 1 / 3, "lr": 0.1, "tokens_per_s": 9.0, "step_s": 0.1, "world_size": 2, "generation": 1}
    return SeriesPoint(step=step, at=0.5 + step, **{"loss": 1 / step, **known, **values})


@pytest.fixture
def job_id(supervise: Callable[..., str]) -> str:
    points = (
        point(1, metrics={"acc/top-1": 0.1}),
        point(2, loss=math.nan, metrics={"acc/top-1": 0.2}, val_loss=1 / 7, val_metrics={"f1": 2 / 3}),
        point(3),
    )
    return supervise(series=points, status=JobStatus(state=JobState.RUNNING, step=3))


def file_of(service: Any, job_id: str, **arguments: Any) -> bytes:
    out = io.BytesIO()
    service.client.save_series(job_id, out, **arguments)
    return out.getvalue()


def test_csv_has_a_column_for_each_value_and_exact_numbers(service: Any, job_id: str) -> None:
    answer = service.http.get(f"/v1/jobs/{job_id}/series?format=csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"] == f'attachment; filename="{job_id}-series.csv"'
    head, *rows = csv.reader(io.StringIO(answer.text))
    assert head == [*PLAIN, "metrics.acc/top-1", "val_metrics.f1"]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    values = [dict(zip(head, row, strict=True)) for row in rows]
    assert [one["loss"] for one in values] == ["1.0", "", repr(1 / 3)]
    assert [one["val_loss"] for one in values] == ["", repr(1 / 7), ""]
    assert [one["metrics.acc/top-1"] for one in values] == ["0.1", "0.2", ""]
    assert [one["val_metrics.f1"] for one in values] == ["", repr(2 / 3), ""]


def test_parquet_has_the_same_with_types(service: Any, job_id: str) -> None:
    table = pq.read_table(io.BytesIO(file_of(service, job_id, format="parquet")))
    assert table.column_names == [*PLAIN, "metrics.acc/top-1", "val_metrics.f1"]
    assert [str(kind) for kind in table.schema.types] == [
        "int64" if name in ("step", "world_size", "generation") else "double" for name in table.column_names
    ]
    columns = table.to_pydict()
    assert columns["loss"] == [1.0, None, 1 / 3]
    assert columns["val_metrics.f1"] == [None, 2 / 3, None]


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_every_step_of_a_long_job_is_there_unless_means_are_asked_for(
    service: Any, supervise: Callable[..., str], format: str
) -> None:
    job_id = supervise(series=tuple(point(step) for step in range(1, 5_102)), status=JobStatus(step=5_101))
    assert steps_of(file_of(service, job_id, format=format), format) == list(range(1, 5_102))
    assert steps_of(file_of(service, job_id, format=format, after_step=5_000), format) == list(range(5_001, 5_102))
    assert len(steps_of(file_of(service, job_id, format=format, max_points=10), format)) == 10


def steps_of(data: bytes, format: str) -> list[int]:
    if format == "parquet":
        steps: list[int] = pq.read_table(io.BytesIO(data)).column("step").to_pylist()
        return steps
    return [int(row["step"]) for row in csv.DictReader(io.StringIO(data.decode()))]


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_job_without_a_step_has_the_columns_only(service: Any, spec: dict[str, Any], format: str) -> None:
    job = service.client.submit(spec)
    data = file_of(service, job.id, format=format)
    assert steps_of(data, format) == []
    assert data.decode().strip().split(",") == PLAIN if format == "csv" else True


def test_an_unknown_job_and_an_unknown_format_are_refused_before_anything_is_sent(service: Any, job_id: str) -> None:
    with pytest.raises(ApiError) as missing:
        file_of(service, "job-0")
    assert missing.value.problem.status == 404
    refused = service.http.get(f"/v1/jobs/{job_id}/series?format=xlsx")
    assert refused.status_code == 422 and "csv" in refused.text


@pytest.mark.parametrize("format", [FileFormat.CSV, FileFormat.PARQUET])
def test_a_file_is_made_piece_by_piece(format: FileFormat) -> None:
    asked: list[int] = []

    def pages() -> Any:
        for step in (1, 2, 3):
            asked.append(step)
            yield [point(step)]

    made = iter_series_file(format, find_columns([]), pages())
    assert next(made) and asked == [1]
    rest = b"".join(made)
    assert rest and asked == [1, 2, 3]
