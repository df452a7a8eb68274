"""Submission: checks that a valid spec's model fits into some layout, stores its code, and creates the job.

Called by the HTTP edge. The default of `checkpoint.url` is not filled in here, because it contains the job's id, which
does not exist yet.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from shoal_service.control.code_archive import CodeArchiveError, pack
from shoal_service.control.deadline import check_deadline
from shoal_service.control.webhooks.check import check_webhooks
from shoal_service.core.nodes import Node
from shoal_service.planner import HardwareProfile, refusal
from shoal_service.store import Store
from shoal_service.views import JobView
from shoal_workers.contract.checks.checkpoint_url import check_checkpoint_url
from shoal_workers.contract.checks.places import EVERYWHERE, AllowedPlaces, check_places
from shoal_workers.contract.checks.remarks import capacity_remark, remarks
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem
from shoal_workers.contract.spec import JobSpec


class CodeUnknown(ValueError):
    """The spec names a code archive that was not uploaded."""

    code = "code_unknown"

    def __init__(self, sha256: str) -> None:
        super().__init__(sha256)
        self.sha256 = sha256

    def __str__(self) -> str:
        return f"code.archive {self.sha256} is not stored here; PUT /v1/code/{self.sha256} first."


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known at submit about where the job will run."""

    profiles: tuple[HardwareProfile, ...] = ()
    """Of which a measured one predicts whether the job can make `finish_by`."""
    nodes: tuple[Node, ...] = ()
    note: str = ""
    """Begins the note of the job's status."""
    places: AllowedPlaces = EVERYWHERE


NOTHING_KNOWN = Surroundings()


def check_spec(spec: JobSpec, places: AllowedPlaces) -> None:
    """What can be checked without the store and the planner. Raises SpecError."""
    check_checkpoint_url(spec)
    check_places(spec, places, os.path.realpath)
    check_webhooks(spec)


def submit(
    store: Store,
    spec: JobSpec,
    idempotency_key: str | None,
    now: float,
    surroundings: Surroundings = NOTHING_KNOWN,
) -> tuple[JobView, bool]:
    """Create a job, or find the one that was created with this key; the second value is False then.

    A `code.working_dir` without an archive is a directory of this machine; it is packed and stored now.

    The note of the job's status says what is probably not meant: a deadline that will be missed, more workers than the
    cluster has room for, and the remarks on the spec.

    Raises:
        SpecError: checkpoint.url is relative, a path or URL is not allowed on this server, a webhook names unknown
            events, the directory cannot be packed, the model fits into no layout, or finish_by has passed.
        CodeUnknown, IdempotencyConflict, QueueFull
    """
    check_spec(spec, surroundings.places)
    too_large = refusal(spec)
    if too_large:
        raise SpecError((SpecProblem(path="model", message=too_large),))
    deadline = check_deadline(spec, surroundings.profiles, now)
    room = [(node.cpus, node.gpus) for node in surroundings.nodes if node.alive]
    notes = (surroundings.note, deadline, capacity_remark(spec, room) if room else "", *remarks(spec))
    note = " ".join(filter(None, notes))
    code = spec.code
    if code.archive is not None:
        if not store.has_code(code.archive):
            raise CodeUnknown(code.archive)
    elif code.working_dir is not None:
        try:
            archive = pack(code.working_dir)
        except CodeArchiveError as error:
            raise SpecError((SpecProblem(path="code.working_dir", message=str(error)),)) from error
        store.put_code(archive.sha256, archive.data, now)
        spec = spec.model_copy(update={"code": code.model_copy(update={"archive": archive.sha256})})
    return store.create_job(spec, idempotency_key=idempotency_key, now=now, note=note)
