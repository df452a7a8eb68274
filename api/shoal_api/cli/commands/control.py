"""Commands that change a job or its checkpoints: scale, relayout, update, extend, retry, label, annotate, alert,
rename; pin, verify and delete a checkpoint.

`scale` and `relayout` print what the change will do, the others the state after it. Labels and annotations are written
as for `kubectl`: NAME=VALUE sets, NAME- removes.

Some are for one job, several jobs, all jobs with a label, or all for which a condition holds: pause, resume, cancel,
archive, unarchive, delete and label. `gc` removes what ended jobs leave behind.

All jobs are found before any is changed, so that a mistyped name changes nothing. Then every job is changed, also if
the change of another job is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import ValidationError

from shoal_api.cli.render.jobs import (
    describe_alert,
    job_line,
    next_workers,
    render_change,
    render_checkpoints,
    verification_line,
)
from shoal_api.cli.session import (
    CliError,
    ExitCode,
    JobArgument,
    JobsArgument,
    LabelsOption,
    Session,
    WhereOption,
    YesFlag,
    command,
    explain,
    keep_given,
)
from shoal_api.client import ApiError, Client
from shoal_service.control.code_archive import CodeArchiveError
from shoal_service.core.quantities import count_text, size_text
from shoal_service.fleet_views import DeletionView, RemovalView
from shoal_service.views import CheckpointView, ElasticityPatch, JobPatch, JobView
from shoal_workers.contract import JobState, ParallelismSpec

_REPORT_EVERY_S = 5.0
"""Pause between two lines about the progress of a verification."""
StepArgument = Annotated[
    int, typer.Argument(metavar="STEP", min=0, help="Step of the checkpoint; `shoal checkpoints` lists them.")
]
ChangesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=VALUE | NAME-]...", help="NAME=VALUE sets, NAME- removes; without any, they are shown."
    ),
]


@command()
def scale(
    session: Session,
    job: JobArgument,
    least: Annotated[int | None, typer.Option("--min", min=1, help="New elasticity.min_workers.")] = None,
    most: Annotated[int | None, typer.Option("--max", min=1, help="New elasticity.max_workers.")] = None,
    standby: Annotated[int | None, typer.Option("--standby", min=0, help="New elasticity.standby.")] = None,
) -> None:
    """Change how far a job may shrink and grow. The job follows at its next step boundary and loses no step."""
    limits = keep_given(min_workers=least, max_workers=most, standby=standby)
    if not limits:
        raise CliError("scale needs --min, --max or --standby", hint=f"shoal scale {job} --max 4")
    _patch(session, job, JobPatch(elasticity=ElasticityPatch(**limits)))


@command()
def relayout(
    session: Session,
    job: JobArgument,
    auto: Annotated[bool, typer.Option("--auto", help="The planner chooses the layout.")] = False,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel degree.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline parallel degree.")] = 1,
    cp: Annotated[int, typer.Option("--cp", min=1, help="Context parallel degree.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert parallel degree.")] = 1,
    dp_replicate: Annotated[int, typer.Option("--dp-replicate", min=1, help="Replicas of the sharded model.")] = 1,
    schedule: Annotated[str, typer.Option("--schedule", help="Pipeline schedule: 1f1b, zbv, ... or auto.")] = "auto",
    shard: Annotated[str, typer.Option("--shard", help="optimizer, gradients, full, none, or auto.")] = "auto",
) -> None:
    """Change the parallel layout of a job at its next step boundary. No worker restarts and no step is lost.

    Degrees that are not given are 1. The data axis takes the remaining workers.
    """
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp_replicate": dp_replicate}
    try:
        fixed = ParallelismSpec.model_validate({**degrees, "schedule": schedule, "shard": shard})
    except ValidationError as error:
        [first, *_] = error.errors()
        raise CliError(f"--{first['loc'][0]} {first['input']}: {first['msg']}", hint="shoal relayout --help") from None
    if not auto and fixed == ParallelismSpec():
        raise CliError("relayout needs the degree of an axis, or --auto", hint=f"shoal relayout {job} --tp 2 --pp 2")
    _patch(session, job, JobPatch(parallelism="auto" if auto else fixed))


@command()
def pin(
    session: Session,
    job: JobArgument,
    step: StepArgument,
    undo: Annotated[bool, typer.Option("--undo", help="Take the pin away.")] = False,
) -> None:
    """Pin a checkpoint: the job never deletes it, however many are newer."""
    job_id = session.job_id(job)
    name = _find_checkpoint(session, job_id, step, "pinned" if undo else "committed").name
    change = session.client.unpin_checkpoint if undo else session.client.pin_checkpoint
    session.show(change(job_id, name), lambda checkpoint: render_checkpoints([checkpoint]))


@command()
def verify(session: Session, job: JobArgument, step: StepArgument) -> None:
    """Verify a checkpoint: read every byte of it, and compare it with what was written. Training is not touched."""
    job_id = session.job_id(job)
    name = _find_checkpoint(session, job_id, step, "committed", "damaged").name
    while (view := session.client.verify_checkpoint(job_id, name, wait_s=_REPORT_EVERY_S)).state == "running":
        session.output.say(verification_line(view))
    if view.state != "whole":
        raise CliError(verification_line(view), exit_code=ExitCode.FAILED)
    session.show(view, verification_line)


@command()
def delete_checkpoint(session: Session, job: JobArgument, step: StepArgument, yes: YesFlag = False) -> None:
    """Delete a checkpoint from the storage. It cannot be undone. Refused for a pinned one, and for the newest one of a
    job that has not ended."""
    job_id = session.job_id(job)
    checkpoint = _find_checkpoint(session, job_id, step, "committed", "damaged")
    if not yes:
        session.confirm(f"Delete {checkpoint.url} ({size_text(checkpoint.bytes)})? This cannot be undone.")
    session.show(
        session.client.delete_checkpoint(job_id, checkpoint.name), lambda checkpoint: render_checkpoints([checkpoint])
    )


@command()
def take(
    session: Session,
    job: JobArgument,
    step: Annotated[
        int, typer.Argument(metavar="STEP", min=0, help="Step of the checkpoint to go on from. 0 starts the job over.")
    ],
    yes: YesFlag = False,
) -> None:
    """Let a job go on from an older checkpoint: those of later steps are deleted. For a job whose newest checkpoints
    are lost, or whose last steps are not wanted. `shoal resume` or `shoal retry` then lets it go on."""
    job_id = session.job_id(job)
    committed = [item.step for item in session.client.checkpoints(job_id) if item.state == "committed"]
    newer = ", ".join(str(newer) for newer in committed if newer > step)
    if newer and not yes:
        session.confirm(f"Delete the checkpoints of step {newer}? This cannot be undone.")
    session.show(session.client.take(job_id, step), lambda job: job_line(job, f"goes on from step {step}"))


def _find_checkpoint(session: Session, job_id: str, step: int, *kinds: str) -> CheckpointView:
    """Find the newest checkpoint of a step that is `pinned`, or in one of these states."""
    checkpoints = [item for item in session.client.checkpoints(job_id) if item.step == step]
    matches = [item for item in checkpoints if item.state in kinds or (item.pinned and "pinned" in kinds)]
    if not matches:
        hint = f"`shoal checkpoints {job_id}` lists them"
        message = f"there is no {' or '.join(kinds)} checkpoint of step {step}"
        raise CliError(message, hint=hint, exit_code=ExitCode.NOT_FOUND)
    return matches[-1]


def _patch(session: Session, reference: str, patch: JobPatch) -> None:
    """Predict what the new spec will do: the job follows it later, so its status still is the old one."""
    view = session.client.patch(session.job_id(reference), patch)
    layout, reason = "", ""
    if not session.output.as_json:
        try:
            choice = session.client.plan(view.spec, workers=next_workers(view), top=1).choice
            layout, reason = choice.name, choice.reason
        except ApiError as error:
            reason = str(error)  # the change is accepted; only its prediction is missing
    session.show(view, lambda job: render_change(job, layout, reason))


@command()
def update(
    session: Session,
    job: JobArgument,
    code: Annotated[
        Path | None,
        typer.Option("--code", metavar="DIR", exists=True, file_okay=False, help="Directory with the new code."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="NAME=WEIGHT,...", help="New weights of all sources of the job's mixture."),
    ] = None,
    at_step: Annotated[
        int | None,
        typer.Option("--at-step", min=1, help="First step with the weights. Default: the service chooses it."),
    ] = None,
) -> None:
    """Give a job new code, or its mixture other weights, while it trains. It follows at a step boundary, and no step is
    lost.

    If new code raises, is not finite, is slower or builds another model, the job trains on with the code before. With
    new weights each source goes on with its next sample.
    """
    if weights is None and at_step is not None:
        raise CliError(
            "--at-step needs --weights: it is the first step with the new weights", hint="shoal update --help"
        )
    if code is not None and weights is None:
        _update_code(session, job, code)
    elif weights is not None and code is None:
        _change_weights(session, job, weights, at_step)
    else:
        raise CliError("update needs --code or --weights", hint=f"shoal update {job} --weights web=0.5,chats=0.5")


def _update_code(session: Session, job: str, code: Path) -> None:
    try:
        view = session.client.update_code(session.job_id(job), code)
    except CodeArchiveError as error:
        raise CliError(f"--code {code} cannot be packed: {error}") from None
    version = (view.spec.code.archive or "")[:12]
    follow = f"`shoal watch {view.id}` shows when it trains, or why it does not"
    session.show(view, f"{job_line(view, f'code {version}')}\n{follow}")


def _change_weights(session: Session, job: str, weights: str, at_step: int | None) -> None:
    new_weights = parse_weights(weights)
    view = session.client.change_weights(session.job_id(job), new_weights, at_step=at_step)
    [*_, change] = view.spec.data["changes"]
    shares = ", ".join(f"{name} {weight:g}" for name, weight in change["weights"].items())
    session.show(view, f"{job_line(view, f'step {view.status.step}')}\nfrom step {change['at_step']} on: {shares}")


def parse_weights(text: str) -> dict[str, float]:
    """Parse NAME=WEIGHT,...; a name may contain an equals sign. Raises CliError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = -1.0
        if not name or not 0 <= weight <= 1e9:
            raise CliError(
                f"--weights {part!r} is not NAME=WEIGHT", hint="shoal update JOB --weights web=0.5,chats=0.5"
            )
        if name in weights:
            raise CliError(f"--weights names {name!r} twice", hint="shoal update --help")
        weights[name] = weight
    return weights


