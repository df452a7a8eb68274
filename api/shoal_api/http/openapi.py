"""The OpenAPI document: FastAPI's, with the bodies that routes decode themselves, and problem documents for errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from shoal_api.answers import Problem
from shoal_api.http.problem_types import Kind
from shoal_service.control.planning_request import PlanRequest
from shoal_service.node_views import CordonRequest, NoticeRequest, WindowRequest
from shoal_service.profile_views import ProfileBody
from shoal_service.queue_views import ProjectRules, UserRules
from shoal_service.views import DrainRequest, JobPatch
from shoal_workers.contract.spec import JobSpec

_REF = "#/components/schemas/{model}"
_TAGS = [
    {"name": "jobs", "description": "Submit, list, show, change, pause, resume and cancel training jobs."},
    {"name": "overviews", "description": "Everything that a page shows, in one document or stream."},
    {"name": "histories", "description": "Events, logs, series, workers, incidents and checkpoints of a job."},
    {"name": "inspection", "description": "What the workers of a running job do."},
    {"name": "specs", "description": "Job specs, their code, and predicted layouts."},
    {"name": "scheduling", "description": "The queue, and projects with their quotas."},
    {"name": "operations", "description": "Cluster, nodes, health, metrics and problem types, for operators."},
]

_MODELS = (
    *(Problem, JobSpec, JobPatch, DrainRequest, PlanRequest, ProjectRules, UserRules),
    *(CordonRequest, NoticeRequest, WindowRequest, ProfileBody),
)
"""Of the bodies that routes decode themselves, and of problems."""


def body_of(model: str, media_types: tuple[str, ...], *, required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of a route that decodes its body itself."""
    schema = {"schema": {"$ref": _REF.format(model=model)}}
    return {"requestBody": {"required": required, "content": dict.fromkeys(media_types, schema)}}


def build_openapi(app: FastAPI) -> dict[str, Any]:
    """The document, built at the first request for it."""
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
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {"$ref": "#/components/responses/Problem"}
        app.openapi_schema = document
    return app.openapi_schema
