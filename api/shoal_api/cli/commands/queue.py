"""Commands about the queue and its order: queue, priority; quota list, set and delete, for projects and for users."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, UrlOption, command

if TYPE_CHECKING:
    from shoal_service.fleet_views import ProjectRules, ProjectView

ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT", help="Name of a project.")]
_NONE = "none"
UserArgument = Annotated[
    str, typer.Argument(metavar="USER", help="Name of a user; `default`: of each user without own limits.")
]


def queue(
    project: Annotated[str | None, typer.Option("--project", help="Only jobs of this project.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Largest number of jobs.")] = 100,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Show the queue in its order: why each job waits, who holds what it waits for, and when it should start.

    Running jobs with fewer workers than they may have follow, with the reason.
    """
    with command(url, as_json) as session:
        from shoal_api.cli.render.queue import queue_page

        with session.open_client() as client:
            view = client.queue(limit=10_000 if project is not None else limit)
        if project is not None:
            items = tuple(one for one in view.items if one.project == project)
            held_back = tuple(one for one in view.held_back if one.project == project)
            view = view.model_copy(
                update={"items": items[:limit], "num_queued": len(items), "held_back": held_back[:limit]}
            )
        session.output.document(view, lambda: queue_page(view, time.time()))


def priority(
    job: JobArgument,
    value: Annotated[
        int, typer.Argument(metavar="N", min=-1000, max=1000, help="-1000 to 1000; higher gets workers first.")
    ],
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Change the priority of a job. Put -- before a negative number: `shoal priority JOB -- -5`."""
    with command(url, as_json) as session:
        from shoal_service.views import JobPatch

        with session.open_client() as client:
            view = client.patch(session.job_id(client, job), JobPatch(priority=value))
        session.output.document(
            view, lambda: f"{view.id}  {view.name}  {view.status.state}  priority {view.spec.priority}"
        )


def quota() -> None:
    """Show and change the quotas of projects, and the limits of users."""


def list_quotas(url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List the projects: their quotas, and what they use."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.queue import projects_table

        with session.open_client() as client:
            found = client.projects()
        session.output.document(found, lambda: projects_table(found))


def set_quota(
    project: ProjectArgument,
    weight: Annotated[
        float | None, typer.Option("--weight", help="Share, relative to projects of the same parent.")
    ] = None,
    guaranteed: Annotated[
        int | None, typer.Option("--guaranteed", min=0, help="Workers that it gets back from others.")
    ] = None,
    limit: Annotated[str | None, typer.Option("--limit", metavar="N|none", help="Most workers.")] = None,
    max_running: Annotated[
        str | None, typer.Option("--max-running", metavar="N|none", help="Most jobs with workers.")
    ] = None,
    max_queued: Annotated[str | None, typer.Option("--max-queued", metavar="N|none", help="Most queued jobs.")] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="PROJECT|none", help="The project that it is a part of.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Define a project, or change its quotas. What is not given stays as it is."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.queue import projects_table

        given: dict[str, Any] = {
            key: v for key, v in {"weight": weight, "guaranteed": guaranteed}.items() if v is not None
        }
        for key, text in {"limit": limit, "max_running": max_running, "max_queued": max_queued}.items():
            if text is not None:
                given[key] = count_of(key, text)
        if parent is not None:
            given["parent"] = None if parent == _NONE else parent
        with session.open_client() as client:
            known = next((one for one in client.projects() if one.name == project and one.is_defined), None)
            rules = _rules(known, given)
            view = client.set_project(project, rules)
        session.output.document(view, lambda: projects_table((view,)))


def delete_quota(project: ProjectArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Delete the quotas of a project. Its jobs go on under those of the project `default`."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            client.delete_project(project)
        session.output.document(None, lambda: f"{project} has no quotas of its own any more")


def count_of(key: str, text: str) -> int | None:
    """Parse the value of the option `--key`: a number, or none. Raises CliError."""
    from shoal_api.cli.errors import CliError

    if text == _NONE:
        return None
    if not text.isdecimal():
        option = f"--{key.replace('_', '-')}"
        raise CliError(f"{option} {text!r} is not a number", hint=f"{option} 8, or {option} {_NONE} for no limit")
    return int(text)


def _rules(known: ProjectView | None, given: dict[str, Any]) -> ProjectRules:
    from pydantic import ValidationError

    from shoal_api.cli.errors import CliError
    from shoal_service.fleet_views import ProjectRules

    before = known.model_dump(include=set(ProjectRules.model_fields)) if known is not None else {}
    try:
        return ProjectRules.model_validate({**before, **given})
    except ValidationError as error:
        [first, *_] = error.errors()
        where = ".".join(str(step) for step in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise CliError(f"{where}: {message}" if where else message, hint="shoal quota set --help") from None


def list_users(url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List the users: the limits that apply, and what they have."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.queue import users_table

        with session.open_client() as client:
            found = client.users()
        session.output.document(found, lambda: users_table(found))


def set_user(
    user: UserArgument,
    max_running: Annotated[
        str | None, typer.Option("--max-running", metavar="N|none", help="Most jobs with workers.")
    ] = None,
    max_queued: Annotated[str | None, typer.Option("--max-queued", metavar="N|none", help="Most queued jobs.")] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Limit the jobs of a user. What is not given stays as it is."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.queue import users_table
        from shoal_service.fleet_views import UserRules

        given = {"max_running": max_running, "max_queued": max_queued}
        changes: dict[str, Any] = {key: count_of(key, text) for key, text in given.items() if text is not None}
        with session.open_client() as client:
            known = next((one for one in client.users() if one.name == user and one.is_defined), None)
            before = {} if known is None else known.model_dump(include=set(UserRules.model_fields))
            view = client.set_user(user, UserRules(**{**before, **changes}))
        session.output.document(view, lambda: users_table((view,)))


def delete_user(user: UserArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Delete the limits of a user. Those of the user `default` then apply."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            client.delete_user(user)
        session.output.document(None, lambda: f"{user} has no limits of their own any more")