@command()
def extend(
    session: Session,
    job: JobArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Last step of the job.")],
) -> None:
    """Let a job go on to more steps, in place. A running one follows at its next step boundary; an ended one returns to
    the queue and goes on from its newest checkpoint."""
    session.show(
        session.client.extend(session.job_id(job), steps),
        lambda view: job_line(view, f"step {view.status.step} of {steps}"),
    )


@command()
def retry(session: Session, job: JobArgument) -> None:
    """Let a failed job go on from its newest checkpoint."""
    session.show(
        session.client.retry(session.job_id(job)),
        lambda view: job_line(view, f"goes on after step {view.status.step}"),
    )


@command()
def label(
    session: Session,
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Id, unique beginning of an id, or unique name of a job.")
    ] = None,
    changes: ChangesArgument = None,
    where: WhereOption = "",
    yes: YesFlag = False,
) -> None:
    """Change labels of a job, also of one that has ended: `shoal label JOB team=speech draft-`. With --where those of
    all jobs for which the condition holds: `shoal label --where 'loss > 3' team=speech`."""
    if not where:
        if job is None:
            raise CliError("label needs JOB, or --where", hint="shoal label JOB team=speech")
        labels = parse_changes("label", changes or [])
        _show_keys(session, job, JobPatch(labels=labels) if labels else None, "labels")
        return
    labels = parse_changes("label", [*([job] if job is not None else []), *(changes or [])])
    if not labels:
        raise CliError("label --where needs NAME=VALUE or NAME-", hint="shoal label --where 'loss > 3' team=speech")
    patch = JobPatch(labels=labels)
    job_ids = find_jobs(session, "label", None, None, where, asks=not yes)
    change_each(session, job_ids, lambda client, job_id: client.patch(job_id, patch), _labels_line, as_list=True)


