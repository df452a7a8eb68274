"""Routes that submit, list, show and cancel sweeps."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import require_visible
from shoal_api.http.access.owned_spec import OwnedSpec, of_principal
from shoal_api.http.context import Context
from shoal_api.http.documents import body
from shoal_api.http.json_router import AppContext, Caller, JsonRouter, Reading, Writing, json_response
from shoal_api.http.parameters import PROJECT_NAME, Cursor, ProjectName
from shoal_api.http.problems import InvalidRequest, InvalidSpec
from shoal_service.control.submission import CodeUnknown
from shoal_service.control.sweeps import specs_of, submit_sweep, with_name
from shoal_service.core.access import Permission, Principal
from shoal_service.core.sweeps import InvalidGrid
from shoal_service.fleet_views import SweepCurves, SweepSummary, SweepView
from shoal_service.store import InvalidCursor, QueueFull, sweep_curves, sweep_jobs
from shoal_service.store.errors import SweepConflict, SweepNotFound
from shoal_service.views import Page, SweepRequest
from shoal_workers.contract.spec import SWEEP_NAME

SweepName = Annotated[str, Path(pattern=SWEEP_NAME, description="The name of the sweep, as its submission answered.")]
_EXAMPLE = {
    "name": "rates",
    "spec": {"name": "tiny", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}},
    "grid": {"optimizer.lr": ["1e-3", "4e-3", "1e-2"], "seed": [1, 2]},
    "limit": 4,
    "prune": "median",
    "warmup_steps": 40,
}

router = JsonRouter("/v1/sweeps", "sweeps")


@router.route(
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
    sweep = with_name(sweep)
    owned = await run_in_threadpool(_owned, sweep, caller)
    for job_id in sorted({job.spec.continue_from.job for job in owned if job.spec.continue_from is not None}):
        await require_visible(request, job_id)
    view, created = await run_in_threadpool(_submit, context, str(sweep.name), owned)
    return json_response(view, 201 if created else 200, {"Location": f"/v1/sweeps/{view.project}/{view.name}"})


@router.route("GET", Permission.JOBS_READ, "List sweeps", raises=[InvalidCursor])
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


@router.route("GET /{project}/{name}", Permission.JOBS_READ, "Show a sweep", raises=[SweepNotFound])
def show_sweep(tx: Reading, caller: Caller, project: ProjectName, name: SweepName) -> SweepView:
    """Returns its rules, and its jobs with their values as labels, the best first."""
    _require_visible(caller, project, name)
    return sweep_jobs.view(tx, project, name)


@router.route(
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
    return sweep_curves.read(tx, project, name, measure)


@router.route(
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
        specs = specs_of(sweep)
    except InvalidGrid as error:
        raise InvalidRequest(str(error)) from None
    return [of_principal(spec, caller) for spec in specs]


def _submit(context: Context, name: str, owned: list[OwnedSpec]) -> tuple[SweepView, bool]:
    jobs = [(job.spec, context.surroundings(job.note)) for job in owned]
    ids, created = submit_sweep(context.store, name, jobs, context.clock())
    return context.store.reading(sweep_jobs.view)(owned[0].spec.project, name, ids), created
