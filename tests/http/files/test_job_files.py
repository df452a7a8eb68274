"""The table of jobs as CSV and as Parquet: the same rows and order as the list, typed columns, in pages."""

import csv
import io
import json
import math
import sys
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from shoal_api.answers import FileFormat
from shoal_api.client import ApiError, Client
from shoal_api.http.routes import job_tables
from shoal_api.http.table_files import ColumnType, Spool, iter_csv, iter_parquet
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.store import access, job_lists, submissions
from shoal_service.store.job_lists import FleetQuery
from shoal_workers.contract.checks.spec_errors import parse_spec

FORMATS = ["csv", "parquet"]
SPEC: dict[str, Any] = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 10}}
TASK = "shapes:Shapes"
MANY = 5_000


@pytest.fixture(scope="module")
def jobs(service: Any) -> list[Any]:
    """Three jobs of the project `files`, which differ in what their columns hold."""
    made = [
        {
            "name": "a",
            "optimizer": {"lr": 1},
            "labels": {"team": "=1+1", "seed": "-5"},
            "task": TASK,
            "model": {"dim": 64},
        },
        {"name": "b", "optimizer": {"lr": 0.5}, "labels": {"team": "speech"}, "task": TASK, "model": {"dim": 32.5}},
        {"name": "c", "annotations": {"notes": "- one\n- two, three"}, "task": TASK, "model": {"dim": "wide"}},
    ]
    return [add(service, **one) for one in made]


def add(service: Any, project: str = "files", **changes: Any) -> Any:
    spec = parse_spec({**SPEC, "project": project, **changes})
    return service.store.writing(submissions.create)(spec, idempotency_key=None, now=time.time())[0]


def rows_of(data: bytes, format: str) -> list[dict[str, Any]]:
    if format == "csv":
        return list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(data)).to_pylist()
    return rows


def exported(client: Client, format: str, **asked: Any) -> list[dict[str, Any]]:
    out = io.BytesIO()
    num_jobs = client.export_jobs(out, format=format, **asked)
    rows = rows_of(out.getvalue(), format)
    assert num_jobs == len(rows)
    return rows


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_has_the_jobs_of_the_list_in_its_order(service: Any, jobs: list[Any], format: str) -> None:
    for asked in (
        {"project": "files"},
        {"project": "files", "sort": "-optimizer.lr,created"},
        {"project": "files", "where": 'label.team == "speech" or annotation.notes'},
        {"label": ["!team"], "project": "files"},
        {"search": "speech", "project": "files"},
        {"project": "files", "limit": 2},
    ):
        listed = [one.id for one in service.client.jobs(**asked)]
        assert listed and [row["id"] for row in exported(service.client, format, **asked)] == listed, asked
    chosen = [jobs[2].id, jobs[0].id]
    assert [row["name"] for row in exported(service.client, format, job=chosen)] == ["c", "a"]
    found = service.http.get("/v1/job-export", params={"project": "files", "order": "name", "descending": "false"})
    assert [row["name"] for row in rows_of(found.content, "csv")] == ["a", "b", "c"]


def test_without_columns_a_file_has_the_fields_of_the_list(service: Any, jobs: list[Any]) -> None:
    [listed, *_] = service.http.get("/v1/jobs?project=files").json()["items"]
    listed.pop("values")
    [row, *_] = exported(service.client, "parquet", project="files")
    assert row == listed
    [text, *_] = exported(service.client, "csv", project="files")
    assert list(text) == list(listed) and text["created_at"] == str(listed["created_at"]) and text["loss"] == ""


def test_columns_of_parquet_have_one_type(service: Any, jobs: list[Any]) -> None:
    columns = 'name,optimizer.lr,label.seed,model.dim,data,archived,label.none,annotation."notes"'
    answer = service.http.get("/v1/job-export", params={"format": "parquet", "project": "files", "columns": columns})
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    assert answer.headers["content-disposition"] == 'attachment; filename="jobs.parquet"'
    table = pq.read_table(io.BytesIO(answer.content))
    types = {name: str(kind) for name, kind in zip(table.column_names, table.schema.types, strict=True)}
    assert types["id"] == types["name"] == types["state"] == "string"
    assert types["optimizer.lr"] == "double", "an integer and a float"
    assert types["model.dim"] == "string", "one is a text"
    assert types["label.seed"] == types["annotation.notes"] == types["data"] == "string"
    assert types["label.none"] == "null" and types["archived"] == "bool"
    rows = {row["name"]: row for row in table.to_pylist()}
    assert (rows["a"]["optimizer.lr"], rows["b"]["optimizer.lr"]) == (1.0, 0.5)
    assert [rows[name]["model.dim"] for name in "abc"] == ["64", "32.5", "wide"]
    assert rows["a"]["label.seed"] == "-5" and json.loads(rows["a"]["data"]) == {"corpus": "python-stdlib"}


def test_text_that_a_spreadsheet_would_run_has_an_apostrophe_in_csv_and_none_in_parquet(
    service: Any, jobs: list[Any]
) -> None:
    asked = {"project": "files", "columns": "label.team,label.seed,annotation.notes", "sort": "name"}
    first, _, last = exported(service.client, "csv", **asked)
    assert (first["label.team"], first["label.seed"]) == ("'=1+1", "-5"), "a number is no formula"
    assert last["annotation.notes"] == "'- one\n- two, three"
    first, _, last = exported(service.client, "parquet", **asked)
    assert (first["label.team"], last["annotation.notes"]) == ("=1+1", "- one\n- two, three")


