"""Labels and annotations of a job: changed by merging, on request. Labels have a table of their own, in which jobs are
found by them. Functions of an open transaction.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, delete, insert

from shoal_service.store.tables import job_labels
from shoal_service.views import JobPatch
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem
from shoal_workers.contract.spec import SWEEP_LABEL, JobSpec

_INSERT = insert(job_labels)


def only_describes(changes: JobPatch) -> bool:
    """The request names nothing on which scheduling or training depends, so a job that has ended can have it too."""
    return bool(changes.model_fields_set) and changes.model_fields_set <= {"labels", "annotations"}


def merged(before: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """JSON Merge Patch (RFC 7396) of one level: null removes, and to remove what is not there changes nothing."""
    both = {**before, **changes}
    return {name: value for name, value in both.items() if value is not None}


def require_label_of_sweep(spec: JobSpec, changes: Mapping[str, str | None]) -> None:
    """Raises SpecError: the label by which the jobs of the sweep are found would be removed."""
    if spec.sweep is not None and changes.get(SWEEP_LABEL, spec.sweep.name) is None:
        message = f"labels.{SWEEP_LABEL} is set from sweep.name, which is {spec.sweep.name!r}: it cannot be removed."
        raise SpecError((SpecProblem(path=f"labels.{SWEEP_LABEL}", message=message),))


def replace(connection: Connection, job_num: int, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Writes the rows that differ."""
    gone = [name for name, value in before.items() if after.get(name) != value]
    if gone:
        connection.execute(delete(job_labels).where(job_labels.c.job_num == job_num, job_labels.c.key.in_(gone)))
    rows = [
        {"job_num": job_num, "key": name, "value": value} for name, value in after.items() if before.get(name) != value
    ]
    if rows:
        connection.execute(_INSERT, rows)
