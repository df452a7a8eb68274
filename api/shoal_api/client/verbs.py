"""Makes methods of the client from routes of the REST API. Called when the classes of the client are defined.

    @verb("POST /v1/nodes/{node_id}/drain", body=DrainRequest)
    def drain(self, node_id: str, *, reason: str = "drain requested") -> NodeView:
        \"\"\"Move jobs off the node at their next step boundary.\"\"\"

    path      the parameters that the route names
    body      a parameter that is a model; or, with `body`, the fields of that model
    query     the other parameters; one that is None is left out
    result    the return annotation: a model, a tuple of the items of a page, text, bytes, or None

So such a method has a signature and a docstring, and no body: `verb` puts the request in its place. What it returns is
what its annotation says. A method that needs more than this is written out, with the methods of `Endpoint`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import NoneType
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from shoal_api.client.errors import Disconnected
from shoal_api.client.transport import Transport, describe_failure
from shoal_service.views import Page

M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")
R = TypeVar("R")
_PAGE: Any = Page
"""A page of items whose type is found at run time."""


class Endpoint:
    """Sends requests to one service. The methods raise what `Transport.send` raises."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def _get(self, path: str, model: type[M], params: Mapping[str, Any] | None = None, wait_s: float = 0.0) -> M:
        return self._call("GET", path, model, params=params, wait_s=wait_s)

    def _call(self, method: str, path: str, model: type[M], **options: Any) -> M:
        """Send a request with the options of `_send`, and parse the answer."""
        return model.model_validate_json(self._send(method, path, **options).content)

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> httpx.Response:
        """Send a request with `body` as JSON, and the options of `Transport.send`."""
        if body is None:
            return self._transport.send(method, path, headers=headers, **options)
        content = body.model_dump_json() if isinstance(body, BaseModel) else json.dumps(body)
        headers = {**(headers or {}), "Content-Type": "application/json"}
        return self._transport.send(method, path, headers=headers, content=content.encode(), **options)

    def _save(
        self, path: str, out: BinaryIO, params: Mapping[str, Any] | None = None, *, raw: bool = False
    ) -> httpx.Headers:
        """Write the body of an answer to `out`, `raw` as it is or decoded, and return the headers. Raises Disconnected
        if the answer breaks off; `out` then has a part of it."""
        try:
            with self._transport.stream(path, params or {}, {}) as response:
                for piece in response.iter_raw() if raw else response.iter_bytes():
                    out.write(piece)
                return response.headers
        except httpx.TransportError as error:
            raise Disconnected(self._transport.base_url, describe_failure(error)) from error


E = TypeVar("E", bound=Endpoint)


def verb(
    route: str, *, body: type[BaseModel] | None = None, **options: Any
) -> Callable[[Callable[Concatenate[E, P], R]], Callable[Concatenate[E, P], R]]:
    """Make a method that sends the request of a route, such as "GET /v1/nodes/{node_id}".

    Args:
        body: model of the body, whose fields are the parameters that the route does not name.
        options: of `Transport.send`.
    """
    method, _, template = route.partition(" ")
    path_names = re.findall(r"{(\w+)}", template)

    def declare(function: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
        signature = inspect.signature(function)

        @wraps(function)
        def send(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            _, *parameters = bound.arguments.items()
            path = template.format(**{name: quote(str(value), safe="") for name, value in parameters})
            others = {name: value for name, value in parameters if name not in path_names}
            models = [value for value in others.values() if isinstance(value, BaseModel)]
            if body is not None:
                models = [body(**others)]
            document, params = (models[0], None) if models else (None, others)
            response = self._send(method, path, body=document, params=params, **options)
            answer: R = _parse_answer(_find_answer_type(function), response)
            return answer

        vars(send)["route"] = route
        return send

    return declare


@cache
def _find_answer_type(function: Callable[..., Any]) -> Any:
    # at the first call, since the evaluation of annotations would delay every import of the client
    return get_type_hints(function)["return"]


def _parse_answer(answer_type: Any, response: httpx.Response) -> Any:
    if answer_type is NoneType:
        return None
    if answer_type in (str, bytes):
        return response.text if answer_type is str else response.content
    if get_origin(answer_type) is tuple:
        [item_type, _] = get_args(answer_type)
        return _PAGE[item_type].model_validate_json(response.content).items
    return answer_type.model_validate_json(response.content)


def api_path(*parts: str) -> str:
    """Return the path of a resource, with each part quoted."""
    return "/".join(["/v1", *(quote(part, safe="") for part in parts)])


def job_path(job_id: str, *parts: str) -> str:
    return api_path("jobs", job_id, *parts)
