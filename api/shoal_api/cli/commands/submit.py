"""Commands that start jobs: `submit` one job, of a spec or of a script without one, `sweep` one for each combination of
a grid or each draw; and `watch`, which follows one.

The server makes the jobs of a sweep, all or none, keeps to the limit and prunes, whether or not the command goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from shoal_api.cli.commands.several import YesFlag
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.session import (
    DEFAULT_URL,
    JobArgument,
    JsonFlag,
    Session,
    UrlOption,
    command,
    exit_code_of,
)
from shoal_service.core.quantities import count_text

if TYPE_CHECKING:
    from shoal_api.cli.program import Program
    from shoal_api.client import Client
    from shoal_service.control.code_archive import CodeArchive
    from shoal_service.views import JobView, SweepRequest


def submit(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC|SCRIPT",
            help='A job spec ("-": standard input), or a script, with its arguments after --. Also a whole command '
            "line after --: python, torchrun, accelerate launch or deepspeed.",
        ),
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", "-m", metavar="MODULE", help="Run this module, as python -m does.")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers", "-w", metavar="N|MIN:MAX", help="Workers, one process each; with MIN:MAX the job is elastic."
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, max=1, help="GPUs of each worker.")] = None,
    cpus: Annotated[float | None, typer.Option("--cpus", min=0, help="CPU cores of each worker.")] = None,
    standby: Annotated[int | None, typer.Option("--standby", min=0, help="Warm spare workers.")] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            metavar="torchrun|accelerate|deepspeed_env|python|ray_train",
            help="Whose environment the processes of a script get.",
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option("--grace", metavar="SECONDS", min=0, help="Time of a script from SIGTERM to SIGKILL."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show progress until the job ends.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show layouts and expected start; submit nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait without output until the job ends.")] = False,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change the spec; may be repeated.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the job; replaces the one in the spec.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", min=-1000, max=1000, help="Higher gets workers first.")
    ] = None,
    project: Annotated[
        str | None, typer.Option("--project", help="Project whose quota the job counts against.")
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", help="Whose job it is; without it the spec's, or your login name.")
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="JOB[@STEP]",
            help="Go on from a checkpoint of this job, the newest one without a step; a script from its files.",
        ),
    ] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="JOB", help="Instead of SPEC: the spec and the code of this job.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job: `shoal submit job.yaml`, or a script without a spec: `shoal submit train.py --workers 2:8 -- --lr
    3e-4`, `shoal submit -m package.train`, `shoal submit -- torchrun --nproc-per-node 2 train.py`; or another job with
    a change: `shoal submit --like JOB --set optimizer.lr=1e-4`.

    With --follow or --wait the exit code is that of the job: 0 succeeded, 1 failed or cancelled.
    """
    with command(url, as_json) as session:
        from shoal_api.cli.program import workers_of
        from shoal_api.cli.render.queue import dry_run_page

        least, most = workers_of("--workers", workers) if workers is not None else (None, None)
        options: dict[str, Any] = {"name": name, "priority": priority, "project": project, "user": user}
        options |= {"elasticity.min_workers": least, "elasticity.max_workers": most, "elasticity.standby": standby}
        options |= {"worker.gpus": gpus, "worker.cpus": cpus}
        options |= {"script.launcher": launcher, "script.grace_s": grace}
        with session.open_client() as client:
            spec = None if like is None else _spec_like(session, client, like, has_program=bool(words or module))
            document = _document(session, words or (), module, assignments or (), options, spec)
            if from_ is not None:
                document["continue_from"] = _origin(session, client, from_)
            if dry_run:
                found = client.dry_run(document, on_packed=_reporting(session, document))
                session.output.document(found, lambda: dry_run_page(found, time.time()))
                return
            job = client.submit(document, on_packed=_reporting(session, document))
        output = session.output
        if not follow and not wait:
            note = f"{job.status.note}\n" if job.status.note else ""
            output.document(job, lambda: f"{job.id}  {job.name}  {job.status.state}\n{note}shoal watch {job.id}")
            return
        output.say(f"submitted {job.id} ({job.name})", "dim")
        ended = _follow(session, job.id) if follow else _wait(session, job.id)
        _finish(session, ended, one_line=follow)


