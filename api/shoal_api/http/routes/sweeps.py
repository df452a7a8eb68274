"""Routes that submit, list, show and cancel sweeps."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import needs, require_visible, visible_projects
from shoal_api.http.access.owned_spec import OwnedSpec, of_principal
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.openapi import body_of
from shoal_api.http.problems import Kind, ProblemError
from shoal_api.http.routes.quotas import PROJECT_NAME, ProjectName
from shoal_service.control.sweeps import specs_of, submit_sweep, with_name
from shoal_service.core.access import Permission
from shoal_service.core.sweeps import InvalidGrid
from shoal_service.fleet_views import SweepCurves, SweepSummary, SweepView
from shoal_service.store import sweep_curves, sweep_jobs
from shoal_service.store.errors import SweepNotFound
from shoal_service.views import Page, SweepRequest
from shoal_workers.contract.spec import SWEEP_NAME, JobSpec

SweepName = Annotated[str, Path(pattern=SWEEP_NAME, description="The name of the sweep, as its submission answered.")]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/sweeps", tags=["sweeps"])
    store = context.store

    @router.post(
        "",
        dependencies=[needs(Permission.JOBS_SUBMIT)],
        status_code=201,
        response_model=SweepView,
        summary="Submit a sweep",
        openapi_extra=body_of("SweepRequest", JSON_TYPES),
        responses={200: {"model": SweepView, "description": "An earlier request has submitted all of its jobs."}},
    )
    async def create_sweep(request: Request) -> Response:
        """Submits a job for each combination of the grid, or for each of `samples` draws, all or none, in one
        transaction. The answer has the jobs in the order of the grid or the draws, and its address is in `Location`.
        The server keeps to the limit and prunes."""
        wanted = with_name(await read_model(request, SweepRequest))
        owned = await run_in_threadpool(_owned, wanted, request)
        for job_id in sorted({one.spec.continue_from.job for one in owned if one.spec.continue_from is not None}):
            await require_visible(request, job_id)
        view, created = await run_in_threadpool(_submit, context, str(wanted.name), owned)
        headers = {"Location": f"/v1/sweeps/{view.project}/{view.name}"}
        return _answer(view, 201 if created else 200, headers)

    @router.get(
        "", dependencies=[needs(Permission.JOBS_READ)], response_model=Page[SweepSummary], summary="List sweeps"
    )
    async def list_sweeps(
        request: Request,
        project: Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only sweeps of this project.")] = None,
        name: Annotated[str | None, Query(pattern=SWEEP_NAME, description="Only sweeps with this name.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="Sweeps per page.")] = 100,
        cursor: Annotated[str | None, Query(max_length=512, description="`next_cursor` of the page before.")] = None,
    ) -> Response:
        """Lists sweeps, newest first, with the numbers of their jobs by state."""
        visible = visible_projects(request)
        read = partial(
            store.reading(sweep_jobs.page), project=project, name=name, visible=visible, limit=limit, cursor=cursor
        )
        page = await run_in_threadpool(read)
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/{project}/{name}",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=SweepView,
        summary="Show a sweep",
    )
    async def show_sweep(request: Request, project: ProjectName, name: SweepName) -> Response:
        """Returns its rules, and its jobs with their values as labels, the best first."""
        _require_visible(request, project, name)
        return _answer(await run_in_threadpool(store.reading(sweep_jobs.view), project, name))

    @router.get(
        "/{project}/{name}/curves",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=SweepCurves,
        summary="Show the curves of a sweep",
    )
    async def show_curves(
        request: Request,
        project: ProjectName,
        name: SweepName,
        measure: Annotated[Literal["loss", "val_loss"], Query(description="Which loss.")] = "loss",
    ) -> Response:
        """Returns the losses of all of its jobs with a bounded number of points, the best so far by time, and how much
        each label matters."""
        _require_visible(request, project, name)
        found = await run_in_threadpool(store.reading(sweep_curves.read), project, name, measure)
        return Response(found.model_dump_json(), media_type="application/json")

    @router.post(
        "/{project}/{name}/cancel",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        status_code=202,
        response_model=SweepView,
        summary="Cancel a sweep",
    )
    async def cancel_sweep(request: Request, project: ProjectName, name: SweepName) -> Response:
        """Cancels all of its jobs that have not ended. Their checkpoints are kept. The answer has the jobs that this
        request has cancelled."""
        _require_visible(request, project, name)
        cancelled = await run_in_threadpool(store.writing(sweep_jobs.cancel), project, name, now=context.clock())
        view = await run_in_threadpool(store.reading(sweep_jobs.view), project, name, cancelled)
        return _answer(view if cancelled else view.model_copy(update={"jobs": ()}), 202)

    return router


def _answer(view: SweepView, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(view.model_dump_json(), status, headers, media_type="application/json")


def _require_visible(request: Request, project: str, name: str) -> None:
    """Raises SweepNotFound if there is no such sweep, or if the principal does not see its project."""
    if not principal_of(request).sees(project):
        raise SweepNotFound(project, name)


def _owned(wanted: SweepRequest, request: Request) -> list[OwnedSpec]:
    """Return the specs of the jobs, as the principal may submit them. Raises SpecError, ProblemError."""
    try:
        specs: list[JobSpec] = specs_of(wanted)
    except InvalidGrid as error:
        raise ProblemError(Kind.INVALID_REQUEST, str(error)) from None
    return [of_principal(spec, principal_of(request)) for spec in specs]


def _submit(context: Context, name: str, owned: list[OwnedSpec]) -> tuple[SweepView, bool]:
    jobs = [(one.spec, context.surroundings(one.note)) for one in owned]
    ids, created = submit_sweep(context.store, name, jobs, context.clock())
    return context.store.reading(sweep_jobs.view)(owned[0].spec.project, name, ids), created
