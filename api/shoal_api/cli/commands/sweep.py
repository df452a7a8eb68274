"""`shoal sweep`: starts a job for each combination of a grid or each draw, shows the jobs, and stops them.

The server makes the jobs of a sweep, all or none, keeps to the limit and prunes, whether or not the command goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from shoal_api.cli.render.jobs import render_sweep
from shoal_api.cli.session import CliError, ExitCode, Session, YesFlag, command, keep_given, refuse_with
from shoal_api.cli.spec_file import load_spec
from shoal_service.control.submission import expand_jobs, expand_specs, fill_name
from shoal_service.core.quantities import count_text
from shoal_service.core.sweeps import InvalidGrid, describe_labels, label_names, parse_axis, parse_interval
from shoal_service.views import SweepRequest


@command()
def sweep(
    session: Session,
    message: Annotated[
        list[str],
        typer.Argument(
            metavar="[start] SPEC [NAME] | show NAME | stop NAME",
            help="The spec that the jobs share, and a name for the sweep; or the name of the one to show or to stop.",
        ),
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid", metavar="KEY.PATH=VALUE,VALUE", help="Values of a key; with several, every combination is a job."
        ),
    ] = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="KEY.PATH=LOW:HIGH[:log]",
            help="Numbers of a key that are drawn at random; whole ones if both ends are. Needs --samples.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, metavar="N", help="Jobs, each with values drawn from the ranges and grids."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the random values; default: 0.")] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Most jobs of the sweep that have workers at one time."),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            "--prune",
            metavar="median|halving",
            help="End jobs that are worse than the median of the others, or not among the best 1/reduction at a rung.",
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup", min=1, metavar="STEPS", help="First step at which jobs are pruned; with halving the first rung."
        ),
    ] = None,
    reduction: Annotated[
        int | None, typer.Option("--reduction", min=2, help="With halving: one job in N passes a rung.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change the spec of every job.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check each job and show the values; submit nothing.")
    ] = False,
    project: Annotated[
        str | None,
        typer.Option(
            "--project", help="Project of the jobs; or of the sweep to show or to stop, if several have this name."
        ),
    ] = None,
    yes: YesFlag = False,
) -> None:
    """Submit a job for each combination of a grid: `shoal sweep start SPEC --grid optimizer.lr=1e-4,3e-4 --limit 4`; or
    for each of some draws: `shoal sweep start SPEC --range optimizer.lr=1e-5:1e-2:log --samples 20 --prune halving`.

    `shoal sweep show NAME` lists the jobs, the best first; `shoal sweep stop NAME` (or `cancel`) ends those that go on.
    """
    if message[0] in ("show", "stop", "cancel"):
        if len(message) > 2:
            raise CliError(f"sweep {message[0]} takes one name, not {' '.join(message[1:])}", hint="shoal sweep --help")
        refuse_with(
            f"sweep {message[0]}",
            grid=grid,
            range=ranges,
            samples=samples,
            seed=seed is not None,
            limit=limit,
            prune=prune,
            warmup=warmup,
            reduction=reduction,
            set=assignments,
            dry_run=dry_run,
        )
        _show_or_stop(session, message[0], message[1] if len(message) > 1 else None, project, yes=yes)
        return
    refuse_with("sweep start", yes=yes)
    spec_and_name = message[1:] if message[0] == "start" else message
    if not 1 <= len(spec_and_name) <= 2:
        hint = "shoal sweep start SPEC [NAME] --grid optimizer.lr=1e-4,3e-4"
        raise CliError("sweep start needs a spec, and takes an optional name of the sweep", hint=hint)
    source, *names = spec_and_name
    rules = {"limit": limit, "prune": prune, "warmup_steps": warmup, "reduction": reduction, "samples": samples}
    document = parse_values(source, grid or [], ranges or []) | rules | keep_given(seed=seed)
    changes = [*(assignments or []), *([f"project={project}"] if project is not None else [])]
    request = make_request(source, names[0] if names else None, changes, document)
    if dry_run:
        _try_sweep(session, request)
    else:
        _submit_sweep(session, request)


def parse_values(source: str, grid: Sequence[str], ranges: Sequence[str]) -> dict[str, Any]:
    """Return `grid` and `ranges` of the request from the options. Raises CliError."""
    if not grid and not ranges:
        hint = f"for example: shoal sweep start {source} --grid optimizer.lr=1e-4,3e-4"
        raise CliError("a sweep needs --grid, or --range and --samples", hint=hint)
    axes: dict[str, tuple[str, ...]] = {}
    drawn: dict[str, dict[str, Any]] = {}
    try:
        for text in grid:
            key, values = parse_axis(text)
            if key in axes:
                raise CliError(f"--grid names {key} twice", hint="give all of its values in one --grid")
            axes[key] = values
        for text in ranges:
            key, interval = parse_interval(text)
            if key in axes or key in drawn:
                raise CliError(f"--range names {key}, which has values already", hint="leave one of the two out")
            scale = "log" if interval.is_log else "linear"
            drawn[key] = {"low": interval.low, "high": interval.high, "scale": scale, "whole": interval.is_whole}
    except InvalidGrid as error:
        raise CliError(str(error)) from None
    return {"grid": axes, "ranges": drawn}


def make_request(source: str, name: str | None, assignments: Sequence[str], values: dict[str, Any]) -> SweepRequest:
    """Build the request of a sweep from the options. Raises CliError."""
    document = load_spec(source, assignments)
    try:
        return SweepRequest.model_validate({"name": name, "spec": document, **values})
    except ValidationError as error:
        [first, *_] = error.errors()
        if not first["loc"]:
            raise CliError(first["msg"].removeprefix("Value error, "), hint="shoal sweep --help") from None
        place = str(first["loc"][0])
        option = {"name": "NAME", "warmup_steps": "--warmup"}.get(place, f"--{place}")
        raise CliError(f"{option} {first['input']!r}: {first['msg']}", hint="shoal sweep --help") from None


def _try_sweep(session: Session, request: SweepRequest) -> None:
    named = fill_name(request)
    try:
        expand_specs(named)
        jobs = expand_jobs(named)
    except InvalidGrid as error:
        raise CliError(str(error)) from None
    results = [session.client.dry_run(job.document) for job in jobs]
    lines = [describe_labels(job.labels) for job in jobs]
    session.show(results, "\n".join([*lines, f"{count_text(len(results), 'job')}; nothing was submitted"]))


def _submit_sweep(session: Session, request: SweepRequest) -> None:
    view = session.client.submit_sweep(request)
    names = label_names([*request.grid, *request.ranges]).values()
    lines = []
    for job in view.jobs:
        labels = {name: job.labels.get(name, "-") for name in names}
        lines.append(f"{job.id}  {job.name}  {describe_labels(labels)}")
    lines += [f"shoal sweep show {view.name}", f"shoal sweep stop {view.name}"]
    session.show({"sweep": view.name, "jobs": [job.id for job in view.jobs]}, "\n".join(lines))


def _show_or_stop(session: Session, verb: str, name: str | None, project: str | None, *, yes: bool) -> None:
    if name is None:
        raise CliError(
            f"sweep {verb} needs the name of a sweep: shoal sweep {verb} NAME",
            hint="`shoal jobs --label sweep` lists the jobs of all",
        )
    sweeps = session.client.sweeps(name=name, project=project).items
    if not sweeps:
        hint = "`shoal jobs --label sweep` lists the jobs of all"
        raise CliError(f"there is no sweep {name!r}", exit_code=ExitCode.NOT_FOUND, hint=hint)
    if len(sweeps) > 1:
        projects = ", ".join(sorted(sweep.project for sweep in sweeps))
        raise CliError(f"the projects {projects} have a sweep {name!r}", hint="choose one with --project")
    [sweep] = sweeps
    if verb == "show":
        session.show(session.client.sweep(sweep.project, name).jobs, render_sweep)
        return
    if not yes and not session.output.as_json and sys.stdin.isatty():
        session.confirm(f"Cancel the jobs of the sweep {name} that have not ended?")
    result = session.client.cancel_sweep(sweep.project, name)
    cancelled = [job.id for job in result.jobs]
    rest = "" if len(cancelled) == result.num_jobs else "; the others had ended"
    total = count_text(result.num_jobs, "job")
    session.show({"cancelled": cancelled}, f"cancelled {len(cancelled)} of {total}{rest}")
