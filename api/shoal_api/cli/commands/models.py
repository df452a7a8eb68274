"""`shoal model`: the registry of models. A version is a checkpoint of a job; an alias such as prod names a version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.commands.export import Dtype
from shoal_api.cli.session import DEFAULT_URL, JsonFlag, UrlOption, command

if TYPE_CHECKING:
    from shoal_api.client import Client
    from shoal_service.artifact_views import ModelVersion

Reference = Annotated[
    str, typer.Argument(metavar="NAME@VERSION", help="A model, with a version or an alias: speech@3, speech@prod.")
]
ProjectOption = Annotated[str, typer.Option("--project", help="Project of the model.")]


def model() -> None:
    """The registry of models: register checkpoints, name versions, fetch them."""


def register(
    source: Annotated[str, typer.Argument(metavar="JOB[@STEP]", help="A job; without a step its newest checkpoint.")],
    name: Annotated[str, typer.Option("--name", help="Name of the model.")],
    description: Annotated[str, typer.Option("--description", help="Words about this version.")] = "",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Register a checkpoint as the next version of a model. Nothing deletes it while it is registered."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_service.artifact_views import ModelRequest

        job, _, step = source.partition("@")
        if step and not (step.isascii() and step.isdigit()):
            raise CliError(f"{source!r} has no step after the @", hint="for example: shoal model register JOB@1000")
        with session.open_client() as client:
            request = ModelRequest(
                job=session.job_id(client, job), step=int(step) if step else None, description=description
            )
            made = client.register_model(name, request)
        session.output.document(made, lambda: f"{made.name}@{made.version}: step {made.step} of job {made.job_id}")


def list_models(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this model.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only models of this project.")] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """List the versions of models with their aliases, the newest version first."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.terminal import clock, new_table, number

        with session.open_client() as client:
            found = client.models(project=project, name=name)
        table = new_table("project", "model", "version", "aliases", "job", "step", "loss", "val", "registered", "by")
        for one in found:
            cells = (one.project, one.name, str(one.version), ", ".join(one.aliases), one.job_id, str(one.step))
            measured = (number(one.metrics.get("loss")), number(one.metrics.get("val_loss")))
            table.add_row(*cells, *measured, clock(one.registered_at), one.registered_by)
        session.output.document(found, lambda: table if found else "No model is registered.")


def alias(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")],
    word: Annotated[str, typer.Argument(metavar="ALIAS", help="For example prod.")],
    version: Annotated[int | None, typer.Argument(metavar="VERSION", min=1, help="The version that it names.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the alias.")] = False,
    project: ProjectOption = "default",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Let an alias name a version, or delete the alias."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError

        if (version is None) != delete:
            raise CliError("an alias needs a version, or --delete", hint="for example: shoal model alias speech prod 3")
        with session.open_client() as client:
            if version is None:
                client.remove_model_alias(project, name, word)
                session.output.document({"deleted": word}, lambda: f"{name}@{word} names nothing any more")
            else:
                found = client.set_model_alias(project, name, word, version)
                session.output.document(found, lambda: f"{name}@{word} is version {found.version}")


def remove(
    reference: Reference, project: ProjectOption = "default", url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False
) -> None:
    """Take a version out of the registry. Its checkpoint stays until the job's retention deletes it."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            found = _found(client, project, reference)
            client.remove_model(project, found.name, found.version)
        session.output.document(found, lambda: f"{found.name}@{found.version} is not registered any more")


def get(
    reference: Reference,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="DIR", help="Also write it there. Repeat the command if it was broken off."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Data type of the tensors that are written.")] = Dtype.FP32,
    project: ProjectOption = "default",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Show where a version is and what it comes from; with --to, write it as safetensors and config.json.

    Every byte that is read is compared with its checksum. A directory that is complete already is verified.
    """
    with command(url, as_json) as session:
        from shoal_api.cli.commands.export import run_export
        from shoal_service.views import CheckpointState

        with session.open_client() as client:
            found = _found(client, project, reference)
        if to is not None:
            written = run_export([found.url, to, "--resume", "--dtype", dtype])
        where = found.url if to is None else f"{to}, {written['tensors']} tensors, {written['bytes']:,} bytes"
        words = [f"{found.name}@{found.version}: {where}", f"step {found.step} of job {found.job_id}"]
        if found.state not in (None, CheckpointState.COMMITTED):
            words.append(f"the checkpoint is {found.state}: serving cannot read it")
        words += [f"data {one.data}" for one in found.lineage[:1] if one.data]
        words += [f"code {one.code_sha256}" for one in found.lineage[:1] if one.code_sha256]
        words += [f"goes on from job {one.job_id}" for one in found.lineage[1:]]
        session.output.document(found, lambda: "\n".join(words))


def _found(client: Client, project: str, reference: str) -> ModelVersion:
    name, _, which = reference.partition("@")
    return client.model(project, name, which or "latest")
