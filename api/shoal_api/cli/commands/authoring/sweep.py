"""`sweep`: submit a job for each combination of a grid, and show and cancel them together.

The server makes the jobs of the grid, all or none, keeps to the limit and prunes, whether or not this command goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal_api.cli.session import DEFAULT_URL, JsonFlag, Session, UrlOption, command
from shoal_service.core.quantities import count_text

if TYPE_CHECKING:
    from shoal_api.client import Client
    from shoal_service.views import SweepRequest


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
    project: Annotated[
        str | None, typer.Option("--project", help="Of the sweep to show or to cancel, if several have this name.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job for each combination of a grid: `shoal sweep SPEC --grid optimizer.lr=1e-4,3e-4 --limit 4`.

    `shoal sweep show NAME` lists the jobs, the best first; `shoal sweep cancel NAME` ends those that go on.
    """
    with command(url, as_json) as session:
        if what in ("show", "cancel"):
            _of_name(session, what, name, project)
            return
        rules = {"limit": limit, "prune": prune, "warmup_steps": warmup}
        request = request_of(what, name, grid or [], assignments or [], rules)
        with session.open_client() as client:
            if dry_run:
                _try(session, client, request)
            else:
                _submit(session, client, request)


def request_of(
    source: str, name: str | None, grid: Sequence[str], assignments: Sequence[str], rules: dict[str, Any]
) -> SweepRequest:
    """Raises CliError."""
    from pydantic import ValidationError

    from shoal_api.cli.errors import CliError
    from shoal_api.cli.spec_file import load_spec
    from shoal_service.core.sweeps import InvalidGrid, parse_axis
    from shoal_service.views import SweepRequest

    if not grid:
        raise CliError("a sweep needs --grid", hint=f"for example: shoal sweep {source} --grid optimizer.lr=1e-4,3e-4")
    axes: dict[str, tuple[str, ...]] = {}
    for text in grid:
        try:
            key, values = parse_axis(text)
        except InvalidGrid as error:
            raise CliError(str(error)) from None
        if key in axes:
            raise CliError(f"--grid names {key} twice", hint="give all of its values in one --grid")
        axes[key] = values
    document = load_spec(source, assignments)
    try:
        return SweepRequest.model_validate({"name": name, "spec": document, "grid": axes, **rules})
    except ValidationError as error:
        [first, *_] = error.errors()
        place = str(first["loc"][0])
        option = {"name": "NAME", "warmup_steps": "--warmup"}.get(place, f"--{place}")
        raise CliError(f"{option} {first['input']!r}: {first['msg']}", hint="shoal sweep --help") from None


def _try(session: Session, client: Client, request: SweepRequest) -> None:
    from shoal_api.cli.errors import CliError
    from shoal_service.control.sweeps import members, specs_of, with_name
    from shoal_service.core.sweeps import InvalidGrid, words

    named = with_name(request)
    try:
        specs_of(named)
        jobs = members(named)
    except InvalidGrid as error:
        raise CliError(str(error)) from None
    found = [client.dry_run(job.document) for job in jobs]
    lines = [*(words(job.labels) for job in jobs), f"{count_text(len(found), 'job')}; nothing was submitted"]
    session.output.document(found, lambda: "\n".join(lines))


def _submit(session: Session, client: Client, request: SweepRequest) -> None:
    from shoal_service.core.sweeps import label_names, words

    view = client.submit_sweep(request)
    names = list(label_names(list(request.grid)).values())
    lines = [f"{job.id}  {job.name}  {words({name: job.labels.get(name, '-') for name in names})}" for job in view.jobs]
    lines += [f"shoal sweep show {view.name}", f"shoal sweep cancel {view.name}"]
    session.output.document({"sweep": view.name, "jobs": [job.id for job in view.jobs]}, lambda: "\n".join(lines))


def _of_name(session: Session, what: str, name: str | None, project: str | None) -> None:
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode
    from shoal_api.cli.render.tables import sweep_table

    if name is None:
        raise CliError(f"which sweep? shoal sweep {what} NAME", hint="`shoal jobs --label sweep` lists the jobs of all")
    with session.open_client() as client:
        found = client.sweeps(name=name, project=project).items
        if not found:
            hint = "`shoal jobs --label sweep` lists the jobs of all"
            raise CliError(f"there is no sweep {name!r}", exit_code=ExitCode.NOT_FOUND, hint=hint)
        if len(found) > 1:
            projects = ", ".join(sorted(one.project for one in found))
            raise CliError(f"the projects {projects} have a sweep {name!r}", hint="choose one with --project")
        [sweep] = found
        if what == "show":
            view = client.sweep(sweep.project, name)
            session.output.document(view.jobs, lambda: sweep_table(view.jobs))
            return
        ended = client.cancel_sweep(sweep.project, name)
    number = len(ended.jobs)
    session.output.document(
        {"cancelled": [job.id for job in ended.jobs]},
        lambda: f"cancelled {number} of {count_text(ended.num_jobs, 'job')}; the others had ended",
    )
