"""What all commands share: common options, the client, which job JOB means, and the handling of errors.

Called by every command. Never imports heavy modules at the top: `shoal --help` must appear without a delay.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.output import Output
    from shoal_api.client import Client
    from shoal_service.views import JobSummary
    from shoal_workers.contract.job import JobState

DEFAULT_URL = "http://127.0.0.1:8470"
"""The client's default, repeated here because importing the client takes longer than showing the help."""
_NUM_RETRIES = 3
"""Retries take half a second in all, so that a mistyped address is reported quickly."""
_SHOWN = 5
"""Most jobs that are listed if a name means several."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Write only JSON to standard output.")]
UrlOption = Annotated[str, typer.Option("--url", envvar="SHOAL_URL", help="Address of the Shoal server.")]
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="Id, unique beginning of an id, or unique name of a job.")
]
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help='YAML or JSON file; "-" reads standard input.')]


@dataclass(frozen=True)
class Session:
    """One invocation of a command."""

    url: str
    output: Output

    def open_client(self) -> Client:
        from shoal_api.client import Client
        from shoal_api.client.transport import RetryPolicy

        self.check_url()
        return Client(self.url, retry=RetryPolicy(num_retries=_NUM_RETRIES))

    def check_url(self) -> None:
        """Raises CliError if `--url` is not the address of a server."""
        from shoal_api.cli.errors import CliError

        if not self.url.startswith(("http://", "https://")):
            raise CliError(f"--url {self.url!r} is not a valid URL", hint=f"for example: --url {DEFAULT_URL}")

    def job_id(self, client: Client, reference: str) -> str:
        """The id of the job that `reference` names. An id is looked up directly; a name needs the list of jobs."""
        from shoal_api.client import ApiError

        try:
            if reference:
                return client.job(reference).id
        except ApiError as error:
            if error.problem.status not in (400, 404, 422):
                raise
        return match_job(reference, client.jobs(archived=True)).id

    def deletable(self, client: Client, reference: str) -> str:
        """Finds a job as `job_id` does, and the id of a job whose deletion was begun: to delete it again does no
        harm."""
        if any(one.job_id == reference for one in client.deletions(limit=1000)):
            return reference
        return self.job_id(client, reference)


@contextmanager
def command(url: str, as_json: bool) -> Iterator[Session]:
    """Run a command's body. An error becomes a short red text and an exit code; SHOAL_DEBUG=1 shows the traceback."""
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
        session.output.fail(known or _unexpected(error))
        raise typer.Exit(known.exit_code if known else ExitCode.FAILED) from None


def match_job(reference: str, jobs: Iterable[JobSummary]) -> JobSummary:
    """The job that `reference` names. An exact id has priority over a name, and a name over the beginning of an id. Of
    several jobs of one name, the only one that has not ended is meant.

    Raises CliError if no job matches (exit code 4) or several do (exit code 2); the error lists them.
    """
    import difflib

    from shoal_api.cli.errors import CliError

    known = list(jobs)
    for candidates in (
        [job for job in known if job.id == reference],
        [job for job in known if job.name == reference],
        [job for job in known if reference and job.id.startswith(reference)],
    ):
        going_on = [job for job in candidates if not job.state.ended]
        if len(candidates) == 1 or len(going_on) == 1:
            return (candidates if len(candidates) == 1 else going_on)[0]
        if candidates:
            raise _ambiguous(reference, candidates)
    near = difflib.get_close_matches(reference, [job.name for job in known], n=1)
    raise CliError(
        f"there is no job {reference!r}",
        hint=(f"did you mean {near[0]!r}? " if near else "") + "`shoal jobs` lists them",
        exit_code=ExitCode.NOT_FOUND,
    )


def _ambiguous(reference: str, candidates: list[JobSummary]) -> CliError:
    from shoal_api.cli.errors import CliError
    from shoal_service.core.quantities import count_text

    newest = sorted(candidates, key=lambda job: job.created_at, reverse=True)
    more = len(newest) - _SHOWN
    return CliError(
        f"{reference!r} matches {count_text(len(newest), 'job')}",
        details=(
            *(f"{job.id}  {job.name}  {job.state}" for job in newest[:_SHOWN]),
            *((f"... and {more} more",) if more > 0 else ()),
        ),
        hint="give an id; the first one listed is the newest",
    )


def exit_code_of(state: JobState) -> ExitCode:
    """The exit code of a command that waited for the end of a job."""
    from shoal_workers.contract.job import JobState

    return ExitCode.FAILED if state in (JobState.FAILED, JobState.CANCELLED) else ExitCode.OK


def _unexpected(error: Exception) -> CliError:
    from shoal_api.cli.errors import CliError

    return CliError(
        f"{type(error).__name__}: {error}",
        hint="this is a bug; SHOAL_DEBUG=1 shows the traceback",
        exit_code=ExitCode.FAILED,
    )
