"""Routes that look into the workers of a running job."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import needs
from shoal_api.http.context import Context, JobId
from shoal_api.http.problem_types import Kind
from shoal_api.http.problems import ProblemError
from shoal_service.cluster.errors import SupervisorUnavailable
from shoal_service.core.access import Permission
from shoal_service.store.errors import RequestConflict
from shoal_workers.contract.messages import Stacks


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["inspection"])

    @router.get(
        "/stacks",
        dependencies=[needs(Permission.JOBS_INSPECT)],
        response_model=Stacks,
        summary="What all workers of a job do now",
    )
    async def stacks(
        job_id: JobId,
        rank: Annotated[int | None, Query(ge=0, le=10_000_000, description="Only this rank.")] = None,
        native: Annotated[bool, Query(description="Also frames of native code; each worker is paused for it.")] = False,
    ) -> Response:
        """The stacks of the training threads, clustered by equal ones, also of workers that hang or are stopped. Takes
        a second, and some seconds if a worker does not answer.
        """
        job = await run_in_threadpool(context.store.get_job, job_id)
        try:
            found = await context.cluster.stacks(job_id, rank=rank, native=native)
        except SupervisorUnavailable as error:
            raise ProblemError(Kind.NOT_READY, f"The supervisor of job {job_id} does not answer: {error}") from error
        if found is None:
            raise RequestConflict(job_id, job.status.state, "show stacks: this server drives no workers of it")
        return Response(found.model_dump_json(), media_type="application/json")

    return router
