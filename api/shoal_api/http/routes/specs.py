"""Routes about a spec that is not submitted yet: its code, a check, its JSON Schema, its predicted layouts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.answers import CodeStored, SpecCheck
from shoal_api.http.access.limits import LIMITER
from shoal_api.http.access.needs import needs
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, YAML_TYPES, read_body, read_model, read_spec, require_media_type
from shoal_api.http.edge import CLIENT_GONE
from shoal_api.http.long_poll import while_connected
from shoal_api.http.openapi import body_of
from shoal_api.http.problems import Kind, ProblemError
from shoal_service.control.code_archive import CodeArchiveError, check
from shoal_service.control.planning import PlanAnswer, PlanRequest
from shoal_service.control.submission import check_spec
from shoal_service.core.access import Permission
from shoal_service.store import archives
from shoal_service.telemetry.tallies import Limit
from shoal_workers.contract.checks.spec_errors import SpecError, job_spec_schema

_ZIP_TYPES = ("application/zip", "application/octet-stream")
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ZIP_BODY = {"requestBody": {"required": True, "content": dict.fromkeys(_ZIP_TYPES, _BINARY)}}
Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="Hexadecimal SHA-256 of the body.")]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["specs"])

    @router.put(
        "/code/{sha256}",
        dependencies=[needs(Permission.JOBS_SUBMIT)],
        status_code=201,
        response_model=CodeStored,
        summary="Upload a code archive",
        openapi_extra=_ZIP_BODY,
    )
    async def put_code(request: Request, sha256: Sha256) -> Response:
        """Stores a zip of the user's modules under its SHA-256; a spec names it as `code.archive`. Idempotent."""
        require_media_type(request, _ZIP_TYPES)
        with request.scope[LIMITER].upload(request):
            data = await read_body(request, Limit.ARCHIVE_BYTES)
            try:
                await run_in_threadpool(check, sha256, data)
            except CodeArchiveError as error:
                raise ProblemError(Kind.CODE_MISMATCH, str(error)) from None
            archive = await run_in_threadpool(archives.checked, sha256, data)
            await run_in_threadpool(context.store.writing(archives.put), archive, now=context.clock())
        stored = CodeStored(sha256=sha256, bytes=len(data))
        return Response(stored.model_dump_json(), status_code=201, media_type="application/json")

    @router.post(
        "/specs/validate",
        dependencies=[needs(Permission.SPECS_CHECK)],
        response_model=SpecCheck,
        summary="Check a job spec without submitting it",
        openapi_extra=body_of("JobSpec", (*JSON_TYPES, *YAML_TYPES[:1])),
    )
    async def validate_spec(request: Request) -> Response:
        """Lists every error of the spec. For an invalid spec the answer is 200 with `valid: false`."""
        try:
            spec = await read_spec(request)
            check_spec(spec, context.places, context.webhooks)
            found = SpecCheck(valid=True, spec=spec)
        except SpecError as error:
            found = SpecCheck(valid=False, errors=error.problems)
        return Response(found.model_dump_json(), media_type="application/json")

    @router.get(
        "/spec-schema",
        dependencies=[needs(Permission.SPECS_CHECK)],
        response_model=dict[str, Any],
        summary="JSON Schema of a job spec",
    )
    async def spec_schema() -> dict[str, Any]:
        """The schema is for editors and generators. It has the keys of `model` and `data` for each of the built-in
        tasks."""
        return job_spec_schema()

    @router.post(
        "/plans",
        dependencies=[needs(Permission.SPECS_CHECK)],
        response_model=PlanAnswer,
        summary="Predict the layouts of a job",
        openapi_extra=body_of("PlanRequest", JSON_TYPES),
    )
    async def make_plan(request: Request) -> Response:
        """Ranks legal layouts for a number of workers, or of GPUs of one kind, best first: memory and step time by
        part, with reasons. Nothing is submitted or run. A search that takes longer than 20 s is refused."""
        plan = await read_model(request, PlanRequest)
        found = await while_connected(request, context.planning.answer(plan))
        if found is None:
            return Response(status_code=CLIENT_GONE)
        return Response(found.model_dump_json(), media_type="application/json")

    return router
