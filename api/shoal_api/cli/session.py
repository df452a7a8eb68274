"""What every command shares: its options, its client, and the one place where its errors end.

Imports nothing heavy at the top: `shoal --help` has to be there before a finger has left the key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.output import Output
    from shoal_api.client import Client
    from shoal_workers.contract.job import JobState

DEFAULT_URL = "http://127.0.0.1:8470"
"""The client's too; repeated here, because importing the client takes longer than showing the help."""
_NUM_RETRIES = 3
"""Half a second: somebody who mistyped an address should not wait for the news."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON to standard output, nothing else.")]
UrlOption = Annotated[str, typer.Option("--url", envvar="SHOAL_URL", help="Address of the Shoal server.")]
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="An id, the beginning of one, or a name that only one job has.")
]
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help='A YAML or JSON file; "-" reads standard input.')]


@dataclass(frozen=True)
class Session:
    """One invocation of a command."""

    url: str
    output: Output

    def open_client(self) -> Client:
        from shoal_api.cli.errors import CliError
        from shoal_api.client import Client
        from shoal_api.client.transport import RetryPolicy

        if not self.url.startswith(("http://", "https://")):
            raise CliError(f"--url {self.url!r} is no address of a server", hint=f"for example: --url {DEFAULT_URL}")

        return Client(self.url, retry=RetryPolicy(num_retries=_NUM_RETRIES))

    def job_id(self, client: Client, reference: str) -> str:
        """The id that JOB stands for. An id is looked up directly; only a name or a beginning reads the list."""
        from shoal_api.cli.resolve import match_job
        from shoal_api.client import ApiError

        try:
            if reference:
                return client.job(reference).id
        except ApiError as error:
            if error.problem.status not in (400, 404, 422):
                raise
        return match_job(reference, client.jobs()).id


@contextmanager
def command(url: str, as_json: bool) -> Iterator[Session]:
    """Runs a command's body; an error becomes short red text and an exit code. SHOAL_DEBUG=1 shows the traceback."""
    from shoal_api.cli.errors import explain
    from shoal_api.cli.output import Output

    session = Session(url=url, output=Output(as_json=as_json))
    try:
        yield session
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except Exception as error:
        if os.environ.get("SHOAL_DEBUG") == "1":
            raise
        known = explain(error, url)
        session.output.fail(known or _unforeseen(error))
        raise typer.Exit(known.exit_code if known else ExitCode.FAILED) from None


def exit_code_of(state: JobState) -> ExitCode:
    """For commands that wait for a job's end."""
    from shoal_workers.contract.job import JobState

    return ExitCode.FAILED if state in (JobState.FAILED, JobState.CANCELLED) else ExitCode.OK


def _unforeseen(error: Exception) -> CliError:
    from shoal_api.cli.errors import CliError

    return CliError(
        f"{type(error).__name__}: {error}",
        hint="this is a bug; SHOAL_DEBUG=1 shows where",
        exit_code=ExitCode.FAILED,
    )
