"""Commands for the files that the programs of jobs have written: files, fetch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.options import JobArgument
from shoal_api.cli.render.terminal import clock, make_table
from shoal_api.cli.session import Session, command
from shoal_service.artifact_views import OutputView
from shoal_service.core.quantities import count_text, size_text
from shoal_workers.contract.outputs import is_file_name

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
    rows = [(file.name, size_text(file.bytes), clock(file.modified_at)) for file in page.items]
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
