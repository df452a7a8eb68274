"""Commands about access: open, login, logout, whoami; audit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JsonFlag, UrlOption, command

if TYPE_CHECKING:
    from shoal_service.access_views import Whoami


def open_page(
    url: UrlOption = DEFAULT_URL,
    show: Annotated[bool, typer.Option("--show", help="Print the link instead of opening a browser.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Open the web pages in a browser that is logged in. The link works once, for two minutes."""
    with command(url, as_json) as session:
        import webbrowser

        with session.open_client() as client:
            link = client.session_link()
        address = f"{url.rstrip('/')}{link.path}"
        is_open = not show and not as_json and webbrowser.open(address)
        document = {"url": address, "expires_at": link.expires_at}
        session.output.document(document, lambda: "opened" if is_open else address)


def login(
    url: UrlOption = DEFAULT_URL,
    token: Annotated[
        str | None, typer.Option("--token", help="The token; without it, it is asked for, or read from standard input.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Keep a token for a server, in a file that only you can read. It is checked first."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_api.client import Client
        from shoal_api.client.credentials import store_token

        session.check_url()
        if token is None:
            is_terminal = sys.stdin.isatty()
            token = typer.prompt("Token", hide_input=True, err=True) if is_terminal else sys.stdin.readline()
        token = (token or "").strip()
        if not token:
            raise CliError("no token was given", hint="an admin makes one: shoal token create NAME")
        with Client(url, token=token) as client:
            found = client.whoami()
        path = store_token(url, token)
        session.output.document(found, lambda: f"{_words(found)}; the token is kept in {path}")


def logout(url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Forget the token that `shoal login` has kept for a server. The token itself stays valid."""
    with command(url, as_json) as session:
        from shoal_api.client.credentials import store_token

        store_token(url, None)
        session.output.document(None, lambda: f"no token is kept for {url} any more")


def whoami(url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Show who you are to a server: name, role, projects, and what you may do."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            found = client.whoami()
        session.output.document(found, lambda: [_words(found), f"may: {', '.join(found.permissions)}"])


def audit(
    job: Annotated[str | None, typer.Option("--job", metavar="ID", help="Only what was done to this job.")] = None,
    actor: Annotated[str | None, typer.Option("--actor", metavar="NAME", help="Only what they did.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="The newest ones.")] = 50,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Show who changed what through the API, and from where. Newest first."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.access_page import audit_table

        with session.open_client() as client:
            found = client.audit(job_id=job, actor=actor, limit=limit).items
        session.output.document(found, lambda: audit_table(found))


def _words(me: Whoami) -> str:
    where = "all projects" if me.projects is None else f"projects {', '.join(me.projects)}"
    return f"{me.name}, role {me.role}, {where}"
