"""Commands about access: open, login, logout, whoami; token create, list and revoke; audit.

They never print a token, except the one that `shoal token create` has made.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JsonFlag, UrlOption, command
from shoal_service.core.access import Role

if TYPE_CHECKING:
    from shoal_api.client import Client
    from shoal_service.access_views import Whoami

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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
            raise CliError("no token was given", hint="an admin makes one: shoal token create NAME --personal")
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
        from shoal_api.cli.render.access import audit_table

        with session.open_client() as client:
            found = client.audit(job_id=job, actor=actor, limit=limit).items
        session.output.document(found, lambda: audit_table(found))


def _words(me: Whoami) -> str:
    where = "all projects" if me.projects is None else f"projects {', '.join(me.projects)}"
    return f"{me.name}, role {me.role}, {where}"


def token() -> None:
    """API tokens: who may use the server."""


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who or what will use it.")],
    role: Annotated[Role, typer.Option("--role", help="What it may do; see docs/security.md.")] = Role.VIEWER,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="CLUSTER", help="For the gateway of this cluster (`shoal join`) alone."),
    ] = None,
    project: Annotated[
        list[str] | None, typer.Option("--project", metavar="PROJECT", help="Only jobs of this project; repeatable.")
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="User of the jobs that it submits; default: NAME.")
    ] = None,
    personal: Annotated[
        bool, typer.Option("--personal", help="For a person, who may make tokens with it. Only an admin says so.")
    ] = False,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="How long it is valid, such as 12h or 30d; never.")
    ] = "90d",
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write it there, readable by you alone.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Make a token and print it. It is shown only now: the server keeps its SHA-256.

    If the token in use is not an admin's, the new one may do no more and ends with it.
    """
    with command(url, as_json) as session:
        from pydantic import ValidationError

        from shoal_api.cli.errors import CliError
        from shoal_service.access_views import ClusterTokenRequest, TokenRequest

        lasts_s, projects = _seconds(expires), tuple(project) if project else None
        if cluster is not None and (projects or user or personal or role is not Role.VIEWER):
            others = "--role, --project, --user or --personal"
            raise CliError(f"--cluster makes the token of a gateway, which has no {others}")
        request: ClusterTokenRequest | TokenRequest
        try:
            if cluster is not None:
                request = ClusterTokenRequest(name=name, expires_in_s=lasts_s)
            else:
                request = TokenRequest(
                    name=name, role=role, projects=projects, user=user, expires_in_s=lasts_s, personal=personal
                )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise CliError(f"{where or 'token'}: {str(first['msg']).removeprefix('Value error, ')}") from None
        with session.open_client() as client:
            if isinstance(request, ClusterTokenRequest):
                made = client.create_cluster_token(cluster or "", request)
            else:
                made = client.create_token(request)
        ends_at = made.expires_at
        if ends_at is not None and (lasts_s is None or ends_at < made.created_at + lasts_s):
            at = time.strftime("%Y-%m-%d %H:%M", time.localtime(ends_at))
            session.output.say(f"it ends at {at}, not after {expires}: with the token that made it")
        if output is not None:
            with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(f"{made.token}\n")
            session.output.document(made.model_copy(update={"token": ""}), lambda: f"token {made.id} is in {output}")
        else:
            session.output.document(made, lambda: made.token)


def list_tokens(
    ended: Annotated[bool, typer.Option("--all", help="Also those that are expired or revoked.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """List your tokens: what they may do, when they end and were used last. An admin sees those of all."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.access import is_valid, tokens_table

        now = time.time()
        with session.open_client() as client:
            found = [one for one in client.tokens() if ended or is_valid(one, now)]
        session.output.document(found, lambda: tokens_table(found, now))


def revoke(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="Id, or the name of only one.")],
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Revoke a token at once, with those that it has made. This cannot be undone.

    If it is the one that `shoal login` has kept for the server, it is forgotten too.
    """
    with command(url, as_json) as session:
        from shoal_api.client.credentials import forget_token

        with session.open_client() as client:
            view = client.revoke_token(_id_of(client, token))
        words = "; you are logged out" if forget_token(url, view.id) else ""
        session.output.document(view, lambda: f"token {view.id} ({view.name}) is revoked{words}")


def _id_of(client: Client, reference: str) -> str:
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode
    from shoal_api.cli.render.access import is_valid

    known = client.tokens()
    given = reference.removeprefix("shoal_").partition("_")[0]
    if any(one.id == given for one in known):
        return given
    valid = [one for one in known if is_valid(one, time.time())]
    named = [one for one in valid if one.name == reference]
    named = named or [one for one in valid if one.name.partition("/")[2] == reference]  # ada/laptop, by ada
    if len(named) == 1:
        return named[0].id
    if named:
        raise CliError(f"several tokens are called {reference}", hint=f"one of {', '.join(one.id for one in named)}")
    raise CliError(f"no token {reference!r}", hint="`shoal token list` lists the tokens", exit_code=ExitCode.NOT_FOUND)


def _seconds(text: str) -> float | None:
    from shoal_api.cli.errors import CliError

    if text == "never":
        return None
    number, unit = text[:-1], text[-1:]
    if unit in _UNITS and number.isascii() and number.isdigit() and int(number) > 0:
        return int(number) * _UNITS[unit]
    raise CliError(f"--expires {text!r} is not a time", hint="use 45m, 12h, 30d, or never")
