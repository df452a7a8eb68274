"""`submit` starts a job, of a spec or of a script without one; `watch` follows one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from shoal_api.cli.follow import follow_job
from shoal_api.cli.program import Program, code_directory, make_spec, parse_workers, read_program
from shoal_api.cli.program_findings import is_loop, read_ray_train, refuse_function_as_task
from shoal_api.cli.render.jobs import job_line, render_dry_run, render_job
from shoal_api.cli.render.progress import screen_for
from shoal_api.cli.session import (
    DEFAULT_URL,
    CliError,
    ExitCode,
    JobArgument,
    Session,
    SetOption,
    command,
    keep_given,
    refuse_with,
)
from shoal_api.cli.spec_file import apply_overrides, complete, load_spec
from shoal_service.control.code_archive import CodeArchive
from shoal_service.views import SweepRequest
from shoal_workers.contract import JobState, Launcher
from shoal_workers.contract.checks.spec_errors import parse_spec


@command()
def submit(
    session: Session,
    message: Annotated[
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
            help="Launcher whose environment variables the processes of a script get.",
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
    assignments: SetOption = None,
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
) -> None:
    """Submit a job: `shoal submit job.yaml`, or a script without a spec: `shoal submit train.py --workers 2:8 -- --lr
    3e-4`, `shoal submit -m package.train`, `shoal submit -- torchrun --nproc-per-node 2 train.py`; or another job with
    a change: `shoal submit --like JOB --set optimizer.lr=1e-4`.

    With --follow or --wait the exit code is that of the job: 0 succeeded, 1 failed or cancelled.
    """
    least, most = parse_workers("--workers", workers) if workers is not None else (None, None)
    options: dict[str, Any] = {
        "name": name,
        "priority": priority,
        "project": project,
        "user": user,
        "elasticity.min_workers": least,
        "elasticity.max_workers": most,
        "elasticity.standby": standby,
        "worker.gpus": gpus,
        "worker.cpus": cpus,
        "script.launcher": launcher,
        "script.grace_s": grace,
    }
    spec = None if like is None else _copy_spec(session, like, has_program=bool(message or module))
    document = _make_document(session, message or (), module, assignments or (), options, spec)
    if from_ is not None:
        job_id, step = session.job_and_step(from_, "--from")
        document["continue_from"] = keep_given(job=job_id, step=step)
    if dry_run:
        refuse_with("--dry-run", follow=follow, wait=wait)
        result = session.client.dry_run(document, on_packed=_size_reporter(session, document))
        session.show(result, lambda result: render_dry_run(result, time.time()))
        return
    islands = document.get("islands")
    if isinstance(islands, dict) and islands.get("num") and islands.get("index") is None:
        refuse_with("islands", follow=follow, wait=wait)
        _submit_islands(session, document, islands["num"])
        return
    job = session.client.submit(document, on_packed=_size_reporter(session, document))
    if not follow and not wait:
        note = f"{job.status.note}\n" if job.status.note else ""
        session.show(job, f"{job_line(job)}\n{note}shoal watch {job.id}")
        return
    session.output.say(f"submitted {job.id} ({job.name})", "dim")
    _show_until_end(session, job.id, follow=follow)


def _submit_islands(session: Session, document: dict[str, Any], num: int) -> None:
    """Submit a job for each island, all or none."""
    request = SweepRequest(spec=document, grid={"islands.index": tuple(range(num))})
    view = session.client.submit_sweep(request)
    lines = [f"{job.id}  {job.name}" for job in view.jobs]
    lines += [f"shoal rounds {view.jobs[0].id}", f"shoal sweep stop {view.name}"]
    session.show({"sweep": view.name, "jobs": [job.id for job in view.jobs]}, "\n".join(lines))


def _copy_spec(session: Session, reference: str, *, has_program: bool) -> dict[str, Any]:
    """Return the spec of a job for a new one. The deadline and the user are those of the first job only."""
    if has_program:
        raise CliError("submit takes a SPEC, a SCRIPT or --like JOB, and was given two of them", hint="leave one out")
    spec = session.client.job(session.job_id(reference)).spec
    document = spec.model_dump(mode="json", exclude_defaults=True, exclude={"finish_by", "user"})
    if spec.continue_from is not None:
        document["continue_from"] = spec.continue_from.model_dump(include={"job", "step"}, exclude_none=True)
    return document


def _make_document(
    session: Session,
    message: Sequence[str],
    module: str | None,
    assignments: Sequence[str],
    options: dict[str, Any],
    spec: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the valid spec that the command line names or stands for. `spec` is the one of `--like`. Raises CliError,
    SpecError."""
    has_script_options = any(options[key] is not None for key in ("script.launcher", "script.grace_s"))
    program = None if spec is not None else read_program(message, module)
    if program is None:
        document = load_spec(message[0], assignments) if spec is None else apply_overrides(spec, assignments)
        if "script" not in document and has_script_options:
            raise CliError(
                f"{message[0] if message else 'the job'} has no script, so --launcher and --grace would change nothing",
                hint="leave them out",
            )
        document = complete(document, (), options)
    else:
        if program.config_file is not None:
            session.output.say(f"read {program.config_file}", "dim")
        if program.not_needed:
            left_out = ", ".join(program.not_needed)
            session.output.say(f"ignored, because Shoal connects the processes: {left_out}", "warn")
        in_place = program.file is not None and is_loop(program.file, code_directory(program))
        sections: dict[str, Any] = {}
        if not in_place:
            program, sections = _read_ray_train(session, program, options)
        document = make_spec(program, options["elasticity.max_workers"], in_place=in_place) | sections
        if in_place and has_script_options:
            raise CliError(
                f"{program.file} calls shoal.run, so it is a loop: --launcher and --grace are for scripts only",
                hint="leave them out",
            )
        document = complete(document, assignments, options)
    parse_spec(document)
    refuse_function_as_task(document)
    return document


