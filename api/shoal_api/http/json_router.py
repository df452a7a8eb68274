"""Routes that answer with JSON documents. Each is declared in one place, from which the OpenAPI document is made too.

    router = JsonRouter("/v1/users", "scheduling")

    @router.route("PUT /{name}", Permission.QUOTAS_CHANGE, "Set the limits of a user", raises=[UserNotFound])
    def put_user(tx: Writing, name: UserName, rules: Annotated[UserRules, body(UserRules)]) -> UserView:
        return quotas.put_user(tx, name, rules)

    answer       the JSON of what the function returns, whose model is the annotation; 204 if that is None. A function
                 that makes its `Response` itself names the model as `answer`.
    thread       `def` runs on a worker thread, and so does the making of its JSON; `async def` on the event loop
    transaction  `tx: Reading` or `tx: Writing` in a `def`. It is committed before the answer is made.
    others       `context: AppContext`, `caller: Caller`, `job: Job`

The transaction is no dependency with `yield`: FastAPI would enter and leave it on other threads than the function's.
The JSON is not left to FastAPI, which checks it again on one more thread: that costs a third of a small request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from pydantic_core import to_json
from starlette.responses import Response

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import Needs
from shoal_api.http.context import Context
from shoal_api.http.documents import JsonBody, refuse_unknown_query
from shoal_api.http.parameters import JobId
from shoal_service.core.access import Permission, Principal
from shoal_service.problems import ServiceError
from shoal_service.store.database import Transaction
from shoal_service.views import JobView

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
                _answering(function, status, is_empty=model is type(None)),
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


def _answering(function: Callable[..., Any], status: int, *, is_empty: bool) -> Callable[..., Any]:
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
    return principal_of(request)


AppContext = Annotated[Context, Depends(_context)]
Reading = Annotated[Transaction, Depends(_reading)]
"""A transaction that reads, open while a `def` runs."""
Writing = Annotated[Transaction, Depends(_writing)]
"""A transaction that writes, open while a `def` runs."""
Caller = Annotated[Principal, Depends(_caller)]
"""Who makes the request."""
Job = Annotated[JobView, Depends(_job)]
"""The job in the path, as it is before the function runs."""
