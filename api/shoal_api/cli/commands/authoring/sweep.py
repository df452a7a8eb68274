"""`sweep`: submit a job for each combination of a grid, and show and cancel them together.

The jobs carry all that makes them a sweep (`sweep` in their specs, and labels), so the server keeps to the limit and
prunes whether or not this command goes on.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal_api.cli.session import DEFAULT_URL, JsonFlag, Session, UrlOption, command

if TYPE_CHECKING:
    from shoal_api.client import Client
    from shoal_service.overview_views import FleetJob

_PAGE = 200


def sweep(
    what: Annotated[
        str, typer.Argument(metavar="SPEC|show|cancel", help='The spec that the jobs share; or "show" or "cancel".')
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Of the sweep, to show or to cancel; or to give a new one.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid", metavar="KEY.PATH=VALUE,VALUE", help="Values of a key; with several, every combination is a job."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Most jobs of the sweep that have workers at one time."),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option("--prune", metavar="median", help="End jobs that are worse than the median of the others."),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option("--warmup", min=1, metavar="STEPS", help="No job is pruned before.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change the spec of every job.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check each job and show the grid; submit nothing.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job for each combination of a grid: `shoal sweep SPEC --grid optimizer.lr=1e-4,3e-4 --limit 4`.

    `shoal sweep show NAME` lists the jobs, the best first; `shoal sweep cancel NAME` ends those that go on.
    """
    with command(url, as_json) as session:
        if what in ("show", "cancel"):
            _of_name(session, what, name)
            return
        rules = {"limit": limit, "prune": prune, "warmup_steps": warmup}
        documents, labels = documents_of(what, name, grid or [], assignments or [], rules)
        with session.open_client() as client:
            if dry_run:
                found = [client.dry_run(document) for document in documents]
                words = "\n".join((*(_words(one) for one in labels), f"{len(found)} jobs; nothing was submitted"))
                session.output.document(found, lambda: words)
                return
            _submit(session, client, documents, labels)


def documents_of(
    source: str, name: str | None, grid: Sequence[str], assignments: Sequence[str], rules: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The spec of each job, validated, and the labels with its values. Raises CliError, SpecError."""
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.overrides import apply_overrides
    from shoal_api.cli.spec_file import load_spec
    from shoal_service.core.sweeps.grid import InvalidGrid, combinations, labels_of, parse_axis
    from shoal_workers.contract.checks.spec_errors import parse_spec

    if not grid:
        raise CliError("a sweep needs --grid", hint=f"for example: shoal sweep {source} --grid optimizer.lr=1e-4,3e-4")
    try:
        chosen = combinations([parse_axis(one) for one in grid])
    except InvalidGrid as error:
        raise CliError(str(error)) from None
    shared = load_spec(source, assignments)
    stem = str(shared.get("name", "job"))[:50]
    name = name or f"{stem}-{secrets.token_hex(3)}"
    section = {"name": name, **{key: value for key, value in rules.items() if value is not None}}
    documents = []
    for number, values in enumerate(chosen, 1):
        document = apply_overrides(shared, [f"{key}={value}" for key, value in values.items()])
        labels = {**(document.get("labels") or {}), **labels_of(values)}
        documents.append({**document, "name": f"{stem}-{number}", "labels": labels, "sweep": section})
        parse_spec(documents[-1])
    return documents, [labels_of(values) for values in chosen]


def _submit(session: Session, client: Client, documents: list[dict[str, Any]], labels: list[dict[str, str]]) -> None:
    from shoal_api.cli.errors import CliError
    from shoal_api.client import ApiError

    name, jobs = documents[0]["sweep"]["name"], []
    for number, document in enumerate(documents):
        try:
            jobs.append(client.submit(document, idempotency_key=f"sweep/{name}/{number}"))
        except ApiError as error:
            if not jobs:
                raise
            raise CliError(
                f"{len(jobs)} of {len(documents)} jobs of sweep {name} were submitted, then one was refused: {error}",
                hint=f"repeat the command with the name {name} after the spec: it submits those that are missing",
            ) from None
    lines = [f"{job.id}  {job.name}  {_words(values)}" for job, values in zip(jobs, labels, strict=True)]
    lines += [f"shoal sweep show {name}", f"shoal sweep cancel {name}"]
    session.output.document({"sweep": name, "jobs": [job.id for job in jobs]}, lambda: "\n".join(lines))


def _of_name(session: Session, what: str, name: str | None) -> None:
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode
    from shoal_api.cli.render.tables import sweep_table

    if name is None:
        raise CliError(f"which sweep? shoal sweep {what} NAME", hint="`shoal jobs --label sweep` lists the jobs of all")
    with session.open_client() as client:
        jobs = _jobs_of(client, name)
        if not jobs:
            hint = "`shoal jobs --label sweep` lists the jobs of all"
            raise CliError(f"there is no sweep {name!r}", exit_code=ExitCode.NOT_FOUND, hint=hint)
        if what == "show":
            best_first = sorted(jobs, key=_rank)
            session.output.document(best_first, lambda: sweep_table(best_first))
            return
        going_on = [job for job in jobs if not job.state.ended]
        for job in going_on:
            client.cancel(job.id)
        ended = {"cancelled": [job.id for job in going_on]}
        session.output.document(ended, lambda: f"cancelled {len(going_on)} of {len(jobs)} jobs; the others had ended")


def _jobs_of(client: Client, name: str) -> list[FleetJob]:
    jobs: list[FleetJob] = []
    while True:
        page = client.overview_of_all(label=f"sweep={name}", offset=len(jobs), limit=_PAGE)
        jobs += page.items
        if len(page.items) < _PAGE:
            return jobs


def _rank(job: FleetJob) -> tuple[bool, float]:
    """By validation loss, where there is one; then by loss; then those that have neither."""
    loss = job.val_loss if job.val_loss is not None else job.loss
    return loss is None, loss if loss is not None else 0.0


def _words(labels: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in labels.items())
