"""The registry of models, and the lineage of checkpoints.

A version of a model is a committed checkpoint of a job, with a number that is never given again. While it is registered
nothing deletes the checkpoint (`checkpoint_rows.held` counts it), and if its job is deleted the files stay. An alias
names one version; serving reads `speech@prod`. The lineage of a version, and the metrics of its step, are copied at its
registration, so they outlive the jobs; the state of its checkpoint is looked up. A lineage follows `continue_from` from
job to job. A reader learns nothing about jobs of projects that the reader does not see. Called by the HTTP edge.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Column, Row, Select, delete, func, select, update

from shoal_service.artifact_views import LineageJob, LineageParent, LineageView, ModelRequest, ModelVersion
from shoal_service.core.events import GenerationData
from shoal_service.store.checkpoint_rows import read_checkpoints
from shoal_service.store.curves import make_point
from shoal_service.store.database import (
    Transaction,
    checkpoints,
    events,
    in_projects,
    jobs,
    model_aliases,
    model_versions,
    series,
    upsert,
)
from shoal_service.store.errors import CheckpointConflict, CheckpointNotFound, JobNotFound, ModelNotFound
from shoal_service.store.records import load, load_spec
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract import CheckpointName, JobSpec

MAX_LINEAGE = 50
"""Jobs of a chain that are shown."""
_MAX_NAMED = 500
_MAX_SOURCES = 3
"""Paths of data that a lineage names."""
Visible = Collection[str] | None
"""Projects of the principal; None means all."""


def lineage(tx: Transaction, job_id: str, visible: Visible = None) -> LineageView:
    """Raises JobNotFound."""
    jobs_in_chain, seen = [_read_lineage_job(tx, job_id)], {job_id}
    while (parent := jobs_in_chain[-1].parent) is not None and parent.job_id and len(jobs_in_chain) < MAX_LINEAGE:
        if parent.job_id in seen:
            break
        seen.add(parent.job_id)
        try:
            ancestor = _read_lineage_job(tx, parent.job_id)
        except JobNotFound:
            ancestor = LineageJob(job_id=parent.job_id, is_known=False)
        jobs_in_chain.append(ancestor)
        if not _may_see(visible, ancestor):
            break
    chain = _cut_at_hidden(jobs_in_chain, visible)
    last = chain[-1].parent
    is_whole = last is None or not last.job_id or last.job_id in seen
    own_versions = select(model_versions).where(
        model_versions.c.job_id == job_id, ~model_versions.c.removed, in_projects(model_versions.c.project, visible)
    )
    rows = tx.execute(own_versions.order_by(model_versions.c.name, model_versions.c.version)).all()
    return LineageView(
        jobs=chain, is_whole=is_whole, registered=tuple(shown(version, visible) for version in _read_versions(tx, rows))
    )


def chosen(tx: Transaction, request: ModelRequest) -> CheckpointView:
    """The checkpoint that would be registered: the newest committed one, or that of the step. Raises JobNotFound,
    CheckpointNotFound, CheckpointConflict."""
    there = [checkpoint for checkpoint in read_checkpoints(tx, request.job) if request.step in (None, checkpoint.step)]
    committed = [checkpoint for checkpoint in there if checkpoint.state is CheckpointState.COMMITTED]
    if committed:
        return max(committed, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt, checkpoint.generation))
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
    project, checkpoint = job.project, chosen(tx, request)
    of_name = (model_versions.c.project == project, model_versions.c.name == name)
    known = select(model_versions).where(
        *of_name, model_versions.c.job_id == job.id, model_versions.c.checkpoint == checkpoint.name
    )
    if (row := tx.execute(known.where(~model_versions.c.removed)).first()) is not None:
        return _read_versions(tx, [row])[0]
    newest = tx.execute(select(func.max(model_versions.c.version)).where(*of_name)).scalar_one()
    own_job, *origins = lineage(tx, job.id).jobs
    made = ModelVersion(
        project=project,
        name=name,
        version=(newest or 0) + 1,
        job_id=job.id,
        checkpoint=checkpoint.name,
        step=checkpoint.step,
        url=checkpoint.url,
        bytes=checkpoint.bytes,
        metrics=_read_metrics(tx, job.num, checkpoint),
        registered_at=now,
        registered_by=by[:200],
        description=request.description,
        lineage=(own_job.model_copy(update={"data": data or own_job.data}), *origins),
    )
    columns = {
        "project": project,
        "name": name,
        "version": made.version,
        "job_id": job.id,
        "checkpoint": checkpoint.name,
    }
    # not an upsert: of two registrations at the same moment one fails, instead of taking the other's number
    tx.execute(model_versions.insert(), columns | {"removed": False, "document": made.model_dump_json()})
    tx.publish(job.id)
    return made.model_copy(update={"state": checkpoint.state})


def versions(
    tx: Transaction, *, project: str | None = None, name: str | None = None, visible: Visible = None
) -> list[ModelVersion]:
    """By project and name, the newest version first."""
    key = (model_versions.c.project, model_versions.c.name, model_versions.c.version.desc())
    query = select(model_versions).where(~model_versions.c.removed).order_by(*key)
    query = query.where(in_projects(model_versions.c.project, visible, project))
    if name is not None:
        query = query.where(model_versions.c.name == name)
    return [shown(version, visible) for version in _read_versions(tx, tx.execute(query).all())]


def shown(model_version: ModelVersion, visible: Visible) -> ModelVersion:
    """What the principal may read of a version: its lineage ends at the first job of a project that is not visible."""
    return model_version.model_copy(update={"lineage": _cut_at_hidden(model_version.lineage, visible)})


def find(tx: Transaction, project: str, name: str, which: str) -> ModelVersion:
    """`which`: a version, an alias, or `latest`. Raises ModelNotFound."""
    of_name = (model_versions.c.project == project, model_versions.c.name == name, ~model_versions.c.removed)
    rows = tx.execute(select(model_versions).where(*of_name).order_by(model_versions.c.version.desc())).all()
    for version in _read_versions(tx, rows):
        if which in (str(version.version), *version.aliases) or which == "latest":
            return version
    raise ModelNotFound(project, name, which)


def set_alias(tx: Transaction, project: str, name: str, alias: str, version: int) -> ModelVersion:
    """Lets the alias name this version, instead of the one that it has named. Raises ModelNotFound; CheckpointConflict:
    serving could not read the checkpoint of this version."""
    model_version = find(tx, project, name, str(version))
    if model_version.state not in (None, CheckpointState.COMMITTED):
        raise CheckpointConflict(
            model_version.job_id,
            model_version.checkpoint,
            model_version.state,
            "an alias needs a version that can be read",
        )
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


def _read_versions(tx: Transaction, rows: Sequence[Row[Any]]) -> list[ModelVersion]:
    """The versions with what is not a part of their documents: their aliases, and the states of their checkpoints."""
    read_versions = [ModelVersion.model_validate_json(row.document) for row in rows]
    aliases: dict[tuple[str, str, int], list[str]] = {}
    for row in tx.execute(
        _narrow(select(model_aliases), model_aliases.c.name, {version.name for version in read_versions})
    ):
        aliases.setdefault((row.project, row.name, row.version), []).append(row.alias)
    states = _read_states(tx, {version.job_id for version in read_versions})
    return [
        version.model_copy(
            update={
                "aliases": tuple(sorted(aliases.get((version.project, version.name, version.version), ()))),
                "state": states.get((version.job_id, version.checkpoint)),
            }
        )
        for version in read_versions
    ]


def _read_states(tx: Transaction, job_ids: Collection[str]) -> dict[tuple[str, str], CheckpointState]:
    """By job and name, those of all checkpoints of these jobs that the service knows."""
    columns = (jobs.c.id, checkpoints.c.step, checkpoints.c.attempt, checkpoints.c.generation, checkpoints.c.state)
    registered = select(model_versions.c.job_id).where(~model_versions.c.removed)
    query = select(*columns).join(checkpoints, checkpoints.c.job_num == jobs.c.num).where(jobs.c.id.in_(registered))
    return {
        (row.id, str(CheckpointName(row.step, row.attempt, row.generation))): CheckpointState(row.state)
        for row in tx.execute(_narrow(query, jobs.c.id, job_ids))
    }


def _narrow(query: Select[Any], column: Column[str], values: Collection[str]) -> Select[Any]:
    """Only rows with one of these values, unless these are more than a statement can name."""
    return query.where(column.in_(sorted(values))) if len(values) <= _MAX_NAMED else query


def _may_see(visible: Visible, lineage_job: LineageJob) -> bool:
    return visible is None or not lineage_job.is_known or lineage_job.project in visible


def _cut_at_hidden(chain: Sequence[LineageJob], visible: Visible) -> tuple[LineageJob, ...]:
    for number, ancestor in enumerate(chain):
        if number and not _may_see(visible, ancestor):  # that the first is visible is checked at the edge
            return (*chain[:number], LineageJob(job_id=ancestor.job_id, is_known=False))
    return tuple(chain)


def _read_metrics(tx: Transaction, job_num: int, checkpoint: CheckpointView) -> dict[str, float]:
    """What was measured at the step of the checkpoint; of a step that was done again, the last time."""
    row = tx.execute(select(series).where(series.c.job_num == job_num, series.c.step == checkpoint.step)).first()
    metrics: dict[str, float | None] = {}
    if row is not None:
        point = make_point(row)
        own_metrics = {f"val_{name}": value for name, value in point.val_metrics.items()}
        metrics = {"loss": point.loss, "val_loss": point.val_loss, **point.metrics, **own_metrics}
    if checkpoint.score is not None:
        metrics["score"] = checkpoint.score
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def _read_lineage_job(tx: Transaction, job_id: str) -> LineageJob:
    job = load(tx, job_id)
    spec = load_spec(tx, job.num, job.spec_version)
    document = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return LineageJob(
        job_id=job_id,
        name=job.name,
        project=job.project,
        spec_version=job.spec_version,
        spec_sha256=hashlib.sha256(document.encode()).hexdigest(),
        code=spec.program.words if spec.program is not None else spec.task,
        code_sha256=spec.code.archive or "",
        data_source=_describe_source(spec.data),
        data=_read_data_position(tx, job.num),
        parent=_find_parent(spec),
    )


def _find_parent(spec: JobSpec) -> LineageParent | None:
    origin = spec.continue_from
    if origin is not None:
        return LineageParent(
            job_id=origin.job, checkpoint=origin.checkpoint or "", step=origin.step, url=origin.url or ""
        )
    return LineageParent(url=spec.init_from) if spec.init_from is not None else None


def _describe_source(data: Mapping[str, Any]) -> str:
    """Where the data are, in words; empty: the task decides it."""
    if isinstance(corpus := data.get("corpus"), str):
        return f"corpus {corpus}"
    given = data.get("paths") or data.get("sources") or ()
    named = [source.get("name") or source.get("path") if isinstance(source, Mapping) else source for source in given]
    more = [f"and {len(named) - _MAX_SOURCES} more"] if len(named) > _MAX_SOURCES else []
    return ", ".join([*(str(source)[:200] for source in named[:_MAX_SOURCES]), *more])


def _read_data_position(tx: Transaction, job_num: int) -> str:
    """The content hash that the newest change of the data has reported; empty if the data has never changed."""
    changed = select(events.c.data).where(events.c.job_num == job_num, events.c.type == GenerationData.type)
    document = tx.execute(changed.order_by(events.c.seq.desc()).limit(1)).scalar_one_or_none()
    position = json.loads(document).get("now") if document else None
    return position if isinstance(position, str) else ""
