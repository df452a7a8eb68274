"""Writes lists of jobs as CSV and Parquet, a row for each job. Called by `shoal jobs`.

The columns are those that the user has asked for, after id, name and state; without any, the fields of the list. A
value that is a list or a section is its JSON.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal_api.cli.errors import CliError
from shoal_service.views import JobSummary

_FIRST = ("id", "name", "state")


def write_csv(path: Path, jobs: Sequence[JobSummary], columns: Sequence[str]) -> None:
    """Writes a file, or the standard output if the path is `-`. Raises CliError."""
    names, rows = _table(jobs, columns)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([["" if row[name] is None else row[name] for name in names] for row in rows])
    if str(path) == "-":
        sys.stdout.write(text.getvalue())
        return
    try:
        path.write_text(text.getvalue(), encoding="utf-8", newline="")
    except OSError as error:
        raise CliError(f"--csv {path} cannot be written: {error.strerror}") from None


def write_parquet(path: Path, jobs: Sequence[JobSummary], columns: Sequence[str]) -> None:
    """Writes a file; pyarrow comes with Ray. Raises CliError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        hint = "pip install pyarrow, or write --csv"
        raise CliError("--parquet needs the package pyarrow, which is not installed", hint=hint) from None
    names, rows = _table(jobs, columns)
    arrays = {name: _of_one_type([row[name] for row in rows]) for name in names}
    try:
        pyarrow.parquet.write_table(pyarrow.table(arrays), path)
    except OSError as error:
        raise CliError(f"--parquet {path} cannot be written: {error.strerror or error}") from None


def _table(jobs: Sequence[JobSummary], columns: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """The names of the columns, and a row by name for each job."""
    wanted = list(dict.fromkeys(column.replace('"', "") for column in columns))
    names = [*_FIRST, *(name for name in wanted if name not in _FIRST)]
    if not wanted:
        names = [name for name in JobSummary.model_fields if name != "values"]
    rows = []
    for job in jobs:
        known = {**job.model_dump(mode="json"), **job.values} if not wanted else {**job.values}
        known |= {name: known.get(name) or getattr(job, name) for name in _FIRST}
        rows.append({name: _plain(known.get(name)) for name in names})
    return names, rows


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _of_one_type(values: list[Any]) -> list[Any]:
    """A column of Parquet has one type: numbers become floats if one is, and everything text if a value is one."""
    types = {type(value) for value in values if value is not None}
    if len(types) <= 1:
        return values
    if types == {int, float}:
        return [None if value is None else float(value) for value in values]
    return [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
