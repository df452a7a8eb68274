"""The queue, the projects and the users as tables for a terminal, and the page of a dry run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.terminal import clock, command_text, new_table
from shoal_service.core.quantities import count_text, duration_text
from shoal_service.fleet_views import (
    DryRun,
    HeldBackJob,
    ProjectView,
    QueuedJob,
    QueueView,
    StartForecast,
    UserView,
)
from shoal_service.views import QueuePlace
from shoal_workers.contract.fault_tolerance import ElasticitySpec


def queue_page(queue: QueueView, now: float) -> list[Any]:
    """Return the jobs that wait, those that run with fewer workers than they may have, and the projects."""
    held_back = [Text(""), held_back_table(queue.held_back)] if queue.held_back else []
    rest = [*held_back, Text(""), projects_table(queue.projects)]
    if not queue.items:
        return [Text("no job waits", style="dim"), *rest]
    table = new_table(">#", "id", "name", "project", "user", ">priority", ">waits", "starts", "why")
    for one in queue.items:
        table.add_row(
            str(one.place.position) if one.place is not None else "-",
            one.job_id,
            one.name,
            one.project,
            one.user,
            str(one.priority),
            duration_text(max(0.0, now - one.submitted_at)),
            starts(one.place, now),
            _why(one),
        )
    page: list[Any] = [table]
    if queue.num_queued > len(queue.items):
        page.append(
            Text(f"and {count_text(queue.num_queued - len(queue.items), 'more job')}; see --limit", style="dim")
        )
    return [*page, *rest]


def held_back_table(jobs: Sequence[HeldBackJob]) -> Table:
    table = new_table("running", "name", "project", "user", ">priority", ">workers", "why no more")
    for one in jobs:
        workers = f"{one.workers} of {one.answer.max_workers}"
        table.add_row(one.job_id, one.name, one.project, one.user, str(one.priority), workers, one.answer.reason)
    return table


def projects_table(projects: Sequence[ProjectView]) -> Table:
    table = new_table(
        *("project", "parent", ">weight", ">guaranteed", ">limit", ">workers", ">share", ">running", ">queued")
    )
    for one in projects:
        table.add_row(
            Text(one.name, style="" if one.is_defined else "dim"),
            one.parent or "-",
            f"{one.weight:g}",
            str(one.guaranteed),
            _most(one.limit),
            str(one.workers),
            f"{one.share:.0%}",
            _of(one.running, one.max_running),
            _of(one.queued, one.max_queued),
        )
    return table


def users_table(users: Sequence[UserView]) -> Table:
    table = new_table("user", ">workers", ">running", ">queued")
    for one in users:
        name = Text(one.name, style="" if one.is_defined else "dim")
        table.add_row(name, str(one.workers), _of(one.running, one.max_running), _of(one.queued, one.max_queued))
    return table


def starts(place: QueuePlace | None, now: float) -> str:
    """Say when a queued job is expected to start."""
    if place is None or place.expected_at is None:
        return "not known"
    left_s = place.expected_at - now
    return f"{clock(place.expected_at)} (in {duration_text(left_s)})" if left_s >= 1 else "now"


def place_text(place: QueuePlace, now: float) -> str:
    """Return the place of one job, for `shoal show`. The reason is the message of the job."""
    held = f"; {', '.join(place.holders)} hold what it waits for" if len(place.holders) > 1 else ""
    held = f"; {place.holders[0]} holds what it waits for" if len(place.holders) == 1 else held
    return f"position {place.position}{held}; expected start: {starts(place, now)}"


def _why(one: QueuedJob) -> str:
    if one.place is None:
        return "waits for the scheduler"
    holders = f" [{', '.join(one.place.holders)}]" if one.place.holders else ""
    return one.place.reason + holders


def _most(limit: int | None) -> str:
    return "-" if limit is None else str(limit)


def _of(count: int, most: int | None) -> str:
    return str(count) if most is None else f"{count} of {most}"


def dry_run_page(found: DryRun, now: float) -> Table:
    spec = found.spec
    layouts = [(count_text(one.workers, "worker"), _layout(one.layout, one.num_idle)) for one in found.layouts]
    if spec.program is not None:  # it splits its own work
        layouts = [("command", command_text(spec.program)), ("workers", _workers(spec.elasticity))]
    rows: list[tuple[str, Any]] = [
        ("name", spec.name),
        ("project", f"{spec.project}, user {spec.user}, priority {spec.priority}"),
        ("start", start_text(found.start, now)),
        *layouts,
        ("note", found.note),
        ("", "The spec is accepted. Nothing was submitted."),
    ]
    page = Table.grid(padding=(0, 2))
    page.add_column(style="dim")
    page.add_column(overflow="fold")
    for label, value in rows:
        if value:
            page.add_row(label, Text(value))
    return page


def start_text(start: StartForecast | None, now: float) -> str:
    if start is None:
        return "not known: this server does not schedule at the moment"
    if start.workers is not None:
        return f"at once. {start.reason}"
    when = "not known when"
    if start.expected_at is not None:
        when = f"expected in {duration_text(max(0.0, start.expected_at - now))}, at {clock(start.expected_at)}"
    return f"it would wait as number {start.position} of the queue, {when}. {start.reason}"


def _workers(elasticity: ElasticitySpec) -> str:
    least, most = elasticity.min_workers, elasticity.max_workers
    return str(most) if least == most else f"{least} to {most}"


def _layout(layout: str, num_idle: int) -> str:
    return layout + (f", {count_text(num_idle, 'worker')} idle" if num_idle else "")
