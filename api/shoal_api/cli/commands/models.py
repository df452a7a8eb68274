"""`shoal model`: the registry of models. A version is a checkpoint of a job; an alias such as prod names a version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import RenderableType

from shoal_api.cli.commands.export import Dtype, run_export
from shoal_api.cli.errors import CliError
from shoal_api.cli.render.terminal import clock, make_table, number
from shoal_api.cli.session import Session, command
from shoal_service.artifact_views import ModelRequest, ModelVersion
from shoal_service.views import CheckpointState

Reference = Annotated[
    str, typer.Argument(metavar="NAME@VERSION", help="A model, with a version or an alias: speech@3, speech@prod.")
]
ProjectOption = Annotated[str, typer.Option("--project", help="Project of the model.")]


@command()
def register(
    session: Session,
    source: Annotated[str, typer.Argument(metavar="JOB[@STEP]", help="A job; without a step its newest checkpoint.")],
    name: Annotated[str, typer.Option("--name", help="Name of the model.")],
    description: Annotated[str, typer.Option("--description", help="Words about this version.")] = "",
) -> None:
    """Register a checkpoint as the next version of a model. Nothing deletes it while it is registered."""
    job, _, step = source.partition("@")
    if step and not (step.isascii() and step.isdigit()):
        raise CliError(f"{source!r} has no step after the @", hint="for example: shoal model register JOB@1000")
    request = ModelRequest(job=session.job_id(job), step=int(step) if step else None, description=description)
    session.show(
        session.client.register_model(name, request),
        lambda version: f"{version.name}@{version.version}: step {version.step} of job {version.job_id}",
    )


@command()
def list_models(
    session: Session,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this model.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only models of this project.")] = None,
) -> None:
    """List the versions of models with their aliases, the newest version first."""
    session.show(session.client.models(project=project, name=name), _versions_table)


@command()
def alias(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")],
    word: Annotated[str, typer.Argument(metavar="ALIAS", help="For example prod.")],
    version: Annotated[int | None, typer.Argument(metavar="VERSION", min=1, help="The version that it names.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the alias.")] = False,
    project: ProjectOption = "default",
) -> None:
    """Let an alias name a version, or delete the alias."""
    if (version is None) != delete:
        raise CliError("an alias needs a version, or --delete", hint="for example: shoal model alias speech prod 3")
    if version is None:
        session.client.remove_model_alias(project, name, word)
        session.show({"deleted": word}, f"{name}@{word} names nothing any more")
    else:
        view = session.client.set_model_alias(project, name, word, version)
        session.show(view, f"{name}@{word} is version {view.version}")


@command()
def remove(session: Session, reference: Reference, project: ProjectOption = "default") -> None:
    """Take a version out of the registry. Its checkpoint stays until the job's retention deletes it."""
    version = _find_version(session, project, reference)
    session.client.remove_model(project, version.name, version.version)
    session.show(version, f"{version.name}@{version.version} is not registered any more")


@command()
def get(
    session: Session,
    reference: Reference,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="DIR", help="Also write it there. Repeat the command if it was broken off."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Data type of the tensors that are written.")] = Dtype.FP32,
    project: ProjectOption = "default",
) -> None:
    """Show where a version is and what it comes from; with --to, write it as safetensors and config.json.

    Every byte that is read is compared with its checksum. A directory that is complete already is verified.
    """
    version = _find_version(session, project, reference)
    where = version.url
    if to is not None:
        written = run_export([version.url, to, "--resume", "--dtype", dtype])
        where = f"{to}, {written['tensors']} tensors, {written['bytes']:,} bytes"
    lines = [f"{version.name}@{version.version}: {where}", f"step {version.step} of job {version.job_id}"]
    if version.state not in (None, CheckpointState.COMMITTED):
        lines.append(f"the checkpoint is {version.state}: serving cannot read it")
    lines += [f"data {job.data}" for job in version.lineage[:1] if job.data]
    lines += [f"code {job.code_sha256}" for job in version.lineage[:1] if job.code_sha256]
    lines += [f"goes on from job {job.job_id}" for job in version.lineage[1:]]
    session.show(version, "\n".join(lines))


def _find_version(session: Session, project: str, reference: str) -> ModelVersion:
    name, _, which = reference.partition("@")
    return session.client.model(project, name, which or "latest")


def _versions_table(versions: Sequence[ModelVersion]) -> RenderableType:
    return make_table(
        ("project", "model", "version", "aliases", "job", "step", "loss", "val", "registered", "by"),
        [
            (
                version.project,
                version.name,
                version.version,
                ", ".join(version.aliases),
                version.job_id,
                version.step,
                number(version.metrics.get("loss")),
                number(version.metrics.get("val_loss")),
                clock(version.registered_at),
                version.registered_by,
            )
            for version in versions
        ],
        empty="No model is registered.",
    )
