"""Routes about a spec that is not submitted yet: its code, a check, its JSON Schema, its predicted layouts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.answers import CodeStored, SpecCheck
from shoal_api.http.access.limits import LIMITER
from shoal_api.http.documents import SPEC, body, read_body, read_spec, require_media_type
from shoal_api.http.edge import CLIENT_GONE
from shoal_api.http.json_router import AppContext, JsonRouter, json_response
from shoal_api.http.long_poll import while_connected
from shoal_api.http.problems import BodyTooLarge, InvalidSpec, UnsupportedMediaType
from shoal_service.control.code_archive import CodeArchiveError, check
from shoal_service.control.planning import MeasuredSteps, PlanAnswer, PlanRequest
from shoal_service.control.submission import check_spec
from shoal_service.core.access import Permission
from shoal_service.store import InvalidArchive, archives
from shoal_service.store.measured_steps import newest_steps
from shoal_service.telemetry.tallies import Limit
from shoal_workers.contract.checks.spec_errors import SpecError, job_spec_schema

_ZIP_TYPES = ("application/zip", "application/octet-stream")
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ZIP_BODY = {"requestBody": {"required": True, "content": dict.fromkeys(_ZIP_TYPES, _BINARY)}}
_PLAN = {
    "spec": {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}, "elasticity": {"max_workers": 8}},
    "workers": 8,
}
Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="Hexadecimal SHA-256 of the body.")]

router = JsonRouter("/v1", "specs")


@router.route(
    "PUT /code/{sha256}",
    Permission.JOBS_SUBMIT,
    "Upload a code archive",
    status=201,
    openapi_extra=_ZIP_BODY,
    raises=[InvalidArchive, BodyTooLarge, UnsupportedMediaType],
)
async def put_code(request: Request, context: AppContext, sha256: Sha256) -> CodeStored:
    """Stores a zip of the user's modules under its SHA-256; a spec names it as `code.archive`. Idempotent."""
    require_media_type(request, _ZIP_TYPES)
    with request.scope[LIMITER].upload(request):
        data = await read_body(request, Limit.ARCHIVE_BYTES)
        try:
            await run_in_threadpool(check, sha256, data)
        except CodeArchiveError as error:
            raise InvalidArchive(str(error)) from None
        archive = await run_in_threadpool(archives.checked, sha256, data)
        await run_in_threadpool(context.store.writing(archives.put), archive, now=context.clock())
    return CodeStored(sha256=sha256, bytes=len(data))


@router.route("POST /specs/validate", Permission.SPECS_CHECK, "Check a job spec without submitting it", body=SPEC)
async def validate_spec(request: Request, context: AppContext) -> SpecCheck:
    """Lists every error of the spec. For an invalid spec the answer is 200 with `valid: false`."""
    try:
        spec = await read_spec(request)
        check_spec(spec, context.places, context.webhooks)
    except SpecError as error:
        return SpecCheck(valid=False, errors=error.problems)
    return SpecCheck(valid=True, spec=spec)


@router.route("GET /spec-schema", Permission.SPECS_CHECK, "JSON Schema of a job spec")
async def spec_schema() -> dict[str, Any]:
    """The schema is for editors and generators. It has the keys of `model` and `data` for each of the built-in
    tasks."""
    return job_spec_schema()


@router.route(
    "POST /plans", Permission.SPECS_CHECK, "Predict the layouts of a job", answer=PlanAnswer, raises=[InvalidSpec]
)
async def make_plan(
    request: Request, context: AppContext, plan: Annotated[PlanRequest, body(PlanRequest, _PLAN)]
) -> Response:
    """Ranks legal layouts for a number of workers, or of GPUs of one kind, best first: memory and step time by
    part, with reasons. Steps that jobs on this hardware have measured correct the predictions. Nothing is submitted or
    run. A search that takes longer than 20 s is refused."""
    jobs = await run_in_threadpool(context.store.reading(newest_steps))
    measured = [MeasuredSteps(spec=job.spec, workers=job.workers, step_s=job.step_s) for job in jobs]
    answer = await while_connected(request, context.planning.answer(plan, measured))
    return Response(status_code=CLIENT_GONE) if answer is None else json_response(answer)
