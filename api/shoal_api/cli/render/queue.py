"""The queue, the projects and the users as tables for a terminal, and the page of a dry run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.terminal import clock, command_text, facts_grid, make_table
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
    table = make_table(
        (">#", "id", "name", "project", "user", ">priority", ">waits", "starts", "why"),
        [
            (
                job.place.position if job.place is not None else "-",
                job.job_id,
                job.name,
                job.project,
                job.user,
                job.priority,
                duration_text(max(0.0, now - job.submitted_at)),
                starts(job.place, now),
                _why(job),
            )
            for job in queue.items
        ],
    )
    more = queue.num_queued - len(queue.items)
    note = [Text(f"and {count_text(more, 'more job')}; see --limit", style="dim")] if more > 0 else []
    return [table, *note, *rest]


def held_back_table(jobs: Sequence[HeldBackJob]) -> RenderableType:
    return make_table(
        ("running", "name", "project", "user", ">priority", ">workers", "why no more"),
        [
            (
                job.job_id,
                job.name,
                job.project,
                job.user,
                job.priority,
                f"{job.workers} of {job.answer.max_workers}",
                job.answer.reason,
            )
            for job in jobs
        ],
    )


def projects_table(projects: Sequence[ProjectView]) -> RenderableType:
    return make_table(
        ("project", "parent", ">weight", ">guaranteed", ">limit", ">workers", ">share", ">running", ">queued"),
        [
            (
                _name(project),
                project.parent or "-",
                f"{project.weight:g}",
                project.guaranteed,
                "-" if project.limit is None else project.limit,
                project.workers,
                f"{project.share:.0%}",
                _count_of_limit(project.running, project.max_running),
                _count_of_limit(project.queued, project.max_queued),
            )
            for project in projects
        ],
    )


def users_table(users: Sequence[UserView]) -> RenderableType:
    return make_table(
        ("user", ">workers", ">running", ">queued"),
        [
            (
                _name(user),
                user.workers,
                _count_of_limit(user.running, user.max_running),
                _count_of_limit(user.queued, user.max_queued),
            )
            for user in users
        ],
    )


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


def _why(job: QueuedJob) -> str:
    if job.place is None:
        return "waits for the scheduler"
    holders = f" [{', '.join(job.place.holders)}]" if job.place.holders else ""
    return job.place.reason + holders


def _name(view: ProjectView | UserView) -> Text:
    return Text(view.name, style="" if view.is_defined else "dim")


def _count_of_limit(count: int, limit: int | None) -> str:
    return str(count) if limit is None else f"{count} of {limit}"


def dry_run_page(result: DryRun, now: float) -> Table:
    spec = result.spec
    layouts = [
        (count_text(layout.workers, "worker"), _layout(layout.layout, layout.num_idle)) for layout in result.layouts
    ]
    if spec.program is not None:  # it splits its own work
        layouts = [("command", command_text(spec.program)), ("workers", _workers(spec.elasticity))]
    return facts_grid(
        [
            ("name", spec.name),
            ("project", f"{spec.project}, user {spec.user}, priority {spec.priority}"),
            ("start", start_text(result.start, now)),
            *layouts,
            ("note", result.note),
            ("", "The spec is accepted. Nothing was submitted."),
        ]
    )


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
