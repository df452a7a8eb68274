"""Commands about the limits of users: quota list-users, set-user and delete-user."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shoal_api.cli.commands.queue import count_of
from shoal_api.cli.session import DEFAULT_URL, JsonFlag, UrlOption, command

UserArgument = Annotated[
    str, typer.Argument(metavar="USER", help="Name of a user; `default`: of each user without own limits.")
]


def list_users(url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List the users: the limits that apply, and what they have."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.queue_page import users_table

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
        from shoal_api.cli.render.queue_page import users_table
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