@command()
def annotate(session: Session, job: JobArgument, changes: ChangesArgument = None) -> None:
    """Change annotations of a job, also of one that has ended: `shoal annotate JOB why="Is 3e-4 too much?"`."""
    annotations = parse_changes("annotate", changes or [])
    _show_keys(session, job, JobPatch(annotations=annotations) if annotations else None, "annotations")


@command()
def alert(
    session: Session,
    job: JobArgument,
    conditions: Annotated[list[str] | None, typer.Argument(metavar="CONDITION", help="Such as 'loss > 10'.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take all alerts away.")] = False,
) -> None:
    """Set the alerts of a job: `shoal alert JOB 'loss > 10' 'max(grad_norm) > 100'`. They replace those before;
    without any, show them."""
    if clear and conditions:
        raise CliError("alert takes conditions or --clear, not both", hint="shoal alert JOB 'loss > 10'")
    job_id = session.job_id(job)
    if conditions or clear:
        view = session.client.patch(job_id, JobPatch(alerts=tuple(conditions or ())))
    else:
        view = session.client.job(job_id)
    lines = [describe_alert(alert) for alert in view.status.alerts] or ["no alerts"]
    session.show(view, "\n".join([job_line(view), *lines]))


@command()
def rename(
    session: Session,
    job: JobArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, and inner dashes, dots, underscores.")],
) -> None:
    """Give a job another name, also one that has ended. Its id stays."""
    session.show(session.client.patch(session.job_id(job), JobPatch(name=name)), job_line)