def test_cells_of_csv() -> None:
    cells: dict[Any, str] = {
        "@SUM(A1)": "'@SUM(A1)",
        "\t=1": "'\t=1",
        "-1-1": "'-1-1",
        "- a": "'- a",
        "+1e3": "+1e3",
        "-5": "-5",
        "a=b": "a=b",
        "": "",
        -1: "-1",
        0.1: "0.1",
        True: "true",
        math.inf: "",
        None: "",
    }
    rows = rows_of(b"".join(iter_csv(["a", "=b"], [[[cell, "x"] for cell in cells]])), "csv")
    assert [row["a"] for row in rows] == list(cells.values())
    assert list(rows[0]) == ["a", "'=b"]


def test_the_role_and_the_projects_of_a_token_count(service: Any, jobs: list[Any]) -> None:
    add(service, project="secret", name="hidden")

    def client(role: Role) -> Client:
        request = TokenRequest(name="ada", role=role, projects=("files",))
        made = service.store.writing(access.create_token)(request, by="test", now=time.time())
        return Client(service.url, token=made.token)

    with client(Role.VIEWER) as viewer:
        for format in FORMATS:
            assert {row["project"] for row in exported(viewer, format)} == {"files"}
            assert exported(viewer, format, project="secret") == []
        hidden = [one.id for one in service.client.jobs(project="secret")]
        assert exported(viewer, "csv", job=hidden) == []
    with client(Role.SCRAPER) as scraper, pytest.raises(ApiError) as refused:
        exported(scraper, "csv")
    assert refused.value.problem.status == 403
    assert httpx.get(f"{service.url}/v1/job-export", trust_env=False).status_code == 401


def test_a_mistake_is_answered_in_words_before_the_file_begins(service: Any) -> None:
    for asked, words in (
        ({"where": "los < 2"}, "there is no 'los'"),
        ({"columns": "?"}, "not a name"),
        ({"format": "xlsx"}, "parquet"),
        ({"wher": "loss"}, "where"),
        ({"cursor": "x"}, "cursor"),
        ({"job": ["x"] * 501}, "job"),
    ):
        answer = service.http.get("/v1/job-export", params=asked)
        assert answer.status_code == 422 and words in answer.text, asked


def test_parquet_without_pyarrow_is_refused_in_words(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    answer = service.http.get("/v1/job-export?format=parquet")
    assert answer.status_code == 406 and "csv needs nothing" in answer.json()["detail"]
    assert service.http.get("/v1/job-export?format=csv").status_code == 200


def rate_of(number: int) -> float:
    return (number + 1) / 70


@pytest.fixture(scope="module")
def many(service: Any) -> Iterator[str]:
    """A project of many jobs, written in one transaction."""
    spec = parse_spec({**SPEC, "project": "many"})
    with service.store.write() as tx:
        for number in range(MANY):
            rate = spec.optimizer.model_copy(update={"lr": rate_of(number)})
            one = spec.model_copy(update={"name": f"n{number}", "optimizer": rate})
            submissions.create(tx, one, idempotency_key=None, now=1e9 + number)
    yield "many"


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_many_jobs_are_each_there_once_and_a_page_at_a_time(service: Any, many: str, format: str) -> None:
    columns, sort = "optimizer.lr,created", "optimizer.lr"
    rows = exported(service.client, format, project=many, columns=columns, sort=sort)
    assert [row["name"] for row in rows] == [f"n{number}" for number in range(MANY)]
    assert [float(row["optimizer.lr"]) for row in rows] == [rate_of(number) for number in range(MANY)]


@pytest.mark.slow
def test_a_csv_is_read_as_far_as_it_is_sent_and_leaves_out_jobs_that_are_deleted_meanwhile(
    service: Any, many: str
) -> None:
    nums = service.store.reading(job_lists.nums)(FleetQuery(project=many, limit=2_000))
    asked: list[int] = []

    def pages() -> Iterator[Any]:
        for begin in range(0, 2_000, 500):
            asked.append(begin)
            jobs = service.store.reading(job_lists.summaries)([*nums[begin : begin + 500], 10**9])
            yield [[one.id, one.name] for one in jobs]

    made = iter_csv(["id", "name"], pages())
    assert next(made) and asked == [0]
    assert len(b"".join(made).splitlines()) == 1_500, "a number without a job has no row"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_jobs(service: Any, many: str) -> None:
    def peak_bytes(num_jobs: int, format: FileFormat) -> int:
        query = FleetQuery(project=many, limit=num_jobs)
        nums = service.store.reading(job_lists.nums)(query)
        tracemalloc.start()
        try:
            size = sum(len(piece) for piece in job_tables.iter_jobs_file(service.store, format, nums, ()))
            assert size > 10 * num_jobs
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    for format in FileFormat:
        peak_bytes(1_000, format)  # what is made once
        assert peak_bytes(MANY, format) < 1.5 * peak_bytes(1_000, format) + 2**20, format


def test_a_spool_gives_back_what_it_has_taken_and_the_types() -> None:
    pages = [
        [[1, "a", None, True, [1, {"b": 2}], 2**70], [2.5, 1, math.nan, False, None, 3]],
        [[None, False, None, None, "x", None]],
    ]
    with Spool(6) as spool:
        for page in pages:
            spool.add(page)
        assert spool.types == (
            ColumnType.NUMBER,
            ColumnType.TEXT,
            ColumnType.NOTHING,
            ColumnType.SWITCH,
            ColumnType.TEXT,
            ColumnType.TEXT,
        )
        data = b"".join(iter_parquet(list("abcdef"), spool.types, spool.pages()))
    assert [list(row.values()) for row in rows_of(data, "parquet")] == [
        [1.0, "a", None, True, '[1, {"b": 2}]', str(2**70)],
        [2.5, "1", None, False, None, "3"],
        [None, "false", None, None, "x", None],
    ]
