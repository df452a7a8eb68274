"""The registry of models, and the lineage of checkpoints.

A version of a model is a committed checkpoint of a job, with a number that is never given again. While it is registered
nothing deletes the checkpoint (`checkpoint_rows.held` counts it), and if its job is deleted the files stay. An alias
names one version; serving reads `speech@prod`. The lineage of a version is copied at its registration, so it outlives
the jobs. A lineage follows `continue_from` from job to job. Called by the HTTP edge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection

from sqlalchemy import delete, func, select, update

from shoal_service.artifact_views import LineageJob, LineageParent, LineageView, ModelRequest, ModelVersion
from shoal_service.core.events.training import GenerationData
from shoal_service.store.checkpoint_rows import read_checkpoints
from shoal_service.store.database import Transaction, upsert
from shoal_service.store.errors import CheckpointConflict, CheckpointNotFound, JobNotFound, ModelNotFound
from shoal_service.store.records import load, load_spec
from shoal_service.store.tables import events, jobs, model_aliases, model_versions
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract.spec import JobSpec

MAX_LINEAGE = 50
"""Jobs of a chain that are shown."""


def lineage(tx: Transaction, job_id: str, visible: Collection[str] | None = None) -> LineageView:
    """`visible`: projects of the principal; None: all. Raises JobNotFound."""
    found, seen = [_lineage_job(tx, job_id)], {job_id}
    while (parent := found[-1].parent) is not None and parent.job_id and len(found) < MAX_LINEAGE:
        if parent.job_id in seen:
            break
        seen.add(parent.job_id)
        try:
            one = _lineage_job(tx, parent.job_id)
        except JobNotFound:
            one = LineageJob(job_id=parent.job_id, is_known=False)
        if visible is not None and one.is_known and one.project not in visible:
            one = LineageJob(job_id=parent.job_id, is_known=False)
        found.append(one)
    last = found[-1].parent
    is_whole = last is None or not last.job_id or last.job_id in seen
    own = select(model_versions).where(model_versions.c.job_id == job_id, ~model_versions.c.removed)
    if visible is not None:
        own = own.where(model_versions.c.project.in_(sorted(visible)))
    rows = tx.execute(own.order_by(model_versions.c.name, model_versions.c.version))
    return LineageView(jobs=tuple(found), is_whole=is_whole, registered=tuple(_read(tx, row) for row in rows))


def chosen(tx: Transaction, request: ModelRequest) -> CheckpointView:
    """The checkpoint that would be registered: the newest committed one, or that of the step. Raises JobNotFound,
    CheckpointNotFound, CheckpointConflict."""
    there = [one for one in read_checkpoints(tx, request.job) if request.step in (None, one.step)]
    committed = [one for one in there if one.state is CheckpointState.COMMITTED]
    if committed:
        return max(committed, key=lambda one: (one.step, one.attempt, one.generation))
    if there:
        rule = "only a committed one can be registered"
        raise CheckpointConflict(request.job, there[-1].name, there[-1].state, rule)
    raise CheckpointNotFound(request.job, "of any step" if request.step is None else f"of step {request.step}")


def register(tx: Transaction, name: str, request: ModelRequest, *, data: str = "", by: str, now: float) -> ModelVersion:
    """Registers a checkpoint as the next version of the model of this name in the project of its job. A checkpoint that
    is registered under the name already keeps its version. Raises JobNotFound, CheckpointNotFound,
    CheckpointConflict.

    Args:
        data: content hash of the data that the checkpoint was made with; empty: it is not known.
    """
    job = load(tx, request.job, lock=True)
    project = str(tx.execute(select(jobs.c.project).where(jobs.c.num == job.num)).scalar_one())
    checkpoint = chosen(tx, request)
    of_name = (model_versions.c.project == project, model_versions.c.name == name)
    known = select(model_versions).where(
        *of_name, model_versions.c.job_id == job.id, model_versions.c.checkpoint == checkpoint.name
    )
    if (row := tx.execute(known.where(~model_versions.c.removed)).first()) is not None:
        return _read(tx, row)
    newest = tx.execute(select(func.max(model_versions.c.version)).where(*of_name)).scalar_one()
    own, *origins = lineage(tx, job.id).jobs
    made = ModelVersion(
        project=project,
        name=name,
        version=(newest or 0) + 1,
        job_id=job.id,
        checkpoint=checkpoint.name,
        step=checkpoint.step,
        url=checkpoint.url,
        registered_at=now,
        registered_by=by[:200],
        description=request.description,
        lineage=(own.model_copy(update={"data": data or own.data}), *origins),
    )
    row_of = {
        "project": project,
        "name": name,
        "version": made.version,
        "job_id": job.id,
        "checkpoint": checkpoint.name,
    }
    # not an upsert: of two registrations at the same moment one fails, instead of taking the other's number
    tx.execute(model_versions.insert(), row_of | {"removed": False, "document": made.model_dump_json()})
    tx.publish(job.id)
    return made


def versions(
    tx: Transaction, *, project: str | None = None, name: str | None = None, visible: Collection[str] | None = None
) -> list[ModelVersion]:
    """By project and name, the newest version first."""
    key = (model_versions.c.project, model_versions.c.name, model_versions.c.version.desc())
    query = select(model_versions).where(~model_versions.c.removed).order_by(*key)
    if project is not None:
        query = query.where(model_versions.c.project == project)
    if name is not None:
        query = query.where(model_versions.c.name == name)
    if visible is not None:
        query = query.where(model_versions.c.project.in_(sorted(visible)))
    aliases: dict[tuple[str, str, int], list[str]] = {}
    for row in tx.execute(select(model_aliases).order_by(model_aliases.c.alias)):
        aliases.setdefault((row.project, row.name, row.version), []).append(row.alias)
    found = [ModelVersion.model_validate_json(row.document) for row in tx.execute(query)]
    return [
        one.model_copy(update={"aliases": tuple(aliases.get((one.project, one.name, one.version), ()))})
        for one in found
    ]


def find(tx: Transaction, project: str, name: str, which: str) -> ModelVersion:
    """`which`: a version, an alias, or `latest`. Raises ModelNotFound."""
    there = versions(tx, project=project, name=name)
    for one in there:
        if which in (str(one.version), *one.aliases) or which == "latest":
            return one
    raise ModelNotFound(project, name, which)


def set_alias(tx: Transaction, project: str, name: str, alias: str, version: int) -> ModelVersion:
    """Lets the alias name this version, instead of the one that it has named. Raises ModelNotFound."""
    find(tx, project, name, str(version))
    upsert(tx, model_aliases, [{"project": project, "name": name, "alias": alias, "version": version}])
    return find(tx, project, name, str(version))


def remove_alias(tx: Transaction, project: str, name: str, alias: str) -> None:
    """Raises ModelNotFound."""
    key = (model_aliases.c.project == project, model_aliases.c.name == name, model_aliases.c.alias == alias)
    if not tx.execute(delete(model_aliases).where(*key)).rowcount:
        raise ModelNotFound(project, name, alias)


def remove(tx: Transaction, project: str, name: str, version: int) -> None:
    """The version is not registered any more, and its aliases are gone; the checkpoint stays until retention deletes
    it. Raises ModelNotFound."""
    find(tx, project, name, str(version))
    of_name = (model_versions.c.project == project, model_versions.c.name == name)
    tx.execute(update(model_versions).where(*of_name, model_versions.c.version == version).values(removed=True))
    key = (model_aliases.c.project == project, model_aliases.c.name == name, model_aliases.c.version == version)
    tx.execute(delete(model_aliases).where(*key))


def _read(tx: Transaction, row: object) -> ModelVersion:
    one = ModelVersion.model_validate_json(row.document)  # type: ignore[attr-defined]
    key = (
        model_aliases.c.project == one.project,
        model_aliases.c.name == one.name,
        model_aliases.c.version == one.version,
    )
    query = select(model_aliases.c.alias).where(*key).order_by(model_aliases.c.alias)
    return one.model_copy(update={"aliases": tuple(tx.execute(query).scalars())})


def _lineage_job(tx: Transaction, job_id: str) -> LineageJob:
    job = load(tx, job_id)
    spec = load_spec(tx, job.num, job.spec_version)
    document = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return LineageJob(
        job_id=job_id,
        name=job.name,
        project=str(tx.execute(select(jobs.c.project).where(jobs.c.num == job.num)).scalar_one()),
        spec_version=job.spec_version,
        spec_sha256=hashlib.sha256(document.encode()).hexdigest(),
        code_sha256=spec.code.archive or "",
        data=_data_of(tx, job.num),
        parent=_parent_of(spec),
    )


def _parent_of(spec: JobSpec) -> LineageParent | None:
    origin = spec.continue_from
    if origin is not None:
        return LineageParent(
            job_id=origin.job, checkpoint=origin.checkpoint or "", step=origin.step, url=origin.url or ""
        )
    return LineageParent(url=spec.init_from) if spec.init_from is not None else None


def _data_of(tx: Transaction, job_num: int) -> str:
    """The content hash that the newest change of the data has reported; empty if the data has never changed."""
    changed = select(events.c.data).where(events.c.job_num == job_num, events.c.type == GenerationData.type)
    document = tx.execute(changed.order_by(events.c.seq.desc()).limit(1)).scalar_one_or_none()
    found = json.loads(document).get("now") if document else None
    return found if isinstance(found, str) else ""
