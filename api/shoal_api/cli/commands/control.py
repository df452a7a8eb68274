"""Commands that change a job or its checkpoints: scale, relayout, update, extend, retry, label, annotate, rename; pin,
verify and delete a checkpoint.

`scale` and `relayout` print what the change will do, the others the state after it. Labels and annotations are written
as for `kubectl`: NAME=VALUE sets, NAME- removes. `several.py` has those that may change many jobs at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal_api.cli.commands.several import Wanted, WhereOption, YesFlag, change_each
from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, Session, UrlOption, command

if TYPE_CHECKING:
    from shoal_api.client import Client
    from shoal_service.views import CheckpointView, JobPatch, JobView

_LOOK_S = 5.0
"""Pause between two lines about the progress of a verification."""
StepArgument = Annotated[
    int, typer.Argument(metavar="STEP", min=0, help="Step of the checkpoint; `shoal checkpoints` lists them.")
]
ChangesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME=VALUE | NAME-]...", help="Set it, or remove it; without any, they are shown."),
]


def scale(
    job: JobArgument,
    least: Annotated[int | None, typer.Option("--min", min=1, help="New elasticity.min_workers.")] = None,
    most: Annotated[int | None, typer.Option("--max", min=1, help="New elasticity.max_workers.")] = None,
    standby: Annotated[int | None, typer.Option("--standby", min=0, help="New elasticity.standby.")] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Change how far a job may shrink and grow. The job follows at its next step boundary and loses no step."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_service.views import ElasticityPatch, JobPatch

        options = {"min_workers": least, "max_workers": most, "standby": standby}
        given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        if not given:
            raise CliError("scale needs --min, --max or --standby", hint=f"shoal scale {job} --max 4")
        patch = JobPatch(elasticity=ElasticityPatch(**given))
        _patch(session, job, patch)


def relayout(
    job: JobArgument,
    auto: Annotated[bool, typer.Option("--auto", help="The planner chooses the layout.")] = False,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel degree.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline parallel degree.")] = 1,
    cp: Annotated[int, typer.Option("--cp", min=1, help="Context parallel degree.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert parallel degree.")] = 1,
    dp_replicate: Annotated[int, typer.Option("--dp-replicate", min=1, help="Replicas of the sharded model.")] = 1,
    schedule: Annotated[str, typer.Option("--schedule", help="Pipeline schedule: 1f1b, zbv, ... or auto.")] = "auto",
    shard: Annotated[str, typer.Option("--shard", help="optimizer, gradients, full, none, or auto.")] = "auto",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Change the parallel layout of a job at its next step boundary. No worker restarts and no step is lost.

    Degrees that are not given are 1. The data axis takes the remaining workers.
    """
    with command(url, as_json) as session:
        from pydantic import ValidationError

        from shoal_api.cli.errors import CliError
        from shoal_service.views import JobPatch
        from shoal_workers.contract.layout import ParallelismSpec

        degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp_replicate": dp_replicate}
        try:
            fixed = ParallelismSpec.model_validate({**degrees, "schedule": schedule, "shard": shard})
        except ValidationError as error:
            [first, *_] = error.errors()
            raise CliError(
                f"--{first['loc'][0]} {first['input']}: {first['msg']}", hint="shoal relayout --help"
            ) from None
        if not auto and fixed == ParallelismSpec():
            raise CliError("relayout needs a degree, or --auto", hint=f"shoal relayout {job} --tp 2 --pp 2")
        patch = JobPatch(parallelism="auto" if auto else fixed)
        _patch(session, job, patch)


