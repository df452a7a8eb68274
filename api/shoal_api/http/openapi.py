"""The OpenAPI document: FastAPI's, with the bodies that routes decode themselves, the problems that each operation may
answer with, and examples.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from shoal_api.answers import Problem
from shoal_api.http.json_router import Operation
from shoal_api.http.problems import (
    BadDocument,
    BodyTooLarge,
    CrossOrigin,
    Csrf,
    Forbidden,
    InvalidRequest,
    TooManyRequests,
    UnknownHost,
    UnsupportedMediaType,
)
from shoal_api.http.request_bodies import JsonBody
from shoal_service.core.access import Permission
from shoal_service.problems import ProblemKind, ServiceError, Unauthenticated, problem_kinds
from shoal_service.store import StoreUnavailable

JSON = "application/json"
_REF = "#/components/schemas/{model}"
_TAGS = [
    {"name": "jobs", "description": "Submit, list, show, change, pause, resume and cancel training jobs."},
    {"name": "sweeps", "description": "Jobs that try the values of a grid, submitted, shown and cancelled together."},
    {"name": "overviews", "description": "Everything that a page shows, in one document or stream."},
    {"name": "histories", "description": "Events, logs, series, workers, incidents and checkpoints of a job."},
    {"name": "supervisors", "description": "What supervisors of running attempts report and ask, each with its token."},
    {"name": "inspection", "description": "What the workers of a running job do."},
    {"name": "artifacts", "description": "Media that a job has logged, lineage of checkpoints, and registered models."},
    {"name": "specs", "description": "Job specs, their code, and predicted layouts."},
    {"name": "scheduling", "description": "The queue, and projects with their quotas."},
    {"name": "access", "description": "Who one is, sessions of the page, API tokens, and the audit."},
    {"name": "clusters", "description": "Clusters, their cordons, labels and tokens; and what their gateways ask."},
    {"name": "operations", "description": "Cluster, nodes, health, metrics and problem types, for operators."},
]

_LINKS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("POST /v1/jobs", "/v1/jobs/{job_id}", {"job_id": "$response.body#/id"}),
    ("GET /v1/jobs", "/v1/jobs/{job_id}", {"job_id": "$response.body#/items/0/id"}),
    (
        "GET /v1/jobs/{job_id}/checkpoints",
        "/v1/jobs/{job_id}/checkpoints/{name}",
        {"job_id": "$request.path.job_id", "name": "$response.body#/items/0/name"},
    ),
    (
        "POST /v1/jobs/{job_id}/profiles",
        "/v1/jobs/{job_id}/profiles/{number}",
        {"job_id": "$request.path.job_id", "number": "$response.body#/number"},
    ),
    (
        "POST /v1/sweeps",
        "/v1/sweeps/{project}/{name}",
        {"project": "$response.body#/project", "name": "$response.body#/name"},
    ),
    ("PUT /v1/projects/{name}", "/v1/projects/{name}", {"name": "$request.path.name"}),
    ("PUT /v1/users/{name}", "/v1/users/{name}", {"name": "$request.path.name"}),
    ("GET /v1/nodes", "/v1/nodes/{node_id}", {"node_id": "$response.body#/items/0/id"}),
    ("POST /v1/tokens", "/v1/tokens/{token_id}", {"token_id": "$response.body#/id"}),
)
"""An answer of the first operation gives the parameters of all operations whose path begins with the second one, and
has no other parameters."""


def build_openapi(app: FastAPI) -> dict[str, Any]:
    """Return the document, which is built at the first request for it."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, tags=_TAGS
        )
        operations: dict[str, Operation] = app.state.operations
        kinds = problem_kinds()
        problem = {
            "description": "A problem document; `type` is one of "
            + ", ".join(f"`{kind.uri}`" for kind in kinds.values())
            + ".",
            "content": {"application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}},
        }
        document["components"] |= {
            "responses": {"Problem": problem},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "examples": {kind.code: _example(kind) for kind in kinds.values()},
            "schemas": _schemas(operations) | _without_validation_errors(document["components"]["schemas"]),
        }
        for path, verbs in document["paths"].items():
            for method, described in verbs.items():
                _describe(described, f"{method.upper()} {path}", operations[f"{method.upper()} {path}"])
        _link(document["paths"])
        app.openapi_schema = document
    return app.openapi_schema


def _schemas(operations: dict[str, Operation]) -> dict[str, Any]:
    """Return the schemas of problems and of the bodies, which FastAPI does not know."""
    bodies = [operation.body for operation in operations.values() if operation.body is not None]
    models: set[type[BaseModel]] = {Problem, *(body.model for body in bodies)}
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    definitions: dict[str, Any] = schemas["$defs"]
    return definitions


def _without_validation_errors(schemas: dict[str, Any]) -> dict[str, Any]:
    return {name: schema for name, schema in schemas.items() if name not in ("HTTPValidationError", "ValidationError")}


def _describe(described: dict[str, Any], verb: str, operation: Operation) -> None:
    """Add to FastAPI's description of an operation what it needs, its body, and its problems."""
    permission = operation.needs.permission
    described["security"] = [] if permission is None else [{"token": []}]
    described["x-permission"] = permission
    if operation.body is not None:
        described["requestBody"] = _body(operation.body)
    kinds = _problems(verb, operation, described.get("requestBody", {}).get("content", {}))
    answers = described["responses"]
    answers.pop("422", None)
    for status in sorted({kind.status for kind in kinds}):
        answers[str(status)] = _answer([kind for kind in kinds if kind.status == status])
    answers["default"] = {"$ref": "#/components/responses/Problem"}


def _body(body: JsonBody) -> dict[str, Any]:
    content = {"schema": {"$ref": _REF.format(model=body.model.__name__)}, "example": body.example}
    return {"required": body.required, "content": dict.fromkeys(body.media_types, content)}


def _problems(verb: str, operation: Operation, body: dict[str, Any]) -> list[ProblemKind]:
    """Return the problems that any operation of this kind may answer with, then those of the route."""
    errors: list[type[ServiceError]] = [BadDocument, BodyTooLarge, UnsupportedMediaType] if JSON in body else []
    errors += [InvalidRequest, UnknownHost, Unauthenticated, TooManyRequests]
    if not verb.startswith("GET"):
        errors += [CrossOrigin, Csrf]
    if operation.needs.permission not in (None, Permission.WHOAMI):
        errors.append(Forbidden)
    if " /v1/" in verb:
        errors.append(StoreUnavailable)
    return [error.kind for error in (*errors, *operation.raises)]


def _link(paths: dict[str, Any]) -> None:
    """Describe which operations go on with what an answer names."""
    for source, prefix, parameters in _LINKS:
        method, path = source.split(" ")
        links = {
            operation["operationId"]: {"operationId": operation["operationId"], "parameters": parameters}
            for target, operations in paths.items()
            if target.startswith(prefix) and set(re.findall(r"{(\w+)}", target)) == set(parameters)
            for operation in operations.values()
        }
        answers = paths[path][method.lower()]["responses"]
        for status in answers:
            if status.startswith("2"):
                answers[status]["links"] = links


def _answer(kinds: list[ProblemKind]) -> dict[str, Any]:
    examples = {kind.code: {"$ref": f"#/components/examples/{kind.code}"} for kind in kinds}
    content = {"schema": {"$ref": _REF.format(model="Problem")}, "examples": examples}
    return {
        "description": ", or ".join(f"{kind.title} (`{kind.code}`)" for kind in kinds) + ".",
        "content": {"application/problem+json": content},
    }


def _example(kind: ProblemKind) -> dict[str, Any]:
    problem = Problem(
        type=kind.uri, title=kind.title, status=kind.status, code=kind.code, detail=kind.meaning, instance="/v1/jobs"
    )
    return {"summary": kind.title, "value": problem.model_dump(mode="json", exclude_none=True)}
