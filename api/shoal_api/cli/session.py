"""What all commands share: the decorator that makes a command of a function, the client, and which job JOB means.

    @command()
    def nodes(session: Session) -> None:
        \"\"\"List the nodes of the cluster.\"\"\"
        session.show(session.client.nodes(), render_nodes)

The client is imported when it is used first: commands that need no server start without it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import typer

from shoal_api.cli.errors import CliError, ExitCode, explain
from shoal_api.cli.options import DEFAULT_URL, JsonFlag, UrlOption
from shoal_api.cli.output import Output, Printable

if TYPE_CHECKING:
    from shoal_api.client import Client
    from shoal_service.views import JobSummary

P = ParamSpec("P")
T = TypeVar("T")
_NUM_RETRIES = 3
"""Retries take half a second in all, so that a mistyped address is reported quickly."""
_MAX_LISTED = 5
"""Most jobs that are listed if a name means several."""
_URL = inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, default=DEFAULT_URL, annotation=UrlOption)
_JSON = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonFlag)


@dataclass(frozen=True)
class Session:
    """One invocation of a command."""

    url: str
    output: Output
    _resources: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def client(self) -> Client:
        """A client of the server at `url`; it is closed when the command ends."""
        return self._resources.enter_context(self.open_client())

    def open_client(self) -> Client:
        """Open another client, which the caller closes."""
        from shoal_api.client import Client
        from shoal_api.client.transport import RetryPolicy

        self.check_url()
        return Client(self.url, retry=RetryPolicy(num_retries=_NUM_RETRIES))

    def check_url(self) -> None:
        """Raise CliError if `--url` is not the address of a server."""
        if not self.url.startswith(("http://", "https://")):
            raise CliError(f"--url {self.url!r} is not a valid URL", hint=f"for example: --url {DEFAULT_URL}")

    def show(self, result: T, text: Printable | Callable[[T], Printable]) -> None:
        """Write the result of the command: `text`, or what it makes of the result; with `--json` the result."""
        self.output.document(result, text)

    def job_id(self, reference: str) -> str:
        """Return the id of the job that `reference` names. An id is looked up directly; a name needs the list of
        jobs."""
        from shoal_api.client import ApiError

        try:
            if reference:
                return self.client.job(reference).id
        except ApiError as error:
            if error.problem.status not in (400, 404, 422):
                raise
        return match_job(reference, self.client.jobs(archived=True)).id

    def job_names(self, job_ids: Iterable[str]) -> dict[str, str]:
        """Return the names of jobs by id, without those that the user must not see."""
        listed = ", ".join(f'"{job_id}"' for job_id in sorted(job_ids))
        return {job.id: job.name for job in self.client.jobs(where=f"id in ({listed})")} if listed else {}

    def confirm(self, question: str, *, consequence: str = "this cannot be undone") -> None:
        """Ask a person whether to go on. Raises CliError if there is no terminal, Abort if the answer is no."""
        if self.output.as_json or not sys.stdin.isatty():
            raise CliError(f"{consequence}; there is no terminal to ask", hint="add --yes")
        typer.confirm(question, abort=True, err=True)


def command(
    *, url: bool = True, json: bool = True
) -> Callable[[Callable[Concatenate[Session, P], None]], Callable[..., None]]:
    """Make a command of a function that takes a Session first.

    The command has the options --url and --json besides the function's parameters, unless `url` or `json` is False. An
    error ends it with a short red text and an exit code; SHOAL_DEBUG=1 shows the traceback.
    """
    options = [*([_URL] if url else []), *([_JSON] if json else [])]

    def decorate(function: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(url: str = DEFAULT_URL, as_json: bool = False, **arguments: Any) -> None:
            with _session(url, as_json) as session:
                function(session, **arguments)  # type: ignore[call-arg]

        _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
        signature = inspect.Signature([*parameters, *options])
        run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        vars(run)["__signature__"] = signature
        return run

    return decorate


@contextmanager
def _session(url: str, as_json: bool) -> Iterator[Session]:
    """Open a session, and turn errors within it into a message and an exit code."""
    session = Session(url=url, output=Output(as_json=as_json))
    try:
        with session._resources:
            yield session
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except Exception as error:
        if os.environ.get("SHOAL_DEBUG") == "1":
            raise
        reported = explain(error, url) or CliError(
            f"{type(error).__name__}: {error}",
            hint="this is a bug; SHOAL_DEBUG=1 shows the traceback",
            exit_code=ExitCode.FAILED,
        )
        session.output.fail(reported)
        raise typer.Exit(reported.exit_code) from None


def match_job(reference: str, jobs: Iterable[JobSummary]) -> JobSummary:
    """Return the job that `reference` names. An exact id has priority over a name, and a name over the beginning of an
    id. If several jobs have the name, and only one of them has not ended, it is that one.

    Raises CliError if no job matches (exit code 4) or several do (exit code 2); the error lists them.
    """
    import difflib

    all_jobs = list(jobs)
    for candidates in (
        [job for job in all_jobs if job.id == reference],
        [job for job in all_jobs if job.name == reference],
        [job for job in all_jobs if reference and job.id.startswith(reference)],
    ):
        running = [job for job in candidates if not job.state.ended]
        if len(candidates) == 1 or len(running) == 1:
            return (candidates if len(candidates) == 1 else running)[0]
        if candidates:
            raise _ambiguous(reference, candidates)
    near = difflib.get_close_matches(reference, [job.name for job in all_jobs], n=1)
    raise CliError(
        f"there is no job {reference!r}",
        hint=(f"did you mean {near[0]!r}? " if near else "") + "`shoal jobs` lists them",
        exit_code=ExitCode.NOT_FOUND,
    )


def _ambiguous(reference: str, candidates: list[JobSummary]) -> CliError:
    from shoal_service.core.quantities import count_text

    newest = sorted(candidates, key=lambda job: job.created_at, reverse=True)
    more = len(newest) - _MAX_LISTED
    return CliError(
        f"{reference!r} matches {count_text(len(newest), 'job')}",
        details=(
            *(f"{job.id}  {job.name}  {job.state}" for job in newest[:_MAX_LISTED]),
            *((f"... and {more} more",) if more > 0 else ()),
        ),
        hint="give an id; the first one listed is the newest",
    )
