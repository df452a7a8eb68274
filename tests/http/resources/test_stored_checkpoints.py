"""Checkpoints are verified, deleted and pinned in a real storage, over REST and with the client."""

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_api.client.errors import ApiError
from shoal_service.core.endings import AttemptEnd
from shoal_service.store import checkpoint_rows
from shoal_service.supervisor.checkpoints import CheckpointCatalog
from shoal_service.views import CheckpointState, CheckpointView, VerificationState
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName
from shoal_workers.contract.worker_reports import SavedFile, SavedPart

CONTENT = bytes(range(256)) * 40_000
FILE = "shard-00000.bin"


def _store(service: Any, job_id: str, *steps: int) -> Path:
    """Committed checkpoints, one file each; the job's directory."""
    root = Path(service.checkpoint_url) / job_id
    for step in steps:
        directory = root / str(CheckpointName(step, 1, 1))
        directory.mkdir(parents=True)
        (directory / FILE).write_bytes(CONTENT)
        saved = SavedFile(name=FILE, bytes=len(CONTENT), crc32=zlib.crc32(CONTENT))
        part = SavedPart(
            generation=1,
            step=step,
            rank=0,
            world_size=1,
            directory=str(directory),
            files=(saved,),
            stall_s=0.0,
            write_s=0.0,
        )
        CheckpointCatalog(str(root)).commit([part], job_id=job_id, attempt=1, now=time.time())
    return root


def _views(*steps: int) -> tuple[CheckpointView, ...]:
    names = {step: CheckpointName(step, 1, 1) for step in steps}
    return tuple(
        CheckpointView(step=step, url=f"/elsewhere/{name}", state="committed", attempt=1, generation=1)
        for step, name in names.items()
    )


def _verified(service: Any, job_id: str, name: str) -> Any:
    found = service.client.verify_checkpoint(job_id, name)
    while found.state is VerificationState.RUNNING:
        found = service.client.verify_checkpoint(job_id, name)
    return found


def test_a_verification_reads_every_byte_and_finds_a_flipped_bit(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise(checkpoints=_views(10, 20))
    root = _store(service, job_id, 10, 20)
    name = str(CheckpointName(10, 1, 1))
    found = _verified(service, job_id, name)
    assert (found.state, found.bytes_read, found.bytes) == (VerificationState.WHOLE, len(CONTENT), len(CONTENT))
    damaged = bytearray(CONTENT)
    damaged[-1] ^= 1
    (root / name / FILE).write_bytes(damaged)
    found = _verified(service, job_id, name)
    assert found.state is VerificationState.DAMAGED and f"{FILE} has crc32" in found.message
    [first, second] = service.client.checkpoints(job_id)
    assert (first.state, second.state) == (CheckpointState.DAMAGED, CheckpointState.COMMITTED)
    assert FILE in first.message


def test_a_checkpoint_that_is_not_in_the_storage_is_missing_and_not_damaged(
    service: Any, supervise: Callable[..., str]
) -> None:
    job_id = supervise(checkpoints=_views(10, 20))
    root = _store(service, job_id, 10)
    name = str(CheckpointName(10, 1, 1))
    (root / name / MARKER_NAME).unlink()
    for missing in (name, str(CheckpointName(20, 1, 1))):
        assert _verified(service, job_id, missing).state is VerificationState.MISSING
    assert {one.state for one in service.client.checkpoints(job_id)} == {CheckpointState.COMMITTED}


def test_a_request_answers_at_once_and_joins_the_verification_that_runs(
    service: Any, supervise: Callable[..., str]
) -> None:
    job_id = supervise(checkpoints=_views(10))
    _store(service, job_id, 10)
    name = str(CheckpointName(10, 1, 1))
    first = service.client.verify_checkpoint(job_id, name, wait_s=0.0)
    assert first.state in (VerificationState.RUNNING, VerificationState.WHOLE)
    assert _verified(service, job_id, name).state is VerificationState.WHOLE


def test_a_checkpoint_is_deleted_and_what_is_needed_is_not(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise(checkpoints=_views(10, 20))
    root = _store(service, job_id, 10, 20)
    first, second = (str(CheckpointName(step, 1, 1)) for step in (10, 20))
    with pytest.raises(ApiError) as error:
        service.client.delete_checkpoint(job_id, second)
    assert error.value.code == "checkpoint-kept" and "Wait for the next one, or cancel the job" in str(error.value)
    service.client.pin_checkpoint(job_id, first)
    with pytest.raises(ApiError, match="--undo") as error:
        service.client.delete_checkpoint(job_id, first)
    assert error.value.code == "checkpoint-kept"
    service.client.unpin_checkpoint(job_id, first)
    assert service.client.delete_checkpoint(job_id, first).state is CheckpointState.DELETED
    assert [path.name for path in root.iterdir()] == [second]
    for call in (service.client.delete_checkpoint, service.client.verify_checkpoint):
        with pytest.raises(ApiError) as error:
            call(job_id, first)
        assert error.value.code == "checkpoint-conflict"
        with pytest.raises(ApiError) as error:
            call(job_id, first.replace("g1", "g7"))
        assert error.value.code == "checkpoint-not-found"


def test_a_job_goes_on_from_an_older_checkpoint_once_the_later_ones_are_given_up(
    service: Any, supervise: Callable[..., str]
) -> None:
    job_id = supervise(checkpoints=_views(10, 20, 30))
    root = _store(service, job_id, 10, 20)  # the directory of step 30 is lost
    with pytest.raises(ApiError, match="pause it first") as error:
        service.client.take(job_id, 10)
    assert error.value.code == "request-conflict"
    supervise(job_id, end=AttemptEnd(reason=EndReason.CHECKPOINTS_MISSING, message="no mount", step=30))
    with pytest.raises(ApiError, match="of step 15"):
        service.client.take(job_id, 15)
    service.client.pin_checkpoint(job_id, str(CheckpointName(30, 1, 1)))
    with pytest.raises(ApiError, match="--undo"):
        service.client.take(job_id, 10)
    service.client.unpin_checkpoint(job_id, str(CheckpointName(30, 1, 1)))
    service.client.take(job_id, 10)
    assert [path.name for path in root.iterdir()] == [str(CheckpointName(10, 1, 1))]
    assert service.store.reading(checkpoint_rows.newest)(job_id) == CheckpointName(10, 1, 1)
    service.client.take(job_id, 0)
    assert service.store.reading(checkpoint_rows.newest)(job_id) is None


NAME = "step-000000000010-a1-g1"
CHECKPOINT = CheckpointView(step=10, url=f"/c/{NAME}", state="committed", attempt=1, generation=1)


def test_what_cannot_be_pinned_is_named(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise(checkpoints=(CHECKPOINT.model_copy(update={"state": CheckpointState.DELETED}),))
    for name, code in ((NAME, "checkpoint-conflict"), (NAME.replace("g1", "g2"), "checkpoint-not-found")):
        with pytest.raises(ApiError) as error:
            service.client.pin_checkpoint(job_id, name)
        assert error.value.code == code
