"""Renders the queue, projects, users and a dry run for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.terminal import command_text, facts_grid, make_table
from shoal_service.core.goodput import Period
from shoal_service.core.quantities import count_text, duration_text, range_text
from shoal_service.fleet_views import (
    DryRun,
    HeldBackJob,
    ProjectUsage,
    ProjectView,
    QueuedJob,
    QueueView,
    StartForecast,
    UserView,
)
from shoal_service.views import QueuePlace


def render_queue(queue: QueueView, now: float, names: Mapping[str, str]) -> list[Any]:
    """Render the jobs that wait, those that run with fewer workers than they may have, and the projects.

    `names`: names of jobs, by id.
    """
    held_back = [Text(""), _render_held_back(queue.held_back)] if queue.held_back else []
    below = [*held_back, Text(""), render_projects(queue.projects)]
    if not queue.items:
        return [Text("no job waits", style="dim"), *below]
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
                duration_text(max(0.0, now - _find_waiting_since(job))),
                _describe_start_time(None if job.place is None else job.place.expected_at, now),
                _explain_wait(job, names),
            )
            for job in queue.items
        ],
    )
    num_omitted = queue.num_queued - len(queue.items)
    if num_omitted > 0:
        below.insert(0, Text(f"and {count_text(num_omitted, 'more job')}; see --limit", style="dim"))
    return [table, *below]


def _render_held_back(jobs: Sequence[HeldBackJob]) -> RenderableType:
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


def render_projects(projects: Sequence[ProjectView]) -> RenderableType:
    return make_table(
        ("project", "parent", ">weight", ">guaranteed", ">limit", ">workers", ">share", ">running", ">queued"),
        [
            (
                _style_name(project),
                project.parent or "-",
                f"{project.weight:g}",
                project.guaranteed,
                "-" if project.limit is None else project.limit,
                project.workers,
                f"{project.share:.0%}",
                _format_count(project.running, project.max_running),
                _format_count(project.queued, project.max_queued),
            )
            for project in projects
        ],
    )


def render_usage(rows: Sequence[ProjectUsage], by: Period, project: str | None) -> RenderableType:
    """Render the use of projects, a row for each period and project."""
    whose = f"of project {project} " if project is not None else ""
    return make_table(
        (f"{by} of", "project", ">worker hours", ">productive", ">jobs"),
        [
            (
                f"{datetime.fromtimestamp(row.since, UTC):%Y-%m-%d}",
                row.project,
                f"{row.worker_s / 3600:,.1f}",
                f"{row.productive_s / row.worker_s:.0%}",
                row.num_jobs,
            )
            for row in rows
        ],
        empty=f"no job {whose}has had workers in this time",
    )


def render_users(users: Sequence[UserView]) -> RenderableType:
    return make_table(
        ("user", ">workers", ">running", ">queued"),
        [
            (
                _style_name(user),
                user.workers,
                _format_count(user.running, user.max_running),
                _format_count(user.queued, user.max_queued),
            )
            for user in users
        ],
    )


def _describe_start_time(expected_at: float | None, now: float) -> str:
    """Describe when a queued job is expected to start, rounded to the precision of the forecast."""
    if expected_at is None:
        return "not known"
    left_s = expected_at - now
    if left_s < 1:
        return "now"
    unit = next(unit for unit in (10, 60, 300, 600) if left_s < 15 * unit or unit == 600)
    return f"in about {duration_text(max(1, round(left_s / unit)) * unit).removesuffix(' 00 s')}"


def describe_place(place: QueuePlace, now: float, names: Mapping[str, str]) -> str:
    """Describe the place of one job, for `shoal show`. The job's message has the reason."""
    blockers = f", waiting for {_join_holders(place, names)}" if place.holders else ""
    return f"position {place.position}{blockers}; expected start: {_describe_start_time(place.expected_at, now)}"


def _join_holders(place: QueuePlace, names: Mapping[str, str]) -> str:
    return ", ".join(names.get(holder, holder) for holder in place.holders)


def _find_waiting_since(job: QueuedJob) -> float:
    return (None if job.place is None else job.place.waiting_since) or job.submitted_at


def _explain_wait(job: QueuedJob, names: Mapping[str, str]) -> str:
    if job.place is None:
        return "not considered by the scheduler yet"
    return (
        f"{job.place.reason} Waiting for {_join_holders(job.place, names)}." if job.place.holders else job.place.reason
    )


def _style_name(view: ProjectView | UserView) -> Text:
    return Text(view.name, style="" if view.is_defined else "dim")


def _format_count(count: int, limit: int | None) -> str:
    return str(count) if limit is None else f"{count} of {limit}"


def render_dry_run(result: DryRun, now: float) -> Table:
    spec = result.spec
    layouts = [
        (count_text(layout.workers, "worker"), _format_layout(layout.layout, layout.num_idle))
        for layout in result.layouts
    ]
    if spec.program is not None:  # it splits its own work
        layouts = [
            ("command", command_text(spec.program)),
            ("workers", range_text(spec.elasticity.min_workers, spec.elasticity.max_workers)),
        ]
    return facts_grid(
        [
            ("name", spec.name),
            ("project", f"{spec.project}, user {spec.user}, priority {spec.priority}"),
            ("start", _describe_start(result.start, now)),
            *layouts,
            ("note", result.note),
            ("", "The spec is accepted. Nothing was submitted."),
        ]
    )


def _describe_start(start: StartForecast | None, now: float) -> str:
    if start is None:
        return "not known: this server does not schedule at the moment"
    if start.workers is not None:
        return f"at once. {start.reason}"
    when = (
        "start time unknown"
        if start.expected_at is None
        else f"expected start: {_describe_start_time(start.expected_at, now)}"
    )
    return f"it would be number {start.position} in the queue; {when}. {start.reason}"


def _format_layout(layout: str, num_idle: int) -> str:
    return layout + (f", {count_text(num_idle, 'worker')} idle" if num_idle else "")