def _read_ray_train(
    session: Session, program: Program, options: dict[str, Any]
) -> tuple[Program, dict[str, dict[str, Any]]]:
    """Return the program, with its launcher and workers if it is a script of Ray Train, and the sections of the spec
    that its trainer says. Options of the command have precedence."""
    may_be = program.launcher in (Launcher.TORCHRUN, Launcher.PYTHON) and program.workers is None
    if not may_be or program.file is None or options["script.launcher"] not in (None, Launcher.RAY_TRAIN.value):
        return program, {}
    trainer = read_ray_train(program.file, code_directory(program))
    if trainer is None:
        return program, {}
    sections: dict[str, dict[str, Any]] = {}
    flags = []
    if trainer.workers is not None and options["elasticity.max_workers"] is None:
        least, most = trainer.workers
        flags.append(f"--workers {least if least == most else f'{least}:{most}'}")
    elif trainer.workers is not None:
        session.output.say(f"{program.file}: --workers has precedence over ScalingConfig(num_workers=...)", "warn")
    for option, section, key, value in (
        ("--gpus", "worker", "gpus", trainer.gpus),
        ("--cpus", "worker", "cpus", trainer.cpus),
        ("--set retry.max_failures", "retry", "max_failures", trainer.max_failures),
    ):
        if value and options.get(f"{section}.{key}") is None:
            sections.setdefault(section, {})[key] = value
            flags.append(f"{option} {value:g}")
    as_it_says = f", with {' '.join(flags)} as it says" if flags else ""
    session.output.say(f"{program.file} has a TorchTrainer of Ray Train: --launcher ray_train{as_it_says}", "dim")
    return replace(program, launcher=Launcher.RAY_TRAIN, workers=trainer.workers), sections


def _size_reporter(session: Session, document: dict[str, Any]) -> Callable[[CodeArchive], None]:
    """Return a function that prints how much of the code directory is sent."""
    directory = document.get("code", {}).get("working_dir")
    return lambda archive: session.output.say(f"code: {directory}, {archive.words}", "dim")


@command()
def watch(session: Session, job: JobArgument) -> None:
    """Follow a job from its first event until it ends. Ctrl-C detaches; the job continues."""
    _show_until_end(session, session.job_id(job), follow=True)


def _show_until_end(session: Session, job_id: str, *, follow: bool) -> None:
    """Wait until a job has ended, and show it; if `follow`, with its events. The exit code is that of the job."""
    try:
        job = follow_job(session.client, job_id, screen_for(session.output)) if follow else session.client.wait(job_id)
    except KeyboardInterrupt:
        option = "" if session.url == DEFAULT_URL else f" --url {session.url}"
        session.output.say(
            f"\ndetached; the job continues. Follow it again: shoal watch {job_id}{option}\n"
            f"End it: shoal cancel {job_id}{option}",
            "warn",
        )
        raise
    if session.output.as_json and follow:
        session.output.line(job, "")
    else:
        series = [] if session.output.as_json else session.client.series(job.id)
        session.show(job, lambda job: render_job(job, series, time.time()))
    if job.status.state in (JobState.FAILED, JobState.CANCELLED):
        raise typer.Exit(ExitCode.FAILED)
