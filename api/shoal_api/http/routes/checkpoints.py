"""Routes that pin, verify and delete a job's checkpoints. The control loop passes the pins to the supervisor; the other
two access the storage from this process.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Path, Query
from starlette.concurrency import run_in_threadpool

from shoal_api.http.json_router import AppContext, Job, JsonRouter, Writing
from shoal_api.http.parameters import JobId
from shoal_service.core.access import Permission
from shoal_service.store import Conflict, JobEnded, JobNotFound, checkpoint_rows
from shoal_service.store.database import Transaction
from shoal_service.store.errors import CheckpointConflict, CheckpointKept, CheckpointNotFound
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

router = JsonRouter("/v1/jobs/{job_id}/checkpoints/{name}", "histories", raises=[JobNotFound, CheckpointNotFound])


@router.route("PUT /pin", Permission.JOBS_CHANGE, "Pin a checkpoint", raises=[Conflict, CheckpointConflict])
def pin_checkpoint(tx: Writing, context: AppContext, job_id: JobId, name: Name) -> CheckpointView:
    """Retention does not delete it from now on; `checkpoint.keep` counts as before. A running attempt learns of it
    within a second, and may have deleted the checkpoint until then. Idempotent."""
    return checkpoint_rows.pin(tx, job_id, _parsed(job_id, name), is_pinned=True, now=context.clock())


@router.route(
    "DELETE /pin", Permission.JOBS_CHANGE, "Take the pin of a checkpoint away", raises=[Conflict, CheckpointConflict]
)
def unpin_checkpoint(tx: Writing, context: AppContext, job_id: JobId, name: Name) -> CheckpointView:
    """Retention deletes it after the next commit, if enough others are newer. Idempotent."""
    return checkpoint_rows.pin(tx, job_id, _parsed(job_id, name), is_pinned=False, now=context.clock())


@router.route(
    "POST /verify", Permission.JOBS_CHANGE, "Verify a checkpoint", raises=[JobEnded, Conflict, CheckpointConflict]
)
async def verify_checkpoint(
    context: AppContext,
    job: Job,
    job_id: JobId,
    name: Name,
    wait: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="Seconds to wait for the end.")] = 0,
) -> VerificationView:
    """Reads every byte of it once and compares lengths and checksums with its marker. Begins the verification, or
    joins the one that runs, and answers with how far it is after at most `wait` seconds; repeat the request while
    `state` is `running`. A checkpoint that is found damaged has this state from now on. Training is not touched.
    """
    store, parsed = context.store, _parsed(job_id, name)
    await run_in_threadpool(store.reading(_require_stored), job_id, parsed)
    view = await context.verifications.verify(job_id, context.storage.catalog(job), parsed, wait_s=wait)
    if view.state is VerificationState.DAMAGED:
        note = partial(store.writing(checkpoint_rows.note_damage), message=view.message, now=context.clock())
        await run_in_threadpool(note, job_id, parsed)
    return view


@router.route(
    "DELETE",
    Permission.JOBS_CHANGE,
    "Delete a checkpoint",
    raises=[CheckpointConflict, CheckpointKept, JobEnded, Conflict],
)
async def delete_checkpoint(context: AppContext, job: Job, job_id: JobId, name: Name) -> CheckpointView:
    """The checkpoint is deleted from the storage at once; this cannot be undone. The request is refused for a
    pinned one, and for the newest good one of a job that has not ended. The list keeps its row, with state
    `deleted`."""
    store, parsed = context.store, _parsed(job_id, name)
    await run_in_threadpool(store.reading(checkpoint_rows.check_deletion), job_id, parsed)
    await context.storage.run(partial(context.storage.catalog(job).delete, parsed), within_s=DELETE_S)
    note = store.writing(checkpoint_rows.note_deletion)
    return await run_in_threadpool(note, job_id, parsed, now=context.clock())


def _parsed(job_id: str, name: str) -> CheckpointName:
    parsed = CheckpointName.parse(name)
    if parsed is None:  # a number with a leading zero too many
        raise CheckpointNotFound(job_id, name)
    return parsed


def _require_stored(tx: Transaction, job_id: str, name: CheckpointName) -> None:
    """Raises CheckpointNotFound, CheckpointConflict."""
    states = {row.name: row.state for row in checkpoint_rows.read_checkpoints(tx, job_id)}
    state = states.get(str(name))
    if state is None:
        raise CheckpointNotFound(job_id, str(name))
    if state not in (CheckpointState.COMMITTED, CheckpointState.DAMAGED):
        rule = "only one that is in the storage can be verified"
        raise CheckpointConflict(job_id, str(name), state, rule)
