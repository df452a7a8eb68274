"""Commands about the queue and its order: queue, priority; quota list, set and delete, for projects and for users."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from shoal_api.cli.errors import CliError, first_problem
from shoal_api.cli.options import JobArgument, given
from shoal_api.cli.render.jobs import job_line
from shoal_api.cli.render.queue import projects_table, queue_page, users_table
from shoal_api.cli.session import Session, command
from shoal_service.fleet_views import ProjectRules, ProjectView, UserRules, UserView
from shoal_service.views import JobPatch

Rules = TypeVar("Rules", ProjectRules, UserRules)
ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT", help="Name of a project.")]
_NONE = "none"
UserArgument = Annotated[
    str, typer.Argument(metavar="USER", help="Name of a user; `default`: of each user without own limits.")
]

MaxRunningOption = Annotated[
    str | None, typer.Option("--max-running", metavar="N|none", help="Most jobs with workers.")
]
MaxQueuedOption = Annotated[str | None, typer.Option("--max-queued", metavar="N|none", help="Most queued jobs.")]


@command()
def queue(
    session: Session,
    project: Annotated[str | None, typer.Option("--project", help="Only jobs of this project.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Largest number of jobs.")] = 100,
) -> None:
    """Show the queue in its order: why each job waits, who holds what it waits for, and when it should start.

    Running jobs with fewer workers than they may have follow, with the reason.
    """
    view = session.client.queue(limit=10_000 if project is not None else limit)
    if project is not None:
        items = tuple(job for job in view.items if job.project == project)
        held_back = tuple(job for job in view.held_back if job.project == project)
        view = view.model_copy(
            update={"items": items[:limit], "num_queued": len(items), "held_back": held_back[:limit]}
        )
    session.show(view, lambda queue: queue_page(queue, time.time()))


@command()
def priority(
    session: Session,
    job: JobArgument,
    value: Annotated[
        int, typer.Argument(metavar="N", min=-1000, max=1000, help="-1000 to 1000; higher gets workers first.")
    ],
) -> None:
    """Change the priority of a job. Put -- before a negative number: `shoal priority JOB -- -5`."""
    session.show(
        session.client.patch(session.job_id(job), JobPatch(priority=value)),
        lambda view: job_line(view, f"priority {view.spec.priority}"),
    )


@command()
def list_quotas(session: Session) -> None:
    """List the projects: their quotas, and what they use."""
    session.show(session.client.projects(), projects_table)


@command()
def set_quota(
    session: Session,
    project: ProjectArgument,
    weight: Annotated[
        float | None, typer.Option("--weight", help="Share, relative to projects of the same parent.")
    ] = None,
    guaranteed: Annotated[
        int | None, typer.Option("--guaranteed", min=0, help="Workers that it gets back from others.")
    ] = None,
    limit: Annotated[str | None, typer.Option("--limit", metavar="N|none", help="Most workers.")] = None,
    max_running: MaxRunningOption = None,
    max_queued: MaxQueuedOption = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="PROJECT|none", help="The project that it is a part of.")
    ] = None,
) -> None:
    """Define a project, or change its quotas. What is not given stays as it is."""
    changes = given(weight=weight, guaranteed=guaranteed)
    changes |= _parse_limits(limit=limit, max_running=max_running, max_queued=max_queued)
    if parent is not None:
        changes["parent"] = None if parent == _NONE else parent
    rules = _merge_rules(ProjectRules, session.client.projects(), project, changes)
    session.show(session.client.set_project(project, rules), lambda project: projects_table([project]))


@command()
def delete_quota(session: Session, project: ProjectArgument) -> None:
    """Delete the quotas of a project. Its jobs go on under those of the project `default`."""
    session.client.delete_project(project)
    session.show(None, f"{project} has no quotas of its own any more")


def _parse_limits(**options: str | None) -> dict[str, int | None]:
    """Parse the options that are given: numbers, or `none`. Raises CliError."""
    limits: dict[str, int | None] = {}
    for name, text in given(**options).items():
        if text != _NONE and not text.isdecimal():
            option = f"--{name.replace('_', '-')}"
            raise CliError(f"{option} {text!r} is not a number", hint=f"{option} 8, or {option} {_NONE} for no limit")
        limits[name] = None if text == _NONE else int(text)
    return limits


def _merge_rules(
    kind: type[Rules], views: Sequence[ProjectView | UserView], name: str, changes: dict[str, Any]
) -> Rules:
    """Return the rules of a project or user with some of them changed. Raises CliError."""
    current = next((view for view in views if view.name == name and view.is_defined), None)
    before = {} if current is None else current.model_dump(include=set(kind.model_fields))
    try:
        return kind.model_validate({**before, **changes})
    except ValidationError as error:
        raise CliError(first_problem(error), hint="shoal quota --help") from None


@command()
def list_users(session: Session) -> None:
    """List the users: the limits that apply, and what they have."""
    session.show(session.client.users(), users_table)


@command()
def set_user(
    session: Session,
    user: UserArgument,
    max_running: MaxRunningOption = None,
    max_queued: MaxQueuedOption = None,
) -> None:
    """Limit the jobs of a user. What is not given stays as it is."""
    limits = _parse_limits(max_running=max_running, max_queued=max_queued)
    rules = _merge_rules(UserRules, session.client.users(), user, limits)
    session.show(session.client.set_user(user, rules), lambda user: users_table([user]))


@command()
def delete_user(session: Session, user: UserArgument) -> None:
    """Delete the limits of a user. Those of the user `default` then apply."""
    session.client.delete_user(user)
    session.show(None, f"{user} has no limits of their own any more")
