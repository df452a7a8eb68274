"""Routes that answer with JSON documents, and the parameters that several routes have. Each is declared in one place,
from which the OpenAPI document is made too.

    router = JsonRouter("/v1/users", "scheduling")

    @router.route("PUT /{name}", Permission.QUOTAS_CHANGE, "Set the limits of a user", raises=[UserNotFound])
    def put_user(tx: Writing, name: UserName, rules: Annotated[UserRules, body(UserRules)]) -> UserView:
        return quotas.put_user(tx, name, rules)

    answer       the JSON of what the function returns, whose model is the annotation; 204 if that is None. A function
                 that makes its `Response` itself names the model as `answer`.
    thread       `def` runs on a worker thread, and so does the making of its JSON; `async def` on the event loop
    transaction  `tx: Reading` or `tx: Writing` in a `def`. It is committed before the answer is made.
    others       `context: AppContext`, `caller: Caller`, `job: Job`
    parameters   by their types, each with its rule and its description: `job_id: JobId, where: Where = ""`

The transaction is no dependency with `yield`: FastAPI would enter and leave it on other threads than the function's.
The JSON is not left to FastAPI, which checks it again on one more thread: that costs a third of a small request.

Parameters that the route does not have are refused. The bodies of requests are read by `request_bodies.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic_core import to_json
from starlette.responses import Response

from shoal_api.http.access.authentication import read_principal
from shoal_api.http.access.needs import Needs
from shoal_api.http.context import Context
from shoal_api.http.problems import InvalidRequest
from shoal_api.http.request_bodies import JsonBody
from shoal_api.http.streams import EVENT_STREAM
from shoal_service.core.access import Permission, Principal
from shoal_service.core.where.language import MAX_SELECTORS, InvalidCondition, InvalidSelector, LabelSelector, Selection
from shoal_service.problems import ServiceError
from shoal_service.store import Transaction
from shoal_service.store.job_lists import FleetQuery, JobOrder
from shoal_service.views import JobView
from shoal_workers.contract import CLUSTER_PATTERN, JobState
from shoal_workers.contract.checks.spec_errors import SpecProblem, unknown_name


def wants_events(request: Request) -> bool:
    """Return whether the client accepts server-sent events."""
    return EVENT_STREAM in request.headers.get("accept", "")


MAX_SEQ = 2**63 - 1
MAX_CHOSEN = 500
"""Jobs that a request may name, at most."""
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
JobsOfProject = Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only jobs of this project.")]
JobsOfProjectAlone = Annotated[
    str | None, Query(pattern=PROJECT_NAME, description="Only jobs of this project, without those below it.")
]
Order = Annotated[JobOrder, Query(description="Used if `sort` names nothing. Jobs without the value come last.")]
Descending = Annotated[bool, Query(description="The largest, or newest, first.")]


def parse_selection(where: str, sort: str, columns: str, *, archived: bool, now: float) -> Selection:
    """Parse what selects and orders jobs. Raises InvalidRequest, whose detail shows the place of the mistake."""
    try:
        return Selection.parse(where, sort, columns, with_archived=archived, now=now)
    except InvalidCondition as error:
        raise InvalidRequest(str(error)) from None


async def refuse_unknown_query(request: Request) -> None:
    """A dependency of every route: a parameter with a spelling mistake must not be ignored.

    Raises:
        InvalidRequest: with the nearest parameter that the route has.
    """
    if not request.query_params:
        return
    known = set(_query_names(request.scope["route"].dependant))
    errors = tuple(
        SpecProblem(path=f"query.{name[:80]}", message=unknown_name("parameter", name, known))
        for name in request.query_params.keys() - known
    )
    if errors:
        raise InvalidRequest("; ".join(error.message for error in errors[:3]), errors)


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (param.alias for param in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _query_names(dependency)


_Function = TypeVar("_Function", bound=Callable[..., Any])
Problems = Sequence[type[ServiceError]]


@dataclass(frozen=True, slots=True)
class Operation:
    """What the OpenAPI document says of a route besides what FastAPI reads from its function."""

    needs: Needs
    raises: Problems
    body: JsonBody | None


class JsonRouter:
    """The routes of a prefix. All of them may answer with the problems `raises`."""

    def __init__(self, prefix: str, tag: str, raises: Problems = ()) -> None:
        self.api_router = APIRouter(prefix=prefix, tags=[tag], dependencies=[Depends(refuse_unknown_query)])
        self.operations: dict[str, Operation] = {}
        """By method and path: `GET /v1/users/{name}`."""
        self._raises = tuple(raises)

    def route(
        self,
        verb: str,
        needs: Permission | Needs,
        summary: str,
        *,
        answer: Any = None,
        status: int = 200,
        raises: Problems = (),
        body: JsonBody | None = None,
        **options: Any,
    ) -> Callable[[_Function], _Function]:
        """Declare a function as the route of a verb, such as "GET /{name}".

        Args:
            answer: model of the answer, if the function returns a Response.
            raises: problems that only this route may answer with.
            body: of a function that reads its body itself.
            options: of `APIRouter.add_api_route`.
        """
        method, _, path = verb.partition(" ")
        needed = needs if isinstance(needs, Needs) else Needs(needs)

        def declare(function: _Function) -> _Function:
            model = answer or get_type_hints(function)["return"]
            has_document = model is not type(None) and not (isinstance(model, type) and issubclass(model, Response))
            if not has_document:
                options["response_class"] = Response
            self.api_router.add_api_route(
                path,
                _wrap_route(function, status, is_empty=model is type(None)),
                methods=[method],
                dependencies=[Depends(needed)],
                summary=summary,
                status_code=status,
                response_model=model if has_document else None,
                **options,
            )
            route = self.api_router.routes[-1]
            assert isinstance(route, APIRoute)
            bodies = [
                dependency.call for dependency in route.dependant.dependencies if isinstance(dependency.call, JsonBody)
            ]
            operation = Operation(needed, (*self._raises, *raises), body or next(iter(bodies), None))
            self.operations[f"{method} {route.path_format}"] = operation
            return function

        return declare


def json_response(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a model, or a list or dictionary, as JSON."""
    content = to_json(document) if isinstance(document, list | dict) else document.model_dump_json()
    return Response(content, status, headers, media_type="application/json")