def _spec_like(session: Session, client: Client, reference: str, *, has_program: bool) -> dict[str, Any]:
    """Return the spec of a job for a new one. The deadline and the user are those of the first job only."""
    from shoal_api.cli.errors import CliError

    if has_program:
        raise CliError("submit takes a SPEC, a SCRIPT or --like JOB, and was given two of them", hint="leave one out")
    spec = client.job(session.job_id(client, reference)).spec
    document = spec.model_dump(mode="json", exclude_defaults=True, exclude={"finish_by", "user"})
    if spec.continue_from is not None:
        document["continue_from"] = spec.continue_from.model_dump(include={"job", "step"}, exclude_none=True)
    return document


def _document(
    session: Session,
    words: Sequence[str],
    module: str | None,
    assignments: Sequence[str],
    options: dict[str, Any],
    spec: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the valid spec that the command line names or stands for. `spec`: that of `--like`. Raises CliError,
    SpecError."""
    from shoal_api.cli.doors import is_loop, refuse_function_as_task
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.program import code_directory, read_program, spec_of
    from shoal_api.cli.spec_file import apply_overrides, completed, load_spec
    from shoal_workers.contract.checks.spec_errors import parse_spec

    program = None if spec is not None else read_program(words, module)
    if program is None:
        document = load_spec(words[0], assignments) if spec is None else apply_overrides(spec, assignments)
        if "script" not in document and any(options[key] is not None for key in ("script.launcher", "script.grace_s")):
            raise CliError(
                f"{words[0] if words else 'the job'} has no script, so --launcher and --grace change nothing",
                hint="leave them out",
            )
        document = completed(document, (), options)
    else:
        if program.config_file is not None:
            session.output.say(f"read {program.config_file}", "dim")
        if program.not_needed:
            left_out = ", ".join(program.not_needed)
            session.output.say(f"left out, because Shoal brings the processes together itself: {left_out}", "warn")
        in_place = program.file is not None and is_loop(program.file, code_directory(program))
        if not in_place:
            program, said = _as_ray_train(session, program, options)
        document = spec_of(program, options["elasticity.max_workers"], in_place=in_place)
        if not in_place:
            document |= said
        if "loop" in document and any(options[key] is not None for key in ("script.launcher", "script.grace_s")):
            raise CliError(
                f"{program.file} gives its loop to shoal.run, and Shoal runs it in place: --launcher and --grace are "
                "for scripts",
                hint="leave them out",
            )
        document = completed(document, assignments, options)
    parse_spec(document)
    refuse_function_as_task(document)
    return document


def _as_ray_train(
    session: Session, program: Program, options: dict[str, Any]
) -> tuple[Program, dict[str, dict[str, Any]]]:
    """Return the program, with its launcher and workers if it is a script of Ray Train, and the sections of the spec
    that its trainer says. What options say has precedence."""
    from dataclasses import replace

    from shoal_api.cli.doors import ray_train_of
    from shoal_api.cli.program import code_directory
    from shoal_workers.contract.user_code import Launcher

    own = program.launcher in (Launcher.TORCHRUN, Launcher.PYTHON) and program.workers is None
    if not own or program.file is None or options["script.launcher"] not in (None, Launcher.RAY_TRAIN.value):
        return program, {}
    found = ray_train_of(program.file, code_directory(program))
    if found is None:
        return program, {}
    said: dict[str, dict[str, Any]] = {}
    words = []
    if found.workers is not None and options["elasticity.max_workers"] is None:
        least, most = found.workers
        words.append(f"--workers {least if least == most else f'{least}:{most}'}")
    elif found.workers is not None:
        session.output.say(f"{program.file}: --workers has precedence over ScalingConfig(num_workers=...)", "warn")
    for option, section, key, value in (
        ("--gpus", "worker", "gpus", found.gpus),
        ("--cpus", "worker", "cpus", found.cpus),
        ("--set retry.max_failures", "retry", "max_failures", found.max_failures),
    ):
        if value and options.get(f"{section}.{key}") is None:
            said.setdefault(section, {})[key] = value
            words.append(f"{option} {value:g}")
    as_it_says = f", with {' '.join(words)} as it says" if words else ""
    session.output.say(f"{program.file} has a TorchTrainer of Ray Train: --launcher ray_train{as_it_says}", "dim")
    return replace(program, launcher=Launcher.RAY_TRAIN, workers=found.workers), said


def _reporting(session: Session, document: dict[str, Any]) -> Callable[[CodeArchive], None]:
    """Return what says to people how much of the code directory is sent."""
    directory = document.get("code", {}).get("working_dir")
    return lambda archive: session.output.say(f"code: {directory}, {archive.words}", "dim")


class ScriptCommand(TyperCommand):
    """A command whose options end where those of a script begin: an option that is not known was probably meant for the
    script, so the error says where those go."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # the parser consumes it
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", None)
            has_script = any(word.endswith(".py") or word in ("-m", "--module") for word in given)
            if option is not None and has_script and hasattr(error, "message"):
                error.message += f". Arguments of the script come after --: shoal submit train.py -- {option}"
            raise


def watch(job: JobArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Follow a job from its first event until it ends. Ctrl-C detaches; the job continues."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            job_id = session.job_id(client, job)
        _finish(session, _follow(session, job_id), one_line=True)


def _follow(session: Session, job_id: str) -> JobView:
    from shoal_api.cli.follow import follow_job
    from shoal_api.cli.render.progress import screen_for

    try:
        return follow_job(session.open_client, job_id, screen_for(session.output))
    except KeyboardInterrupt:
        _detached(session, job_id)
        raise


def _wait(session: Session, job_id: str) -> JobView:
    try:
        with session.open_client() as client:
            return client.wait(job_id)
    except KeyboardInterrupt:
        _detached(session, job_id)
        raise


def _detached(session: Session, job_id: str) -> None:
    option = "" if session.url == DEFAULT_URL else f" --url {session.url}"
    session.output.say(
        f"\ndetached; the job continues. Follow it again: shoal watch {job_id}{option}\n"
        f"End it: shoal cancel {job_id}{option}",
        "warn",
    )


def _finish(session: Session, job: JobView, *, one_line: bool) -> None:
    from shoal_api.cli.render.jobs import job_page

    if session.output.as_json and one_line:
        session.output.line(job, "")
    elif session.output.as_json:
        session.output.document(job, str)
    else:
        with session.open_client() as client:
            series = client.series(job.id)
        session.output.document(job, lambda: job_page(job, series, time.time()))
    code = exit_code_of(job.status.state)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


def _origin(session: Session, client: Client, text: str) -> dict[str, object]:
    """Return `continue_from` of a spec for JOB or JOB@STEP. The names of jobs have no @."""
    from shoal_api.cli.errors import CliError

    reference, at, step = text.partition("@")
    if at and not (step.isascii() and step.isdigit() and int(step) > 0):
        hint = "for example: --from my-job@120; without @ the newest checkpoint is taken"
        raise CliError(f"--from {text!r}: {step!r} is not a step", hint=hint)
    job_id = session.job_id(client, reference)
    return {"job": job_id, **({"step": int(step)} if at else {})}


def sweep(
    words: Annotated[
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
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of the draws; 0 without it.")] = None,
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
        int | None, typer.Option("--warmup", min=1, metavar="STEPS", help="No job is pruned before; the first rung.")
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
        typer.Option("--project", help="Of the jobs; or of the sweep to show or to stop, if several have this name."),
    ] = None,
    yes: YesFlag = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job for each combination of a grid: `shoal sweep start SPEC --grid optimizer.lr=1e-4,3e-4 --limit 4`; or
    for each of some draws: `shoal sweep start SPEC --range optimizer.lr=1e-5:1e-2:log --samples 20 --prune halving`.

    `shoal sweep show NAME` lists the jobs, the best first; `shoal sweep stop NAME` (or `cancel`) ends those that go on.
    """
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError

        if words[0] in ("show", "stop", "cancel"):
            if len(words) > 2:
                raise CliError(f"sweep {words[0]} takes one name, not {' '.join(words[1:])}", hint="shoal sweep --help")
            only_start: dict[str, object] = {"--grid": grid, "--range": ranges, "--samples": samples, "--seed": seed}
            only_start |= {"--limit": limit, "--prune": prune, "--warmup": warmup, "--reduction": reduction}
            only_start |= {"--set": assignments, "--dry-run": dry_run or None}
            for option, value in only_start.items():
                if value is not None:
                    raise CliError(f"sweep {words[0]} takes no {option}", hint="shoal sweep --help")
            _of_name(session, words[0], words[1] if len(words) > 1 else None, project, yes=yes)
            return
        if yes:
            raise CliError("sweep start takes no --yes: it asks nothing", hint="shoal sweep --help")
        given = words[1:] if words[0] == "start" else words
        if not 1 <= len(given) <= 2:
            hint = "shoal sweep start SPEC [NAME] --grid optimizer.lr=1e-4,3e-4"
            raise CliError("sweep start takes a spec, and a name of the sweep if you like", hint=hint)
        rules = {"limit": limit, "prune": prune, "warmup_steps": warmup, "reduction": reduction, "samples": samples}
        document = values_of(given[0], grid or [], ranges or []) | rules | ({} if seed is None else {"seed": seed})
        changes = [*(assignments or []), *([f"project={project}"] if project is not None else [])]
        request = request_of(given[0], given[1] if len(given) > 1 else None, changes, document)
        with session.open_client() as client:
            if dry_run:
                _try_sweep(session, client, request)
            else:
                _submit_sweep(session, client, request)


def values_of(source: str, grid: Sequence[str], ranges: Sequence[str]) -> dict[str, Any]:
    """Return `grid` and `ranges` of the request from the options. Raises CliError."""
    from shoal_api.cli.errors import CliError
    from shoal_service.core.sweeps import InvalidGrid, parse_axis, parse_interval

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
            key, one = parse_interval(text)
            if key in axes or key in drawn:
                raise CliError(f"--range names {key}, which has values already", hint="leave one of the two out")
            scale = "log" if one.is_log else "linear"
            drawn[key] = {"low": one.low, "high": one.high, "scale": scale, "whole": one.is_whole}
    except InvalidGrid as error:
        raise CliError(str(error)) from None
    return {"grid": axes, "ranges": drawn}


def request_of(source: str, name: str | None, assignments: Sequence[str], values: dict[str, Any]) -> SweepRequest:
    """Build the request of a sweep from the options. Raises CliError."""
    from pydantic import ValidationError

    from shoal_api.cli.errors import CliError
    from shoal_api.cli.spec_file import load_spec
    from shoal_service.views import SweepRequest

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


def _try_sweep(session: Session, client: Client, request: SweepRequest) -> None:
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


def _submit_sweep(session: Session, client: Client, request: SweepRequest) -> None:
    from shoal_service.core.sweeps import label_names, words

    view = client.submit_sweep(request)
    names = list(label_names([*request.grid, *request.ranges]).values())
    lines = [f"{job.id}  {job.name}  {words({name: job.labels.get(name, '-') for name in names})}" for job in view.jobs]
    lines += [f"shoal sweep show {view.name}", f"shoal sweep stop {view.name}"]
    session.output.document({"sweep": view.name, "jobs": [job.id for job in view.jobs]}, lambda: "\n".join(lines))


def _of_name(session: Session, what: str, name: str | None, project: str | None, *, yes: bool) -> None:
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode
    from shoal_api.cli.render.jobs import sweep_table

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
        if not yes and not session.output.as_json and sys.stdin.isatty():
            typer.confirm(f"Cancel the jobs of the sweep {name} that have not ended?", abort=True, err=True)
        ended = client.cancel_sweep(sweep.project, name)
    number = len(ended.jobs)
    session.output.document(
        {"cancelled": [job.id for job in ended.jobs]},
        lambda: f"cancelled {number} of {count_text(ended.num_jobs, 'job')}; the others had ended",
    )