def pin(
    job: JobArgument,
    step: StepArgument,
    undo: Annotated[bool, typer.Option("--undo", help="Take the pin away.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Pin a checkpoint: the job never deletes it, however many are newer."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.jobs import checkpoints_table

        with session.open_client() as client:
            job_id = session.job_id(client, job)
            name = _checkpoint_of(client, job_id, step, "pinned" if undo else "committed").name
            view = client.unpin_checkpoint(job_id, name) if undo else client.pin_checkpoint(job_id, name)
        session.output.document(view, lambda: checkpoints_table((view,)))


def verify(
    job: JobArgument,
    step: StepArgument,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Verify a checkpoint: read every byte of it, and compare it with what was written. Training is not touched."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_api.cli.exit_codes import ExitCode
        from shoal_api.cli.render.jobs import verification_line

        with session.open_client() as client:
            job_id = session.job_id(client, job)
            name = _checkpoint_of(client, job_id, step, "committed", "damaged").name
            found = client.verify_checkpoint(job_id, name, wait_s=_LOOK_S)
            while found.state == "running":
                session.output.say(verification_line(found))
                found = client.verify_checkpoint(job_id, name, wait_s=_LOOK_S)
        if found.state != "whole":
            raise CliError(verification_line(found), exit_code=ExitCode.FAILED)
        session.output.document(found, lambda: verification_line(found))


def delete_checkpoint(
    job: JobArgument,
    step: StepArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Delete a checkpoint from the storage. It cannot be undone. Refused for a pinned one, and for the newest one of a
    job that has not ended."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_api.cli.render.jobs import checkpoints_table
        from shoal_service.core.quantities import size_text

        with session.open_client() as client:
            job_id = session.job_id(client, job)
            one = _checkpoint_of(client, job_id, step, "committed", "damaged")
            if not yes:
                if as_json or not sys.stdin.isatty():
                    raise CliError("this cannot be undone; there is no terminal to ask", hint="add --yes")
                typer.confirm(
                    f"Delete {one.url} ({size_text(one.bytes)})? This cannot be undone.", abort=True, err=True
                )
            view = client.delete_checkpoint(job_id, one.name)
        session.output.document(view, lambda: checkpoints_table((view,)))


def take(
    job: JobArgument,
    step: Annotated[
        int, typer.Argument(metavar="STEP", min=0, help="Step of the checkpoint to go on from. 0 starts the job over.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Let a job go on from an older checkpoint: those of later steps are deleted. For a job whose newest checkpoints
    are lost, or whose last steps are not wanted. `shoal resume` or `shoal retry` then lets it go on."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError

        with session.open_client() as client:
            job_id = session.job_id(client, job)
            newer = [one for one in client.checkpoints(job_id) if one.state == "committed" and one.step > step]
            if newer and not yes:
                if as_json or not sys.stdin.isatty():
                    raise CliError("this cannot be undone; there is no terminal to ask", hint="add --yes")
                steps = ", ".join(str(one.step) for one in newer)
                typer.confirm(f"Delete the checkpoints of step {steps}? This cannot be undone.", abort=True, err=True)
            view = client.take(job_id, step)
        session.output.document(view, lambda: f"{view.id}  {view.name}  {view.status.state}  goes on from step {step}")


def _checkpoint_of(client: Client, job_id: str, step: int, *kinds: str) -> CheckpointView:
    """Find the newest checkpoint of a step that is `pinned`, or in one of these states."""
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode

    found = [one for one in client.checkpoints(job_id) if one.step == step]
    fitting = [one for one in found if one.state in kinds or (one.pinned and "pinned" in kinds)]
    if not fitting:
        hint = f"`shoal checkpoints {job_id}` lists them"
        message = f"there is no {' or '.join(kinds)} checkpoint of step {step}"
        raise CliError(message, hint=hint, exit_code=ExitCode.NOT_FOUND)
    return fitting[-1]


def _patch(session: Session, reference: str, patch: JobPatch) -> None:
    """Predict what the new spec will do: the job follows it later, so its status still is the old one."""
    from shoal_api.cli.render.jobs import change_page, next_workers
    from shoal_api.client import ApiError

    with session.open_client() as client:
        view = client.patch(session.job_id(client, reference), patch)
        layout, reason = "", ""
        if not session.output.as_json:
            try:
                choice = client.plan(view.spec, workers=next_workers(view), top=1).choice
                layout, reason = choice.name, choice.reason
            except ApiError as error:
                reason = str(error)  # the change is accepted; only its prediction is missing
    session.output.document(view, lambda: change_page(view, layout, reason))


def update(
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
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Give a job new code, or its mixture other weights, while it trains. It follows at a step boundary, and no step is
    lost.

    If new code raises, is not finite, is slower or builds another model, the job trains on with the code before. With
    new weights each source goes on with its next sample.
    """
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError

        if weights is None and at_step is not None:
            raise CliError("--at-step says when --weights begin", hint="shoal update --help")
        if code is not None and weights is None:
            _update_code(session, job, code)
        elif weights is not None and code is None:
            _change_weights(session, job, weights, at_step)
        else:
            raise CliError("update needs --code or --weights", hint=f"shoal update {job} --weights web=0.5,chats=0.5")


def _update_code(session: Session, job: str, code: Path) -> None:
    from shoal_api.cli.errors import CliError
    from shoal_service.control.code_archive import CodeArchiveError

    with session.open_client() as client:
        try:
            view = client.update_code(session.job_id(client, job), code)
        except CodeArchiveError as error:
            raise CliError(f"--code {code} cannot be packed: {error}") from None
    version = (view.spec.code.archive or "")[:12]
    session.output.document(
        view,
        lambda: (
            f"{view.id}  {view.name}  {view.status.state}  code {version}\n"
            f"`shoal watch {view.id}` shows when it trains, or why it does not"
        ),
    )


def _change_weights(session: Session, job: str, weights: str, at_step: int | None) -> None:
    given = weights_of(weights)
    with session.open_client() as client:
        view = client.change_weights(session.job_id(client, job), given, at_step=at_step)
    [*_, change] = view.spec.data["changes"]
    shares = ", ".join(f"{name} {weight:g}" for name, weight in change["weights"].items())
    session.output.document(
        view,
        lambda: (
            f"{view.id}  {view.name}  {view.status.state}  step {view.status.step}\n"
            f"from step {change['at_step']} on: {shares}"
        ),
    )


def weights_of(text: str) -> dict[str, float]:
    """Parse NAME=WEIGHT,...; a name may contain an equals sign. Raises CliError."""
    from shoal_api.cli.errors import CliError

    found: dict[str, float] = {}
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
        if name in found:
            raise CliError(f"--weights names {name!r} twice", hint="shoal update --help")
        found[name] = weight
    return found


def extend(
    job: JobArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that it is to complete in all.")],
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Let a job go on to more steps, in place. A running one follows at its next step boundary; an ended one returns to
    the queue and goes on from its newest checkpoint."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            view = client.extend(session.job_id(client, job), steps)
        session.output.document(
            view, lambda: f"{view.id}  {view.name}  {view.status.state}  step {view.status.step} of {steps}"
        )


def retry(job: JobArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Let a failed job try again, in place, from its newest checkpoint."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            view = client.retry(session.job_id(client, job))
        session.output.document(
            view, lambda: f"{view.id}  {view.name}  {view.status.state}  goes on after step {view.status.step}"
        )


def label(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Id, unique beginning of an id, or unique name of a job.")
    ] = None,
    changes: ChangesArgument = None,
    where: WhereOption = "",
    yes: YesFlag = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Change labels of a job, also of one that has ended: `shoal label JOB team=speech draft-`. With --where those of
    all jobs for which the condition holds: `shoal label --where 'loss > 3' team=speech`."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_service.views import JobPatch

        if not where:
            if job is None:
                raise CliError("label needs JOB, or --where", hint="shoal label JOB team=speech")
            given = changes_of("label", changes or [])
            _change_keys(session, job, JobPatch(labels=given) if given else None, "labels")
            return
        given = changes_of("label", [*([job] if job is not None else []), *(changes or [])])
        if not given:
            raise CliError("label --where needs NAME=VALUE or NAME-", hint="shoal label --where 'loss > 3' team=speech")
        wanted = Wanted("label", [], [], where, is_asked=not yes)
        with session.open_client() as client:
            patch = JobPatch(labels=given)
            change_each(session, client, wanted, lambda client, job_id: client.patch(job_id, patch), labels_line)


def annotate(
    job: JobArgument, changes: ChangesArgument = None, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False
) -> None:
    """Change annotations of a job, also of one that has ended: `shoal annotate JOB why="Is 3e-4 too much?"`."""
    with command(url, as_json) as session:
        from shoal_service.views import JobPatch

        given = changes_of("annotate", changes or [])
        _change_keys(session, job, JobPatch(annotations=given) if given else None, "annotations")


def rename(
    job: JobArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, and inner dashes, dots, underscores.")],
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Give a job another name, also one that has ended. Its id stays."""
    with command(url, as_json) as session:
        from shoal_service.views import JobPatch

        with session.open_client() as client:
            view = client.patch(session.job_id(client, job), JobPatch(name=name))
        session.output.document(view, lambda: f"{view.id}  {view.name}  {view.status.state}")


def changes_of(verb: str, texts: Sequence[str]) -> dict[str, str | None]:
    """Parse NAME=VALUE and NAME- into values by name; None removes the name. Raises CliError."""
    from shoal_api.cli.errors import CliError

    found: dict[str, str | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and not text.endswith("-"):
            raise CliError(f"{text!r} changes nothing", hint=f"shoal {verb} JOB {text}=VALUE, or {text}- to remove it")
        name = name if equals else text[:-1]
        if name in found:
            raise CliError(f"{name!r} is given twice", hint=f"shoal {verb} --help")
        found[name] = value if equals else None
    return found


def labels_line(view: JobView) -> str:
    labels = " ".join(f"{name}={value}" for name, value in sorted(view.spec.labels.items()))
    return f"{view.id}  {view.name}  {view.status.state}  {labels}"


def _change_keys(session: Session, reference: str, patch: JobPatch | None, key: str) -> None:
    with session.open_client() as client:
        job_id = session.job_id(client, reference)
        view = client.patch(job_id, patch) if patch is not None else client.job(job_id)
    held: dict[str, str] = getattr(view.spec, key)
    words = "\n".join(f"{name}={value}" for name, value in sorted(held.items())) or f"no {key}"
    session.output.document(view, lambda: f"{view.id}  {view.name}  {view.status.state}\n{words}")
