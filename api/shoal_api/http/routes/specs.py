"""Routes about a spec that is not submitted yet: its code, a check, its JSON Schema, its predicted layouts; and about
sweeps, which submit a spec many times.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.answers import CodeStored, SpecCheck
from shoal_api.http.access.authentication import require_visible
from shoal_api.http.access.limits import LIMITER
from shoal_api.http.access.owned_spec import OwnedSpec, of_principal
from shoal_api.http.context import Context
from shoal_api.http.edge import CLIENT_GONE
from shoal_api.http.json_router import (
    PROJECT_NAME,
    SPEC,
    AppContext,
    Caller,
    Cursor,
    JsonRouter,
    ProjectName,
    Reading,
    Writing,
    body,
    json_response,
    read_body,
    read_spec,
    require_media_type,
)
from shoal_api.http.problems import BodyTooLarge, InvalidRequest, InvalidSpec, UnsupportedMediaType
from shoal_api.http.streams import while_connected
from shoal_service.control.code_archive import CodeArchiveError, check
from shoal_service.control.planning import MeasuredSteps, PlanAnswer, PlanRequest
from shoal_service.control.submission import CodeUnknown, check_spec, expand_specs, fill_name, submit_sweep
from shoal_service.core.access import Permission, Principal
from shoal_service.core.sweeps import InvalidGrid
from shoal_service.fleet_views import SweepCurves, SweepSummary, SweepView
from shoal_service.store import (
    InvalidArchive,
    InvalidCursor,
    QueueFull,
    SweepConflict,
    SweepNotFound,
    archives,
    sweep_jobs,
)
from shoal_service.store.measured_steps import newest_steps
from shoal_service.telemetry.tallies import Limit
from shoal_service.views import Page, SweepRequest
from shoal_workers.contract import SWEEP_NAME
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


SweepName = Annotated[str, Path(pattern=SWEEP_NAME, description="The name of the sweep, as its submission answered.")]
_EXAMPLE = {
    "name": "rates",
    "spec": {"name": "tiny", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}},
    "grid": {"optimizer.lr": ["1e-3", "4e-3", "1e-2"], "seed": [1, 2]},
    "limit": 4,
    "prune": "median",
    "warmup_steps": 40,
}

sweep_router = JsonRouter("/v1/sweeps", "sweeps")


@sweep_router.route(
    "POST",
    Permission.JOBS_SUBMIT,
    "Submit a sweep",
    answer=SweepView,
    status=201,
    responses={200: {"model": SweepView, "description": "An earlier request has submitted all of its jobs."}},
    raises=[InvalidSpec, CodeUnknown, SweepConflict, QueueFull],
)
async def create_sweep(
    request: Request,
    context: AppContext,
    caller: Caller,
    sweep: Annotated[SweepRequest, body(SweepRequest, _EXAMPLE)],
) -> Response:
    """Submits a job for each combination of the grid, or for each of `samples` draws, all or none, in one
    transaction. The answer has the jobs in the order of the grid or the draws, and its address is in `Location`.
    The server keeps to the limit and prunes."""
    sweep = fill_name(sweep)
    owned = await run_in_threadpool(_owned, sweep, caller)
    for job_id in sorted({job.spec.continue_from.job for job in owned if job.spec.continue_from is not None}):
        await require_visible(request, job_id)
    view, created = await run_in_threadpool(_submit, context, str(sweep.name), owned)
    return json_response(view, 201 if created else 200, {"Location": f"/v1/sweeps/{view.project}/{view.name}"})


@sweep_router.route("GET", Permission.JOBS_READ, "List sweeps", raises=[InvalidCursor])
def list_sweeps(
    tx: Reading,
    caller: Caller,
    project: Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only sweeps of this project.")] = None,
    name: Annotated[str | None, Query(pattern=SWEEP_NAME, description="Only sweeps with this name.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Sweeps per page.")] = 100,
    cursor: Cursor = None,
) -> Page[SweepSummary]:
    """Lists sweeps, newest first, with the numbers of their jobs by state."""
    return sweep_jobs.page(tx, project=project, name=name, visible=caller.projects, limit=limit, cursor=cursor)


@sweep_router.route("GET /{project}/{name}", Permission.JOBS_READ, "Show a sweep", raises=[SweepNotFound])
def show_sweep(tx: Reading, caller: Caller, project: ProjectName, name: SweepName) -> SweepView:
    """Returns its rules, and its jobs with their values as labels, the best first."""
    _require_visible(caller, project, name)
    return sweep_jobs.view(tx, project, name)


@sweep_router.route(
    "GET /{project}/{name}/curves", Permission.JOBS_READ, "Show the curves of a sweep", raises=[SweepNotFound]
)
def show_curves(
    tx: Reading,
    caller: Caller,
    project: ProjectName,
    name: SweepName,
    measure: Annotated[Literal["loss", "val_loss"], Query(description="Which loss.")] = "loss",
) -> SweepCurves:
    """Returns the losses of all of its jobs with a bounded number of points, the best so far by time, and how much
    each label matters."""
    _require_visible(caller, project, name)
    return sweep_jobs.read(tx, project, name, measure)


@sweep_router.route(
    "POST /{project}/{name}/cancel", Permission.JOBS_CHANGE, "Cancel a sweep", status=202, raises=[SweepNotFound]
)
def cancel_sweep(tx: Writing, context: AppContext, caller: Caller, project: ProjectName, name: SweepName) -> SweepView:
    """Cancels all of its jobs that have not ended. Their checkpoints are kept. The answer has the jobs that this
    request has cancelled."""
    _require_visible(caller, project, name)
    cancelled = sweep_jobs.cancel(tx, project, name, now=context.clock())
    view = sweep_jobs.view(tx, project, name, cancelled)
    return view if cancelled else view.model_copy(update={"jobs": ()})


def _require_visible(caller: Principal, project: str, name: str) -> None:
    """Raises SweepNotFound if the principal does not see the project of the sweep."""
    if not caller.sees(project):
        raise SweepNotFound(project, name)


def _owned(sweep: SweepRequest, caller: Principal) -> list[OwnedSpec]:
    """Return the specs of the jobs, as the principal may submit them. Raises SpecError, InvalidRequest, Forbidden."""
    try:
        specs = expand_specs(sweep)
    except InvalidGrid as error:
        raise InvalidRequest(str(error)) from None
    return [of_principal(spec, caller) for spec in specs]


def _submit(context: Context, name: str, owned: list[OwnedSpec]) -> tuple[SweepView, bool]:
    jobs = [(job.spec, context.submit_context(job.note)) for job in owned]
    ids, created = submit_sweep(context.store, name, jobs, context.clock())
    return context.store.reading(sweep_jobs.view)(owned[0].spec.project, name, ids), created
