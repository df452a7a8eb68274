"""Routes that pin, verify and delete a job's checkpoints. The control loop passes the pins to the supervisor; the other
two access the storage from this process.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import needs
from shoal_api.http.context import Context, JobId
from shoal_service.core.access import Permission
from shoal_service.store import checkpoint_rows
from shoal_service.store.errors import CheckpointConflict, CheckpointNotFound
from shoal_service.views import CheckpointState, CheckpointView, VerificationState, VerificationView
from shoal_workers.contract.marker import CheckpointName

DELETE_S = 120.0
Name = Annotated[
    str,
    Path(
        pattern=r"^step-[0-9]{12,19}-a[0-9]{1,9}-g[0-9]{1,18}$",
        description="Name of the checkpoint's directory: step-000000000120-a1-g3.",
    ),
]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}/checkpoints/{name}", tags=["histories"])
    store = context.store

    async def change(job_id: str, name: str, is_pinned: bool) -> Response:
        view = await run_in_threadpool(
            store.writing(checkpoint_rows.pin), job_id, _parsed(job_id, name), is_pinned=is_pinned, now=context.clock()
        )
        return Response(view.model_dump_json(), media_type="application/json")

    @router.put(
        "/pin", dependencies=[needs(Permission.JOBS_CHANGE)], response_model=CheckpointView, summary="Pin a checkpoint"
    )
    async def pin_checkpoint(job_id: JobId, name: Name) -> Response:
        """Retention does not delete it from now on; `checkpoint.keep` counts as before. A running attempt learns of it
        within a second, and may have deleted the checkpoint until then. Idempotent."""
        return await change(job_id, name, True)

    @router.delete(
        "/pin",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=CheckpointView,
        summary="Take the pin of a checkpoint away",
    )
    async def unpin_checkpoint(job_id: JobId, name: Name) -> Response:
        """Retention deletes it after the next commit, if enough others are newer. Idempotent."""
        return await change(job_id, name, False)

    @router.post(
        "/verify",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=VerificationView,
        summary="Verify a checkpoint",
    )
    async def verify_checkpoint(
        job_id: JobId,
        name: Name,
        wait: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="Seconds to wait for the end.")] = 0,
    ) -> Response:
        """Reads every byte of it once and compares lengths and checksums with its marker. Begins the verification, or
        joins the one that runs, and answers with how far it is after at most `wait` seconds; repeat the request while
        `state` is `running`. A checkpoint that is found damaged has this state from now on. Training is not touched.
        """
        parsed = _parsed(job_id, name)
        job = await run_in_threadpool(store.get_job, job_id)
        await run_in_threadpool(_require_stored, context, job_id, parsed)
        found = await context.verifications.verify(job_id, context.storage.catalog(job), parsed, wait_s=wait)
        if found.state is VerificationState.DAMAGED:
            await run_in_threadpool(
                store.writing(checkpoint_rows.note_damage), job_id, parsed, message=found.message, now=context.clock()
            )
        return Response(found.model_dump_json(), media_type="application/json")

    @router.delete(
        "", dependencies=[needs(Permission.JOBS_CHANGE)], response_model=CheckpointView, summary="Delete a checkpoint"
    )
    async def delete_checkpoint(job_id: JobId, name: Name) -> Response:
        """The checkpoint is deleted from the storage at once; this cannot be undone. The request is refused for a
        pinned one, and for the newest good one of a job that has not ended. The list keeps its row, with state
        `deleted`."""
        parsed = _parsed(job_id, name)
        job = await run_in_threadpool(store.get_job, job_id)
        await run_in_threadpool(store.reading(checkpoint_rows.check_deletion), job_id, parsed)
        catalog = context.storage.catalog(job)
        await context.storage.run(partial(catalog.delete, parsed), within_s=DELETE_S)
        view = await run_in_threadpool(
            store.writing(checkpoint_rows.note_deletion), job_id, parsed, now=context.clock()
        )
        return Response(view.model_dump_json(), media_type="application/json")

    return router


def _parsed(job_id: str, name: str) -> CheckpointName:
    parsed = CheckpointName.parse(name)
    if parsed is None:  # a number with a leading zero too many
        raise CheckpointNotFound(job_id, name)
    return parsed


def _require_stored(context: Context, job_id: str, name: CheckpointName) -> None:
    for one in context.store.reading(checkpoint_rows.read_checkpoints)(job_id):
        if one.name == str(name):
            if one.state not in (CheckpointState.COMMITTED, CheckpointState.DAMAGED):
                rule = "only one that is in the storage can be verified"
                raise CheckpointConflict(job_id, str(name), one.state, rule)
            return
    raise CheckpointNotFound(job_id, str(name))
