"""Commands about access: open, login, logout, whoami; token create, list and revoke; audit.

They never print a token, except the one that `shoal token create` has made.
"""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from shoal_api.cli.render.fleet import is_valid, render_audit, render_tokens
from shoal_api.cli.session import CliError, ExitCode, Session, command
from shoal_api.client import Client
from shoal_api.client.credentials import forget_token, store_token
from shoal_service.access_views import ClusterTokenRequest, TokenRequest, Whoami
from shoal_service.core.access import Role
from shoal_workers.contract.plain_text import first_problem

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@command()
def open_page(
    session: Session,
    show: Annotated[bool, typer.Option("--show", help="Print the link instead of opening a browser.")] = False,
) -> None:
    """Open the web pages in a browser that is logged in. The link works once, for two minutes."""
    link = session.client.session_link()
    address = f"{session.url.rstrip('/')}{link.path}"
    is_opened = False if show or session.output.as_json else webbrowser.open(address)
    session.show({"url": address, "expires_at": link.expires_at}, "opened" if is_opened else address)


@command()
def login(
    session: Session,
    token: Annotated[
        str | None, typer.Option("--token", help="The token; without it, it is asked for, or read from standard input.")
    ] = None,
) -> None:
    """Keep a token for a server, in a file that only you can read. It is checked first."""
    session.check_url()
    if token is None:
        is_interactive = sys.stdin.isatty()
        token = typer.prompt("Token", hide_input=True, err=True) if is_interactive else sys.stdin.readline()
    token = (token or "").strip()
    if not token:
        raise CliError("no token was given", hint="an admin makes one: shoal token create NAME --personal")
    with Client(session.url, token=token) as client:
        account = client.whoami()
    path = store_token(session.url, token)
    session.show(account, f"{_describe(account)}; the token is stored in {path}")


@command()
def logout(session: Session) -> None:
    """Forget the token that `shoal login` has kept for a server. The token itself stays valid."""
    store_token(session.url, None)
    session.show(None, f"logged out: no token is stored for {session.url}")


@command()
def whoami(session: Session) -> None:
    """Show who you are to a server: name, role, projects, and what you may do."""
    account = session.client.whoami()
    session.show(account, f"{_describe(account)}\npermissions: {', '.join(account.permissions)}")


@command()
def audit(
    session: Session,
    job: Annotated[str | None, typer.Option("--job", metavar="ID", help="Only what was done to this job.")] = None,
    actor: Annotated[
        str | None, typer.Option("--actor", metavar="NAME", help="Only what this user or token did.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="The newest ones.")] = 50,
) -> None:
    """Show who changed what through the API, and from where. Newest first."""
    session.show(session.client.audit(job_id=job, actor=actor, limit=limit).items, render_audit)


@command()
def create_token(
    session: Session,
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
        bool, typer.Option("--personal", help="For a person, who can make tokens with it. Only admins may set it.")
    ] = False,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="How long it is valid: 12h, 30d, or never.")
    ] = "90d",
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="File for the token, readable by you alone.")
    ] = None,
) -> None:
    """Make a token and print it. It is shown only now: the server keeps its SHA-256.

    If the token in use is not an admin's, the new one may do no more and ends with it.
    """
    valid_s, projects = _parse_duration(expires), tuple(project) if project else None
    if cluster is not None and (projects or user or personal or role is not Role.VIEWER):
        raise CliError("--cluster makes the token of a gateway: leave out --role, --project, --user and --personal")
    try:
        if cluster is not None:
            gateway = ClusterTokenRequest(name=name, expires_in_s=valid_s)
            send = partial(session.client.create_cluster_token, cluster, gateway)
        else:
            account = TokenRequest(
                name=name, role=role, projects=projects, user=user, expires_in_s=valid_s, personal=personal
            )
            send = partial(session.client.create_token, account)
    except ValidationError as error:
        raise CliError(first_problem(error)) from None
    token = send()
    ends_at = token.expires_at
    if ends_at is not None and (valid_s is None or ends_at < token.created_at + valid_s):
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(ends_at))
        session.output.say(f"the token ends at {at}, with the token that made it; --expires {expires} is later")
    if output is not None:
        with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{token.token}\n")
        session.show(token.model_copy(update={"token": ""}), f"token {token.id} is in {output}")
    else:
        session.show(token, token.token)


@command()
def list_tokens(
    session: Session,
    ended: Annotated[bool, typer.Option("--all", help="Also those that are expired or revoked.")] = False,
) -> None:
    """List your tokens: what they may do, when they end and were used last. An admin sees those of all."""
    now = time.time()
    tokens = [token for token in session.client.tokens() if ended or is_valid(token, now)]
    session.show(tokens, render_tokens(tokens, now))


@command()
def revoke_token(
    session: Session,
    token: Annotated[
        str, typer.Argument(metavar="TOKEN", help="Id of the token, or its name if no other token has it.")
    ],
) -> None:
    """Revoke a token at once, with those that it has made. This cannot be undone.

    If it is the one that `shoal login` has kept for the server, it is forgotten too.
    """
    revoked = session.client.revoke_token(_find_token_id(session, token))
    logged_out = "; you are logged out" if forget_token(session.url, revoked.id) else ""
    session.show(revoked, f"token {revoked.id} ({revoked.name}) is revoked{logged_out}")


def _describe(account: Whoami) -> str:
    projects = "all projects" if account.projects is None else f"projects {', '.join(account.projects)}"
    return f"{account.name}, role {account.role}, {projects}"


def _find_token_id(session: Session, reference: str) -> str:
    """Return the id of the token with this id or name; a secret, which begins with its id, names it too."""
    tokens = session.client.tokens()
    token_id = reference.removeprefix("shoal_").partition("_")[0]
    if any(token.id == token_id for token in tokens):
        return token_id
    valid = [token for token in tokens if is_valid(token, time.time())]
    matches = [token for token in valid if token.name == reference]
    matches = matches or [token for token in valid if token.name.partition("/")[2] == reference]  # ada/laptop, by ada
    if len(matches) == 1:
        return matches[0].id
    if matches:
        ids = ", ".join(token.id for token in matches)
        raise CliError(f"several tokens are called {reference}", hint=f"one of {ids}")
    raise CliError(f"no token {reference!r}", hint="`shoal token list` lists the tokens", exit_code=ExitCode.NOT_FOUND)


def _parse_duration(text: str) -> float | None:
    if text == "never":
        return None
    number, unit = text[:-1], text[-1:]
    if unit in _UNITS and number.isascii() and number.isdigit() and int(number) > 0:
        return int(number) * _UNITS[unit]
    raise CliError(f"--expires {text!r} is not a time", hint="use 45m, 12h, 30d, or never")
