"""Every operation of the REST API has a method of the Python client, and every method an operation."""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator

from kit.sources import ROOT
from shoal_api.client import Client

OPENAPI = ROOT / "docs" / "reference" / "openapi.json"
WITHOUT_METHOD = {
    *("GET /problems", "GET /problems/{code}", "GET /v1/spec-schema"),
    *("POST /v1/session", "DELETE /v1/session"),
    *("POST /v1/clusters/{cluster}/reports", "GET /v1/clusters/{cluster}/orders"),
    "GET /v1/clusters/{cluster}/archives/{sha256}",
    *("POST /v1/jobs/{job_id}/attempts/{attempt}/reports", "GET /v1/jobs/{job_id}/attempts/{attempt}/directive"),
}
"""Documentation, and what only browsers, gateways and supervisors need."""
WITHOUT_REQUEST = {"jobs", "events", "wait", "scale", "update_code", "change_weights", "close", "base_url"}
"""Methods that call other methods, or send no request."""
_VERBS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def test_every_operation_has_a_method_and_every_method_an_operation() -> None:
    paths = json.loads(OPENAPI.read_text(encoding="utf-8"))["paths"]
    operations = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    public = [name for name, _ in inspect.getmembers(Client) if not name.startswith("_")]
    sent = {name: set(_requests(name)) for name in public if name not in WITHOUT_REQUEST}
    assert [name for name, requests in sent.items() if not requests] == []
    assert set.union(*sent.values()) == {re.sub(r"{\w+}", "{}", one) for one in operations - WITHOUT_METHOD}


def _requests(name: str) -> Iterator[str]:
    """Method and path of each request of a method, with {} for what is not constant."""
    route = getattr(getattr(Client, name), "route", None)
    if route is not None:
        yield re.sub(r"{\w+}", "{}", route)
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(Client, name))))
    local: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=variable)], value=value):
                local[variable] = value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                local |= {ast.unparse(one): value for one, value in zip(names, values, strict=True)}
    for call in ast.walk(tree):
        match call:
            case ast.Call(args=[ast.Constant(value=verb), path, *_]) if verb in _VERBS:
                yield f"{verb} {_template(path, local)}"
            case ast.Call(func=ast.Attribute(attr="_get" | "_save"), args=[path, *_]):
                yield f"GET {_template(path, local)}"


def _template(path: ast.expr, local: dict[str, ast.expr]) -> str:
    match path:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in local:
            return _template(local[name], local)
        case ast.JoinedStr(values=parts):
            return "".join(_template(part, local) for part in parts)
        case ast.FormattedValue(value=value):
            return _template(value, local)
        case ast.Call(func=ast.Name(id="job_path" | "api_path" as made_by), args=parts):
            begin = ["/v1/jobs"] if made_by == "job_path" else ["/v1"]
            return "/".join([*begin, *(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)])
        case _:
            return "{}"
