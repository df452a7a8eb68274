"""Commands about what jobs leave: `shoal model`, the registry of models; `shoal export`, which writes a checkpoint's
model as safetensors, for transformers and compatible programs; and the files that the programs of jobs have written.

A version of a model is a checkpoint of a job; an alias such as prod names a version.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from shoal_api.cli.render.terminal import format_number, format_time, make_table
from shoal_api.cli.session import CliError, ExitCode, JobArgument, Session, command
from shoal_api.client import Disconnected
from shoal_service.artifact_views import ModelRequest, ModelVersion, OutputView
from shoal_service.core.quantities import count_text, size_text
from shoal_service.views import CheckpointState
from shoal_workers.contract.outputs import is_file_name

Reference = Annotated[
    str, typer.Argument(metavar="NAME@VERSION", help="A model, with a version or an alias: speech@3, speech@prod.")
]
BEST = "best"
ProjectOption = Annotated[str, typer.Option("--project", help="Project of the model.")]


class Dtype(StrEnum):
    """Data type of the tensors that are written."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@command()
def register(
    session: Session,
    source: Annotated[str, typer.Argument(metavar="JOB[@STEP]", help="A job; without a step its newest checkpoint.")],
    name: Annotated[str, typer.Option("--name", help="Name of the model.")],
    description: Annotated[str, typer.Option("--description", help="Description of this version.")] = "",
) -> None:
    """Register a checkpoint as the next version of a model. Nothing deletes it while it is registered."""
    job_id, step = session.job_and_step(source)
    request = ModelRequest(job=job_id, step=step, description=description)
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
        session.show({"deleted": word}, f"the alias {name}@{word} is deleted")
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
        typer.Option(
            "--to",
            metavar="DIR",
            help="Also write the model to this directory. Repeat the command if it was broken off.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Data type of the tensors that --to writes; default fp32.")
    ] = None,
    project: ProjectOption = "default",
) -> None:
    """Show where a version is and what it comes from; with --to, write it as safetensors and config.json.

    Every byte that is read is compared with its checksum. A directory that is complete already is verified.
    """
    if to is None and dtype is not None:
        raise CliError("--dtype needs --to, which writes the tensors", hint=f"shoal model get {reference} --to DIR")
    version = _find_version(session, project, reference)
    where = version.url
    if to is not None:
        written = run_export([version.url, to, "--resume", "--dtype", dtype or Dtype.FP32])
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
                format_number(version.metrics.get("loss")),
                format_number(version.metrics.get("val_loss")),
                format_time(version.registered_at),
                version.registered_by,
            )
            for version in versions
        ],
        empty="No model is registered.",
    )