def parse_changes(verb: str, texts: Sequence[str]) -> dict[str, str | None]:
    """Parse NAME=VALUE and NAME- into values by name; None removes the name. Raises CliError."""
    changes: dict[str, str | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and not text.endswith("-"):
            raise CliError(
                f"{text!r} has no value, so it changes nothing",
                hint=f"shoal {verb} JOB {text}=VALUE, or {text}- to remove it",
            )
        name = name if equals else text[:-1]
        if name in changes:
            raise CliError(f"{name!r} is given twice", hint=f"shoal {verb} --help")
        changes[name] = value if equals else None
    return changes


def _labels_line(job: JobView) -> str:
    return job_line(job, " ".join(f"{name}={value}" for name, value in sorted(job.spec.labels.items())))


def _show_keys(session: Session, reference: str, patch: JobPatch | None, key: str) -> None:
    """Patch a job if a patch is given, and show its labels or annotations."""
    job_id = session.job_id(reference)
    view = session.client.patch(job_id, patch) if patch is not None else session.client.job(job_id)
    values: dict[str, str] = getattr(view.spec, key)
    lines = [f"{name}={value}" for name, value in sorted(values.items())] or [f"no {key}"]
    session.show(view, "\n".join([job_line(view), *lines]))


View = TypeVar("View")


def _for_each_job(
    *, asks_for_labels: bool = False
) -> Callable[[Callable[[Client, str], JobView]], Callable[..., None]]:
    """Make a command of a change of one job: it changes the jobs that JOB..., --label or --where name."""

    def decorate(change: Callable[[Client, str], JobView]) -> Callable[..., None]:
        @command()
        def run(
            session: Session,
            jobs: JobsArgument = None,
            label: LabelsOption = None,
            where: WhereOption = "",
            yes: YesFlag = False,
        ) -> None:
            asks = bool(where or (asks_for_labels and label)) and not yes
            job_ids = find_jobs(session, change.__name__, jobs, label, where, asks=asks)
            change_each(session, job_ids, change, _limits_line, as_list=len(jobs or ()) != 1)

        run.__doc__ = change.__doc__
        return run

    return decorate


@_for_each_job()
def pause(client: Client, job_id: str) -> JobView:
    """Save a checkpoint and release the workers until `resume`."""
    return client.pause(job_id)


@_for_each_job()
def resume(client: Client, job_id: str) -> JobView:
    """Put paused jobs back into the queue."""
    return client.resume(job_id)


@_for_each_job(asks_for_labels=True)
def cancel(client: Client, job_id: str) -> JobView:
    """End jobs. Their checkpoints are kept. Jobs found by --label or --where are shown first, with a question."""
    return client.cancel(job_id)


@_for_each_job()
def archive(client: Client, job_id: str) -> JobView:
    """Take jobs that have ended out of the lists. Nothing of them is deleted; `shoal jobs --archived` shows them."""
    return client.archive(job_id)


@_for_each_job()
def unarchive(client: Client, job_id: str) -> JobView:
    """Take archived jobs back into the lists."""
    return client.unarchive(job_id)


def find_jobs(
    session: Session,
    verb: str,
    names: Sequence[str] | None,
    labels: Sequence[str] | None,
    where: str,
    *,
    asks: bool,
    find_id: Callable[[str], str] | None = None,
) -> list[str]:
    """Return the ids of the jobs with these names, or else of those that labels and condition select, each once.

    Args:
        asks: a person confirms the jobs that labels or condition select.
        find_id: finds the job of a name; None for `Session.job_id`.

    Raises:
        CliError: names and a search are both given, or neither; or there is no such job.
    """
    if bool(names) == bool(labels or where):
        raise CliError(
            f"{verb} needs JOB..., --label or --where, and was given {'both' if names else 'neither'}",
            hint=f"shoal {verb} JOB JOB, or shoal {verb} --label team=speech, or shoal {verb} --where 'loss > 3'",
        )
    if names:
        return list(dict.fromkeys(map(find_id or session.job_id, names)))
    kind, states = _SEARCHED[verb]
    condition = where
    if verb == "unarchive":
        condition = f"({where}) and archived" if where else "archived"
    jobs = list(session.client.jobs(state=states, label=labels or (), where=condition))
    if not jobs:
        options = [*(f"--label {label}" for label in labels or ()), *([f"--where {where!r}"] if where else [])]
        raise CliError(
            f"no {kind} has {' and '.join(options)}",
            hint="`shoal jobs --label` lists the jobs with a label, `shoal jobs --where` those that fit a condition",
            exit_code=ExitCode.NOT_FOUND,
        )
    if asks:
        for job in jobs:
            session.output.say(f"{job.id}  {job.name}  {job.state}")
        number = count_text(len(jobs), "job")
        question = f"{verb.capitalize()} {'this job' if len(jobs) == 1 else f'these {number}'}?"
        session.confirm(question, consequence=f"this would {verb} {number}")
    return [job.id for job in jobs]


_ENDED = tuple(state for state in JobState if state.ended)
_ACTIVE = tuple(state for state in JobState if not state.ended)
_SEARCHED = {
    "pause": ("job that has not ended", _ACTIVE),
    "resume": ("paused job", (JobState.PAUSED, JobState.PAUSING)),
    "cancel": ("job that has not ended", _ACTIVE),
    "archive": ("job that has ended", _ENDED),
    "unarchive": ("archived job", _ENDED),
    "delete": ("job that has ended", _ENDED),
    "label": ("job", ()),
}
"""What a verb changes, for messages, and the states of such jobs."""


def change_each(
    session: Session,
    job_ids: Sequence[str],
    change: Callable[[Client, str], View],
    line: Callable[[View], str],
    *,
    as_list: bool,
) -> None:
    """Change all jobs, and print what they are then. If `as_list`, the refusal of one does not keep the others from
    being changed, and the exit code is that of the first refusal."""
    views: list[View] = []
    refused: dict[str, CliError] = {}
    for job_id in job_ids:
        try:
            views.append(change(session.client, job_id))
        except ApiError as error:
            refusal = explain(error, session.url)
            if refusal is None or not as_list:
                raise
            refused[job_id] = refusal
    if as_list:
        errors = [{"id": job_id, **refusal.document()} for job_id, refusal in refused.items()]
        session.show([*views, *errors], "\n".join(line(view) for view in views))
    else:
        session.show(views[0], line)
    for job_id, refusal in refused.items():
        session.output.say(f"error: {job_id}: {refusal.message}", "bad")
    if refused:
        raise typer.Exit(next(iter(refused.values())).exit_code)


def _limits_line(job: JobView) -> str:
    elastic = job.spec.elasticity
    limits = f"(min {elastic.min_workers}, max {elastic.max_workers}, standby {elastic.standby})"
    return job_line(job, f"workers {job.status.workers} {limits}", f"layout {job.status.layout or '-'}")


@command()
def delete(
    session: Session,
    jobs: JobsArgument = None,
    label: LabelsOption = None,
    where: WhereOption = "",
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Leave its files in the storage.")
    ] = False,
    yes: YesFlag = False,
) -> None:
    """Delete jobs that have ended, with their histories and checkpoints. It cannot be undone.

    Pinned checkpoints stay in the storage. A job that has not ended is refused: `shoal cancel` ends it.
    """
    job_ids = find_jobs(session, "delete", jobs, label, where, asks=not yes, find_id=partial(_find_deletable, session))
    if jobs and not yes:
        files = "" if keep_checkpoints else " and its checkpoints"
        session.confirm(f"Delete job {' '.join(job_ids)}{files}? This cannot be undone.")
    change_each(
        session,
        job_ids,
        lambda client, job_id: client.delete_job(job_id, checkpoints=not keep_checkpoints),
        _describe_deletion,
        as_list=len(jobs or ()) != 1,
    )


