"""Routes that pin a job's checkpoints, and take the pins away. The control loop passes the pins to the supervisor."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.context import Context, JobId
from shoal_service.store.errors import CheckpointNotFound
from shoal_service.views import CheckpointView
from shoal_workers.contract.marker import CheckpointName

Name = Annotated[
    str,
    Path(
        pattern=r"^step-[0-9]{12,19}-a[0-9]{1,9}-g[0-9]{1,18}$",
        description="Name of the checkpoint's directory: step-000000000120-a1-g3.",
    ),
]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}/checkpoints/{name}", tags=["histories"])

    async def change(job_id: str, name: str, is_pinned: bool) -> Response:
        parsed = CheckpointName.parse(name)
        if parsed is None:  # a number with a leading zero too many
            raise CheckpointNotFound(job_id, name)
        view = await run_in_threadpool(
            context.store.pin_checkpoint, job_id, parsed, is_pinned=is_pinned, now=context.clock()
        )
        return Response(view.model_dump_json(), media_type="application/json")

    @router.put("/pin", response_model=CheckpointView, summary="Pin a checkpoint")
    async def pin_checkpoint(job_id: JobId, name: Name) -> Response:
        """Retention does not delete it from now on; `checkpoint.keep` counts as before. A running attempt learns of it
        within a second, and may have deleted the checkpoint until then. Idempotent."""
        return await change(job_id, name, True)

    @router.delete("/pin", response_model=CheckpointView, summary="Take the pin of a checkpoint away")
    async def unpin_checkpoint(job_id: JobId, name: Name) -> Response:
        """Retention deletes it after the next commit, if enough others are newer. Idempotent."""
        return await change(job_id, name, False)

    return router
