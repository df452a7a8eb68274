"""What the table of jobs offers: the names that its conditions and columns can use, and views saved under a name.

Names of facts and settings are those of `core/where`. Names of labels and metrics are read from jobs, so that nobody
sees a name of a project that is hidden from them. A view is a document of texts, which are parsed when it is used: one
with a name that a later release does not know is still shown, with the mistake. Called by the HTTP edge.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Select, delete, func, select

from shoal_service.core.where.fields import FACTS, setting_kinds
from shoal_service.fleet_views import JobField, SavedView, TableView
from shoal_service.store.database import Transaction, upsert
from shoal_service.store.errors import TooManyViews, ViewNotFound
from shoal_service.store.tables import job_labels, job_views, jobs

MAX_VIEWS = 200
"""Views of a project, at most."""
_NEWEST = 200
"""Jobs whose metrics are offered."""
_MOST_LABELS = 200


def known_fields(tx: Transaction, visible: Collection[str] | None) -> tuple[JobField, ...]:
    """The names, facts first. `visible`: labels and metrics of jobs of these projects; None means all."""
    facts = [JobField(name=fact.name, kind=fact.kind, meaning=fact.meaning) for fact in FACTS.values()]
    settings = [
        JobField(name=".".join(path), kind=kind) for path, kind in setting_kinds().items() if path[0] not in FACTS
    ]
    keys = select(job_labels.c.key).join(jobs, jobs.c.num == job_labels.c.job_num).distinct()
    labels = tx.execute(_of(visible, keys).order_by(job_labels.c.key).limit(_MOST_LABELS)).scalars()
    metrics: dict[str, set[str]] = {"metric": set(), "val": set()}
    newest = _of(visible, select(jobs.c.status)).order_by(jobs.c.num.desc()).limit(_NEWEST)
    for document in tx.execute(newest).scalars():
        metrics["metric"] |= _names(document, "metrics")
        metrics["val"] |= _names(document, "val_metrics")
    return (
        *facts,
        *(
            JobField(name=f"{family}.{quoted(name)}", kind="number")
            for family in metrics
            for name in sorted(metrics[family])
        ),
        *(JobField(name=f"label.{name}", kind="label") for name in labels),
        *settings,
    )


def quoted(name: str) -> str:
    """A name that a user has chosen, as the language writes it."""
    plain = all(letter.isascii() and (letter.isalnum() or letter in "_/-.") for letter in name)
    return name if plain and name[-1:].isalnum() and name[:1].isalnum() and ".." not in name else f'"{name}"'


def read_views(tx: Transaction, visible: Collection[str] | None, project: str | None = None) -> list[SavedView]:
    """The saved views by project and name; `project`: of it alone."""
    query = select(job_views).order_by(job_views.c.project, job_views.c.name)
    if project is not None:
        query = query.where(job_views.c.project == project)
    if visible is not None:
        query = query.where(job_views.c.project.in_(sorted(visible)))
    return [
        SavedView(
            project=row.project,
            name=row.name,
            view=_view_of(row.document),
            saved_at=row.saved_at,
            saved_by=row.saved_by,
        )
        for row in tx.execute(query)
    ]


def put_view(tx: Transaction, project: str, name: str, view: TableView, *, by: str, now: float) -> SavedView:
    """Saves a view, instead of one with the same name. Raises TooManyViews."""
    saved = SavedView(project=project, name=name, view=view, saved_at=now, saved_by=by)
    row = {"project": project, "name": name, "document": view.model_dump_json(), "saved_at": now, "saved_by": by[:200]}
    upsert(tx, job_views, [row])
    counted = select(func.count()).select_from(job_views).where(job_views.c.project == project)
    if tx.execute(counted).scalar_one() > MAX_VIEWS:
        raise TooManyViews(project, MAX_VIEWS)
    return saved


def remove_view(tx: Transaction, project: str, name: str) -> None:
    """Raises ViewNotFound."""
    if not tx.execute(delete(job_views).where(job_views.c.project == project, job_views.c.name == name)).rowcount:
        raise ViewNotFound(project, name)


def _of(visible: Collection[str] | None, query: Select[Any]) -> Select[Any]:
    return query if visible is None else query.where(jobs.c.project.in_(sorted(visible)))


def _names(document: str, key: str) -> set[str]:
    try:
        names = json.loads(document).get(key)
    except (ValueError, AttributeError):
        return set()
    return (
        {name for name in names if name and '"' not in name and "\\" not in name} if isinstance(names, dict) else set()
    )


def _view_of(document: str) -> TableView:
    try:
        return TableView.model_validate_json(document)
    except ValidationError:
        return TableView()