@command()
def gc(
    session: Session,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
) -> None:
    """Delete now what ended jobs leave behind and is older than the server's settings SHOAL_RETAIN_... allow.

    The server does it by itself every SHOAL_GC_EVERY_S seconds.
    """
    view = session.client.gc(dry_run=dry_run)
    removals = list(view.removals)
    while not view.is_complete and not dry_run and any(not removal.error for removal in view.removals):
        view = session.client.gc()
        removals += view.removals
    lines = [_removal_line(removal) for removal in removals]
    if dry_run and not view.is_complete:
        lines.append("... and more")
    result = view.model_copy(update={"removals": tuple(removals)})
    session.show(result, "\n".join(lines) or "nothing is old enough to be deleted")


def _find_deletable(session: Session, reference: str) -> str:
    """Return the id of a job, also if its deletion was begun: to delete it again does no harm."""
    if any(deletion.job_id == reference for deletion in session.client.deletions(limit=1000)):
        return reference
    return session.job_id(reference)


def _describe_deletion(view: DeletionView) -> str:
    if view.finished_at is None:
        return f"{view.job_id}  {view.name}  not complete: {view.error}\nthe server tries again"
    files = "with its checkpoints" if view.with_checkpoints else f"its files stay in {view.root}"
    head = f"{view.job_id}  {view.name}  deleted, {files} ({count_text(view.rows, 'row')})"
    return "\n".join([head, *(f"pinned, stays: {url}" for url in view.kept)])


def _removal_line(removal: RemovalView) -> str:
    job = f"{removal.job_id}  " if removal.job_id else ""
    rows = count_text(removal.rows, "row") if removal.rows else ""
    result = f"not deleted: {removal.error}" if removal.error else rows
    return "  ".join(filter(None, (f"{removal.kind.value:<10} {job}{removal.name}", result, removal.reason)))