def _wrap_route(function: Callable[..., Any], status: int, *, is_empty: bool) -> Callable[..., Any]:
    """Make the function answer with a response, and a `def` open the transactions that it is passed."""

    def response_with(answer: Any) -> Response:
        if isinstance(answer, Response):
            return answer
        return Response(status_code=status) if is_empty else json_response(answer, status)

    @wraps(function)
    async def answer_on_loop(**arguments: Any) -> Response:
        return response_with(await function(**arguments))

    @wraps(function)
    def answer(**arguments: Any) -> Response:
        with ExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, AbstractContextManager):
                    arguments[name] = stack.enter_context(value)
            result = function(**arguments)
        return response_with(result)

    return answer_on_loop if inspect.iscoroutinefunction(function) else answer


async def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


async def _reading(request: Request) -> AbstractContextManager[Transaction]:
    """Return a transaction that is not open yet."""
    return (await _context(request)).store.read()


async def _writing(request: Request) -> AbstractContextManager[Transaction]:
    """Return a transaction that is not open yet."""
    return (await _context(request)).store.write()


def _job(context: AppContext, job_id: JobId) -> JobView:
    return context.store.get_job(job_id)


async def _caller(request: Request) -> Principal:
    return read_principal(request)


AppContext = Annotated[Context, Depends(_context)]
Reading = Annotated[Transaction, Depends(_reading)]
"""A transaction that reads, open while a `def` runs."""
Writing = Annotated[Transaction, Depends(_writing)]
"""A transaction that writes, open while a `def` runs."""
Caller = Annotated[Principal, Depends(_caller)]
"""Who makes the request."""


async def _jobs_filter(
    context: AppContext,
    caller: Caller,
    state: Annotated[list[JobState], Query(max_length=20, description="Only jobs in one of these states.")] = [],  # noqa: B006
    project: JobsOfProjectAlone = None,
    user: Annotated[str | None, Query(pattern=USER_NAME, description="Only jobs of this user.")] = None,
    label: Annotated[
        list[str],
        Query(
            max_length=MAX_SELECTORS,
            description="Only jobs whose labels match: `NAME`, `!NAME`, `NAME=VALUE` or `NAME!=VALUE`. May be "
            "repeated; all must match.",
        ),
    ] = [],  # noqa: B006
    search: Annotated[
        str,
        Query(
            max_length=200,
            description="Words, each a part of a name, an id, a project, a user or a label; all must be found.",
        ),
    ] = "",
    cluster: Annotated[
        str | None, Query(pattern=CLUSTER_PATTERN, description="Only jobs whose newest attempt has begun there.")
    ] = None,
    where: Annotated[
        str,
        Query(
            max_length=2000,
            description='Only jobs for which this holds: `lr > 1e-3 and state == "FAILED" and label.team == "speech"`. '
            "Names are those of `GET /v1/job-fields`; relations are == != < <= > >= ~ in; also and, or, not, "
            "parentheses, null, `now - 7d`.",
        ),
    ] = "",
    sort: Annotated[
        str,
        Query(
            max_length=500,
            description="Names to order by, separated by commas; a dash before one: the largest first. Jobs without a "
            "value come last.",
        ),
    ] = "",
    columns: Annotated[
        str,
        Query(
            max_length=4000,
            description="Names whose values each job has in `values`, separated by commas. In a file: its columns "
            "after id, name and state; default: the fields of `GET /v1/jobs`.",
        ),
    ] = "",
    archived: Annotated[
        bool, Query(description="Also archived jobs. A condition that names `archived` decides itself.")
    ] = False,
    job: Annotated[
        list[str],
        Query(max_length=MAX_CHOSEN, description="Only the jobs with these ids, also if they are archived."),
    ] = [],  # noqa: B006
) -> FleetQuery:
    try:
        labels = tuple(LabelSelector.parse(text) for text in label)
    except InvalidSelector as error:
        raise InvalidRequest(str(error)) from None
    return FleetQuery(
        search=search,
        states=frozenset(state),
        project=project,
        user=user,
        visible=caller.projects,
        labels=labels,
        cluster=cluster,
        ids=frozenset(job),
        selection=parse_selection(where, sort, columns, archived=archived or bool(job), now=context.clock()),
    )


JobsFilter = Annotated[FleetQuery, Depends(_jobs_filter)]
"""The parameters that select jobs: of the list, of the overview, of the curves and of the file. `limit` is the
route's, and so is an `order`."""
Job = Annotated[JobView, Depends(_job)]
"""The job in the path, as it is before the function runs."""