@command()
def export(
    session: Session,
    source: Annotated[
        str,
        typer.Argument(metavar="JOB_OR_CHECKPOINT", help="A job, or the URL or directory of a checkpoint."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write to. It must be empty or not exist.")],
    step: Annotated[
        str | None,
        typer.Option("--step", help='Step of the job\'s checkpoint, or "best" by validation. Default: the newest.'),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Data type of the tensors that are written.")] = Dtype.FP32,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the weights, not their averages (optimizer.ema_decay).")
    ] = False,
) -> None:
    """Write a checkpoint's model as safetensors and config.json.

    transformers' from_pretrained loads Hugging Face models and the built-in language model without experts.
    """
    checkpoint = find_checkpoint(session, source, step)
    written = run_export([checkpoint, str(out), "--dtype", dtype, *["--raw"] * raw])
    sizes = f"{written['tensors']} tensors, {written['bytes']:,} bytes"
    session.show(written, f"{out}: {sizes}, from {written['checkpoint']}")


def run_export(arguments: list[str]) -> dict[str, Any]:
    """Run the exporting program, and return what it has written. In a separate process, because the command line never
    loads torch. Raises CliError."""
    program = [sys.executable, "-m", "shoal_workers.export", *arguments, "--json"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CliError(
            "the checkpoint could not be exported",
            details=tuple(done.stderr.strip().splitlines()[-3:]),
            exit_code=ExitCode.FAILED,
        )
    written: dict[str, Any] = json.loads(done.stdout)
    return written


def find_checkpoint(session: Session, source: str, step: str | None) -> str:
    """Find the checkpoint that `source` names. A word without a slash is the name of a job; it is a directory only if
    no job has that name."""
    if "/" in source or source in (".", ".."):
        if step is not None:
            raise CliError("--step needs a job, not the URL of a checkpoint", hint="leave out --step")
        if "://" not in source and not Path(source).is_dir():
            raise CliError(f"{source} is not a directory", hint="give a job, or a checkpoint's directory")
        return source
    try:
        return _find_job_checkpoint(session, source, step)
    except (CliError, Disconnected) as error:
        is_unknown = isinstance(error, Disconnected) or error.exit_code is ExitCode.NOT_FOUND
        if is_unknown and step is None and Path(source).is_dir():
            return source
        raise


def _find_job_checkpoint(session: Session, job: str, step: str | None) -> str:
    """Return the URL of the newest committed checkpoint of a job, of its checkpoint of `step`, or of the best one."""
    job_id = session.job_id(job)
    committed = [item for item in session.client.checkpoints(job_id) if item.state is CheckpointState.COMMITTED]
    if step not in (None, BEST) and not (step.isascii() and step.isdigit()):
        raise CliError(f"--step {step!r} is neither a step nor {BEST!r}", hint=f"for example: --step {BEST}")
    if step == BEST:
        matches = [item for item in committed if item.best == 1]
    else:
        matches = [item for item in committed if step is None or int(step) == item.step]
    if not matches:
        steps = ", ".join(str(number) for number in sorted(item.step for item in committed)) or "none"
        raise CliError(
            f"job {job_id} has no committed checkpoint"
            + ("" if step is None else " of its best validation" if step == BEST else f" of step {step}"),
            hint=f"steps with a committed checkpoint: {steps}",
        )
    return max(matches, key=lambda checkpoint: checkpoint.step).url


_MAX_FILES = 10_000
"""Files of one list."""


@command()
def files(
    session: Session,
    job: JobArgument,
    pattern: Annotated[
        str, typer.Argument(metavar="[PATTERN]", help='Only these files, such as "*.pt" or "runs/**".')
    ] = "**",
) -> None:
    """List the files that the program of a job has written below its directory, and that the job's storage has."""
    page = session.client.files(session.job_id(job), pattern, limit=_MAX_FILES)
    rows = [(file.name, size_text(file.bytes), format_time(file.modified_at)) for file in page.items]
    empty = "The storage of the job has no such file."
    session.show(page, make_table(("file", "size", "changed"), rows, empty=empty))
    if page.num_left_out:
        left_out = f"{count_text(page.num_left_out, 'file')}, {size_text(page.bytes_left_out)}"
        session.output.say(f"not kept because of outputs.max_gib: {left_out}")


@command()
def fetch(
    session: Session,
    job: JobArgument,
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help='Which files, such as "*.pt" or "runs/**".')],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Where to write them, below their names.")
    ] = Path(),
) -> None:
    """Write files of a job into a directory, with the paths that they have in the job's directory. Each is compared
    with its hash; a file that is there already with this content is not read again."""
    job_id = session.job_id(job)
    page = session.client.files(job_id, pattern, limit=_MAX_FILES)
    if not page.items:
        message = f"job {job_id} has no file that matches {pattern!r}"
        raise CliError(message, exit_code=ExitCode.NOT_FOUND, hint=f"shoal files {job_id}")
    for file in page.items:
        _fetch(session, job_id, file, out)
    total = f"{count_text(len(page.items), 'file')}, {size_text(sum(file.bytes for file in page.items))}"
    session.show(page, f"{out.resolve()}: {total}")


def _fetch(session: Session, job_id: str, file: OutputView, out: Path) -> None:
    """Write one file. A name that leads out of `out`, also over a link in it, is refused."""
    target = out / file.name
    draft = target.with_name(f"{target.name}.part")
    try:
        if not is_file_name(file.name) or not target.parent.resolve().is_relative_to(out.resolve()):
            raise CliError(f"the file {file.name!r} would be written outside of {out}")
        if target.is_file() and not target.is_symlink() and _sha256(target) == file.sha256:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        with draft.open("xb") as written:
            session.client.save_file(job_id, file.name, written)
        if _sha256(draft) != file.sha256:
            raise CliError(f"{file.name} has changed while it was read", hint="repeat the command")
        draft.replace(target)
    except OSError as error:
        raise CliError(f"{target} cannot be written: {error.strerror}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
