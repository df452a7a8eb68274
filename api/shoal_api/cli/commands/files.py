"""Commands for the files that the programs of jobs have written: files, fetch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, UrlOption, command
from shoal_service.core.quantities import count_text, size_text

if TYPE_CHECKING:
    from shoal_api.client import Client
    from shoal_service.artifact_views import OutputView

_MOST = 10_000
"""Files of one list."""


def files(
    job: JobArgument,
    pattern: Annotated[
        str, typer.Argument(metavar="[PATTERN]", help='Only these files, such as "*.pt" or "runs/**".')
    ] = "**",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """List the files that the program of a job has written below its directory, and that the job's storage has."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.terminal import clock, new_table

        with session.open_client() as client:
            page = client.files(session.job_id(client, job), pattern, limit=_MOST)
        table = new_table("file", "size", "changed")
        for file in page.items:
            table.add_row(file.name, size_text(file.bytes), clock(file.modified_at))
        session.output.document(page, lambda: table if page.items else "The storage of the job has no such file.")
        if page.num_left_out:
            left_out = f"{count_text(page.num_left_out, 'file')}, {size_text(page.bytes_left_out)}"
            session.output.say(f"not kept because of outputs.max_gib: {left_out}")


def fetch(
    job: JobArgument,
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help='Which files, such as "*.pt" or "runs/**".')],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Where to write them, below their names.")
    ] = Path(),
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Write files of a job into a directory, with the paths that they have in the job's directory. Each is compared
    with its hash; a file that is there already with this content is not read again."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_api.cli.exit_codes import ExitCode

        with session.open_client() as client:
            job_id = session.job_id(client, job)
            page = client.files(job_id, pattern, limit=_MOST)
            if not page.items:
                message = f"job {job_id} has no file that matches {pattern!r}"
                raise CliError(message, exit_code=ExitCode.NOT_FOUND, hint=f"shoal files {job_id}")
            for file in page.items:
                _fetch(client, job_id, file, out)
        total = f"{count_text(len(page.items), 'file')}, {size_text(sum(file.bytes for file in page.items))}"
        session.output.document(page, lambda: f"{out.resolve()}: {total}")


def _fetch(client: Client, job_id: str, file: OutputView, out: Path) -> None:
    """Write one file. A name that leads out of `out`, also over a link in it, is refused."""
    from shoal_api.cli.errors import CliError
    from shoal_workers.contract.outputs import is_file_name

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
            client.save_file(job_id, file.name, written)
        if _sha256(draft) != file.sha256:
            raise CliError(f"{file.name} has changed while it was read", hint="repeat the command")
        draft.replace(target)
    except OSError as error:
        raise CliError(f"{target} cannot be written: {error.strerror}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
