"""The parameters that several routes have, each with its rule and its description, and what selects and orders jobs.

A function names them as types: `job_id: JobId, where: Where = ""`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import Header, Path, Query

from shoal_api.http.problems import InvalidRequest
from shoal_service.core.selection import MAX_SELECTORS, InvalidSelector, LabelSelector
from shoal_service.core.where.language import InvalidCondition, Selection
from shoal_service.store.job_lists import JobOrder
from shoal_workers.contract.job import JobState
from shoal_workers.contract.placing import CLUSTER_PATTERN

MAX_SEQ = 2**63 - 1
JOB_ID = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
PROJECT_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
USER_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._@-]{0,61}[A-Za-z0-9])?$"

JobId = Annotated[str, Path(pattern=JOB_ID, description="The id of the job, as its submission answered.")]
ProjectName = Annotated[
    str, Path(pattern=PROJECT_NAME, description="At most 63 lower-case letters, digits and inner dashes.")
]
ClusterName = Annotated[str, Path(pattern=CLUSTER_PATTERN, description="The name under which the cluster joins.")]
IfMatch = Annotated[
    str | None,
    Header(alias="If-Match", max_length=1024, description="Change the job only if its ETag is this one."),
]
LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        pattern=r"^[0-9]{0,18}$",
        description="Number of the last event that the client has received.",
    ),
]
Cursor = Annotated[str | None, Query(max_length=512, description="`next_cursor` of the page before.")]

# lists of jobs
States = Annotated[list[JobState], Query(max_length=20, description="Only jobs in one of these states.")]
JobsOfProject = Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only jobs of this project.")]
JobsOfProjectAlone = Annotated[
    str | None, Query(pattern=PROJECT_NAME, description="Only jobs of this project, without those below it.")
]
JobsOfUser = Annotated[str | None, Query(pattern=USER_NAME, description="Only jobs of this user.")]
JobsOfCluster = Annotated[
    str | None, Query(pattern=CLUSTER_PATTERN, description="Only jobs whose newest attempt has begun there.")
]
Labels = Annotated[
    list[str],
    Query(
        max_length=MAX_SELECTORS,
        description="Only jobs whose labels match: `NAME`, `!NAME`, `NAME=VALUE` or `NAME!=VALUE`. May be repeated; "
        "all must match.",
    ),
]
Search = Annotated[
    str,
    Query(
        max_length=200,
        description="Words, each a part of a name, an id, a project, a user or a label; all must be found.",
    ),
]
Where = Annotated[
    str,
    Query(
        max_length=2000,
        description='Only jobs for which this holds: `lr > 1e-3 and state == "FAILED" and label.team == "speech"`. '
        "Names are those of `GET /v1/job-fields`; relations are == != < <= > >= ~ in; also and, or, not, parentheses, "
        "null, `now - 7d`.",
    ),
]
Sort = Annotated[
    str,
    Query(
        max_length=500,
        description="Names to order by, separated by commas; a dash before one: the largest first. Jobs without a "
        "value come last.",
    ),
]
Columns = Annotated[
    str,
    Query(max_length=4000, description="Names whose values each job has in `values`, separated by commas."),
]
Archived = Annotated[bool, Query(description="Also archived jobs. A condition that names `archived` decides itself.")]
Order = Annotated[JobOrder, Query(description="Used if `sort` names nothing. Jobs without the value come last.")]
Descending = Annotated[bool, Query(description="The largest, or newest, first.")]


def selection_of(where: str, sort: str, columns: str, *, archived: bool, now: float) -> Selection:
    """Parse what selects and orders jobs. Raises InvalidRequest, whose detail shows the place of the mistake."""
    try:
        return Selection.parse(where, sort, columns, with_archived=archived, now=now)
    except InvalidCondition as error:
        raise InvalidRequest(str(error)) from None


def selectors_of(texts: Sequence[str]) -> tuple[LabelSelector, ...]:
    """Parse the values of the parameter `label`. Raises InvalidRequest."""
    try:
        return tuple(LabelSelector.parse(text) for text in texts)
    except InvalidSelector as error:
        raise InvalidRequest(str(error)) from None
