"""The OpenAPI document: FastAPI's, with the bodies that routes decode themselves, the problems that each operation may
answer with, and examples.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from shoal_api.answers import Problem
from shoal_api.http.access.needs import Declarations
from shoal_api.http.problems import Kind
from shoal_service.access_views import ClusterTokenRequest, SessionRequest, TokenRequest
from shoal_service.artifact_views import AliasRequest, ModelRequest
from shoal_service.clusters.wire import ClusterReport
from shoal_service.control.planning import PlanRequest
from shoal_service.fleet_views import (
    ClusterPatch,
    CordonRequest,
    DrainRequest,
    NoticeRequest,
    ProjectRules,
    TableView,
    UserRules,
)
from shoal_service.views import ExtendRequest, JobPatch, MoveRequest, ProfileBody, SweepRequest, TakeRequest
from shoal_workers.contract.spec import JobSpec

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

_MODELS = (
    *(Problem, JobSpec, JobPatch, DrainRequest, PlanRequest, ProjectRules, UserRules),
    *(CordonRequest, NoticeRequest, ProfileBody, TokenRequest, SessionRequest),
    *(
        ExtendRequest,
        MoveRequest,
        TakeRequest,
        SweepRequest,
        ClusterReport,
        ClusterTokenRequest,
        ClusterPatch,
        TableView,
    ),
    *(ModelRequest, AliasRequest),
)
"""Models of the bodies that routes decode themselves, and of problems."""


EXAMPLES: dict[str, Any] = {
    "JobSpec": {"name": "tiny", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}},
    "JobPatch": {"elasticity": {"max_workers": 4}, "priority": 10, "labels": {"team": "speech", "draft": None}},
    "DrainRequest": {"reason": "kernel update", "deadline_s": 600},
    "CordonRequest": {"reason": "a fan is loud"},
    "NoticeRequest": {"deadline_s": 120, "reason": "spot instance reclaimed"},
    "PlanRequest": {
        "spec": {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}, "elasticity": {"max_workers": 8}},
        "workers": 8,
    },
    "ExtendRequest": {"steps": 2000},
    "TakeRequest": {"step": 1200},
    "ModelRequest": {"job": "job-2f8xq0a1b3cd", "step": 1000, "description": "the first one that is served"},
    "AliasRequest": {"version": 3},
    "MoveRequest": {"to": "west"},
    "TableView": {"where": "loss < 2 and not archived", "sort": "loss", "columns": "optimizer.lr,label.team"},
    "SweepRequest": {
        "name": "rates",
        "spec": {"name": "tiny", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}},
        "grid": {"optimizer.lr": ["1e-3", "4e-3", "1e-2"], "seed": [1, 2]},
        "limit": 4,
        "prune": "median",
        "warmup_steps": 40,
    },
    "ProfileBody": {"steps": 3, "rank": 0},
    "TokenRequest": {"name": "ada", "role": "operator", "projects": ["vision"], "expires_in_s": 2592000},
    "ClusterTokenRequest": {"name": "gateway-of-east", "expires_in_s": 31536000},
    "ClusterReport": {"life": "00112233445566aa", "number": 1, "error": "Ray does not answer yet"},
    "ClusterPatch": {"labels": {"region": "eu", "draft": None}},
    "SessionRequest": {"token": "shoal_3k9d2m7q_..."},
    "ProjectRules": {"weight": 2.0},
    "UserRules": {"max_queued": 20},
}
"""One example for each body that a route decodes itself."""

_OF_BODIES = (Kind.BAD_DOCUMENT, Kind.BODY_TOO_LARGE, Kind.UNSUPPORTED_MEDIA_TYPE)
_PROBLEMS: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    (r"\w+ ", (Kind.INVALID_REQUEST, Kind.UNKNOWN_HOST, Kind.UNAUTHENTICATED, Kind.TOO_MANY_REQUESTS)),
    (r"(POST|PUT|PATCH|DELETE) ", (Kind.CROSS_ORIGIN, Kind.CSRF)),
    (r"\w+ (/v1/(?!whoami|session)|/metrics)", (Kind.FORBIDDEN,)),
    (r"\w+ /v1/", (Kind.STORE_UNAVAILABLE,)),
    (r"GET /v1/(jobs|sweeps)$", (Kind.INVALID_CURSOR,)),
    (r"POST /v1/sweeps$", (Kind.INVALID_SPEC, Kind.CODE_UNKNOWN, Kind.SWEEP_CONFLICT, Kind.QUEUE_FULL)),
    (r"\w+ /v1/sweeps/{", (Kind.SWEEP_NOT_FOUND,)),
    (r"\w+ /v1/views/{", (Kind.PROJECT_NOT_FOUND,)),
    (r"PUT /v1/views/{", (Kind.REQUEST_CONFLICT,)),
    (r"DELETE /v1/views/{", (Kind.NOT_FOUND,)),
    (r"POST /v1/jobs$", (Kind.INVALID_SPEC, Kind.CODE_UNKNOWN, Kind.IDEMPOTENCY_CONFLICT, Kind.QUEUE_FULL)),
    (r"\w+ /v1/jobs/{job_id}", (Kind.JOB_NOT_FOUND,)),
    (r"POST /v1/jobs/dry-run", (Kind.INVALID_SPEC, Kind.CODE_UNKNOWN, Kind.QUEUE_FULL)),
    (r"PATCH /v1/jobs/{job_id}", (Kind.INVALID_PATCH, Kind.INVALID_SPEC, Kind.CODE_UNKNOWN, Kind.PRECONDITION_FAILED)),
    (r"(PATCH|POST) /v1/jobs/{job_id}", (Kind.JOB_ENDED, Kind.REQUEST_CONFLICT)),
    (r"DELETE /v1/jobs/{job_id}$", (Kind.REQUEST_CONFLICT,)),
    (r"(PUT|DELETE) /v1/jobs/{job_id}/checkpoints/{name}/pin", (Kind.REQUEST_CONFLICT,)),
    (r"\w+ /v1/jobs/{job_id}/checkpoints/{", (Kind.CHECKPOINT_NOT_FOUND, Kind.CHECKPOINT_CONFLICT)),
    (r"DELETE /v1/jobs/{job_id}/checkpoints/{name}$", (Kind.CHECKPOINT_KEPT, Kind.JOB_ENDED, Kind.REQUEST_CONFLICT)),
    (r"POST /v1/jobs/{job_id}/profiles", (Kind.PROFILE_OPEN,)),
    (r"GET /v1/jobs/{job_id}/profiles/{", (Kind.PROFILE_NOT_FOUND,)),
    (r"GET /v1/jobs/{job_id}/(media|files)/{", (Kind.NOT_FOUND,)),
    (r"GET /v1/(job-export|jobs/{job_id}/series)", (Kind.NOT_ACCEPTABLE,)),
    (r"GET /v1/jobs/{job_id}/stacks", (Kind.REQUEST_CONFLICT, Kind.NOT_READY)),
    (r"POST /v1/models/", (Kind.JOB_NOT_FOUND, Kind.CHECKPOINT_NOT_FOUND, Kind.CHECKPOINT_CONFLICT)),
    (r"(GET|PUT|DELETE) /v1/models/{", (Kind.PROJECT_NOT_FOUND, Kind.NOT_FOUND)),
    (r"\w+ /v1/nodes/{", (Kind.NODE_NOT_FOUND,)),
    (r"(POST|DELETE) /v1/nodes/{", (Kind.REQUEST_CONFLICT,)),
    (r"\w+ /v1/projects/{", (Kind.PROJECT_NOT_FOUND,)),
    (r"(PUT|DELETE|POST) /v1/projects/{", (Kind.PROJECT_CONFLICT,)),
    (r"\w+ /v1/users/{", (Kind.USER_NOT_FOUND,)),
    (r"(GET|POST) /v1/clusters/{cluster}/(reports|orders)", (Kind.GATEWAY_REFUSED,)),
    (r"GET /v1/clusters/{cluster}/archives", (Kind.NOT_FOUND,)),
    (r"(GET|PATCH|DELETE) /v1/clusters/{cluster}$", (Kind.CLUSTER_NOT_FOUND,)),
    (r"GET /v1/clusters/{cluster}/tokens", (Kind.CLUSTER_NOT_FOUND,)),
    (r"\w+ /v1/clusters/{cluster}/cordon", (Kind.CLUSTER_NOT_FOUND,)),
    (r"DELETE /v1/clusters/{cluster}$", (Kind.CLUSTER_CONFLICT,)),
    (r"POST /v1/jobs/{job_id}/move", (Kind.CLUSTER_NOT_FOUND, Kind.MOVE_REFUSED, Kind.PRECONDITION_FAILED)),
    (r"DELETE /v1/tokens/{", (Kind.TOKEN_NOT_FOUND,)),
    (r"GET /v1/webhooks", (Kind.JOB_NOT_FOUND,)),
    (r"PUT /v1/code/", (Kind.CODE_MISMATCH, Kind.BODY_TOO_LARGE, Kind.UNSUPPORTED_MEDIA_TYPE)),
    (r"POST /v1/plans", (Kind.INVALID_SPEC,)),
    (r"GET /readyz", (Kind.NOT_READY,)),
    (r"GET /problems/{", (Kind.NOT_FOUND,)),
)
"""The problems of every operation that begins with the expression: method and path."""

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


def body_of(model: str, media_types: tuple[str, ...], *, required: bool = True) -> dict[str, Any]:
    """Return `openapi_extra` of a route that decodes its body itself."""
    content: dict[str, Any] = {"schema": {"$ref": _REF.format(model=model)}}
    if model in EXAMPLES:
        content["example"] = EXAMPLES[model]
    return {"requestBody": {"required": required, "content": dict.fromkeys(media_types, content)}}


def build_openapi(app: FastAPI) -> dict[str, Any]:
    """Return the document, which is built at the first request for it."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, tags=_TAGS
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        _, extra = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF)
        for name, schema in extra["$defs"].items():
            schemas.setdefault(name, schema)
        problem = {
            "description": "A problem document; `type` is one of " + ", ".join(f"`{kind.uri}`" for kind in Kind) + ".",
            "content": {"application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}},
        }
        document["components"]["responses"] = {"Problem": problem}
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        permissions: Declarations = app.state.declarations
        document["components"]["examples"] = {kind.code: _example(kind) for kind in Kind}
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                operation["responses"].pop("422", None)
                permission = permissions[method.upper(), path]
                operation["security"] = [] if permission is None else [{"token": []}]
                operation["x-permission"] = permission
                kinds = _problems_of(f"{method.upper()} {path}", operation)
                for status in sorted({kind.status for kind in kinds}):
                    same = [kind for kind in kinds if kind.status == status]
                    operation["responses"][str(status)] = _answer(same)
                operation["responses"]["default"] = {"$ref": "#/components/responses/Problem"}
        _link(document["paths"])
        app.openapi_schema = document
    return app.openapi_schema


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


def _problems_of(name: str, operation: dict[str, Any]) -> list[Kind]:
    media_types = operation.get("requestBody", {}).get("content", {})
    kinds = list(_OF_BODIES) if JSON in media_types else []
    return kinds + [kind for pattern, found in _PROBLEMS if re.match(pattern, name) for kind in found]


def _answer(kinds: list[Kind]) -> dict[str, Any]:
    examples = {kind.code: {"$ref": f"#/components/examples/{kind.code}"} for kind in kinds}
    content = {"schema": {"$ref": _REF.format(model="Problem")}, "examples": examples}
    return {
        "description": ", or ".join(f"{kind.title} (`{kind.code}`)" for kind in kinds) + ".",
        "content": {"application/problem+json": content},
    }


def _example(kind: Kind) -> dict[str, Any]:
    problem = Problem(
        type=kind.uri, title=kind.title, status=kind.status, code=kind.code, detail=kind.value[3], instance="/v1/jobs"
    )
    return {"summary": kind.title, "value": problem.model_dump(mode="json", exclude_none=True)}
