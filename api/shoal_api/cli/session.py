"""What all commands share: the decorator that makes a command of a function, the client, and which job JOB means.

    @command()
    def nodes(session: Session) -> None:
        \"\"\"List the nodes of the cluster.\"\"\"
        session.show(session.client.nodes(), render_nodes)

Also the options that several commands have, the output and the errors. Results go to standard output, progress and
errors to standard error; with `--json` standard output holds JSON only: one document, or one line per item of a stream.
`explain` is the only place that converts errors to a short sentence with a hint:

    SpecError              an invalid spec                    -> exit code 2
    CodeArchiveError       a working_dir that cannot be sent  -> 2
    SettingsError, StoreUnavailable                           -> 2
    StateDirectoryInUse, BackupError                          -> 2
    client.ApiError        a problem document of the server   -> 4 (404), 2 (other 4xx), 1 (5xx)
    client.Disconnected    no server answers                  -> 3
    client.UntrustedServer the port is another user's         -> 2

The exit codes are public: scripts rely on them, docs/reference/cli.md lists them. `shoal --help` loads this module, so
client, pydantic and rich are imported when they are used first.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Concatenate, ParamSpec, TypeAlias, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from shoal_api.client import ApiError, Client
    from shoal_service.views import JobSummary


DEFAULT_URL = "http://127.0.0.1:8470"
"""The client's default, repeated here because importing the client takes longer than showing the help."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Write only JSON to standard output.")]
UrlOption = Annotated[str, typer.Option("--url", envvar="SHOAL_URL", help="Address of the Shoal server.")]
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="Id, unique beginning of an id, or unique name of a job.")
]
JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="JOB...", help="Ids, unique beginnings of ids, or unique names of jobs."),
]
LabelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="NAME[=VALUE]",
        help="Instead of JOB: all jobs with this label; also !NAME and NAME!=VALUE. May be repeated.",
    ),
]
WhereOption = Annotated[
    str,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Instead of JOB: all jobs for which it holds, after a question: 'loss > 3 and label.team == \"speech\"'.",
    ),
]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help='YAML or JSON file; "-" reads standard input.')]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change the spec; may be repeated.")
]


def keep_given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


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
        from shoal_api.client import Client
        from shoal_api.client.transport import RetryPolicy

        self.check_url()
        client = Client(self.url, retry=RetryPolicy(num_retries=_NUM_RETRIES))
        return self._resources.enter_context(client)

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

    def job_and_step(self, text: str, option: str = "") -> tuple[str, int | None]:
        """Return the id of the job, and the step, that JOB or JOB@STEP names. The names of jobs have no @."""
        reference, at, step = text.partition("@")
        if at and not (step.isascii() and step.isdigit()):
            hint = "for example: my-job@120; without @ the newest checkpoint is taken"
            raise CliError(f"{option} {text!r}: {step!r} is not a step".lstrip(), hint=hint)
        return self.job_id(reference), int(step) if at else None

    def job_names(self, job_ids: Iterable[str]) -> dict[str, str]:
        """Return the names of jobs by id, without those that the user must not see."""
        listed = ", ".join(f'"{job_id}"' for job_id in sorted(job_ids))
        return {job.id: job.name for job in self.client.jobs(where=f"id in ({listed})")} if listed else {}

    def confirm(self, question: str, *, consequence: str = "this cannot be undone") -> None:
        """Ask a person whether to go on. Raises CliError if there is no terminal, Abort if the answer is no."""
        if self.output.as_json or not sys.stdin.isatty():
            raise CliError(f"{consequence}, and there is no terminal to confirm it", hint="add --yes")
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


class ExitCode(IntEnum):
    """0 means done; `MEANINGS` explains the others."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    INTERRUPTED = 130


class CliError(Exception):
    """Ends the command with an exit code; `details` are further lines, one per problem."""

    def __init__(
        self, message: str, *, hint: str = "", exit_code: ExitCode = ExitCode.USAGE, details: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.details = details

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "error": {
                "message": self.message,
                "details": list(self.details),
                "hint": self.hint,
                "exit_code": int(self.exit_code),
            }
        }


def refuse_with(option: str, **others: Any) -> None:
    """Refuse options that do nothing when `option` is given. Raises CliError."""
    names = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    if names:
        raise CliError(f"{option} cannot be combined with {', '.join(names)}", hint=f"leave {names[0]} out")


@contextmanager
def explain_read_errors(path: Path, hint: str) -> Iterator[None]:
    """Turn the errors of reading a file into CliError."""
    try:
        yield
    except FileNotFoundError:
        raise CliError(f"there is no file {path}", exit_code=ExitCode.NOT_FOUND, hint="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"cannot read {path}: {error}", hint=hint) from None


def explain(error: Exception, url: str) -> CliError | None:
    """Return the error for people; None if the error is unexpected, which is a bug in Shoal."""
    from shoal_api.client import ApiError, Disconnected, UntrustedServer
    from shoal_service.control.code_archive import CodeArchiveError
    from shoal_service.problems import SettingsError
    from shoal_service.state_lock import StateDirectoryInUse
    from shoal_service.store import StoreUnavailable
    from shoal_service.store.errors import BackupError
    from shoal_workers.contract.checks.spec_errors import SpecError

    match error:
        case CliError():
            return error
        case SpecError():
            return CliError(
                "the spec is not valid",
                details=tuple(str(error).splitlines()),
                hint="`shoal schema` prints every key with its meaning and default",
            )
        case ApiError():
            return _from_problem(error, url)
        case SettingsError() | StoreUnavailable():
            first, *rest = str(error).splitlines() or [type(error).__name__]
            return CliError(first, details=tuple(rest), hint="`shoal serve --help` lists the options")
        case StateDirectoryInUse() | BackupError():
            return CliError(str(error))
        case CodeArchiveError():
            return CliError(f"code.working_dir cannot be packed: {error}", hint="correct code.working_dir in the spec")
        case UntrustedServer():
            return CliError(str(error), hint="another program may have taken the port of your server")
        case Disconnected():
            return unreachable(url, error.cause)
        case _:
            return None


def _from_problem(error: ApiError, url: str) -> CliError:
    problem = error.problem
    if problem.status == 401 and (refused := _refused_token(url)) is not None:
        return refused
    if problem.status == 404:
        exit_code, hint = ExitCode.NOT_FOUND, "`shoal jobs` lists the jobs"
    elif problem.status == 401:
        exit_code, hint = ExitCode.USAGE, "`shoal login` keeps a token for this address"
    elif problem.status < 500:
        exit_code, hint = ExitCode.USAGE, ""
    else:
        exit_code, hint = ExitCode.FAILED, "the server's log has the cause"
        if problem.error_id:
            hint += f" under {problem.error_id}"
    return CliError(
        f"{problem.title}: {problem.detail}",
        hint=hint,
        exit_code=exit_code,
        details=tuple(f"{item.path}: {item.message}" if item.path else item.message for item in problem.errors),
    )


def _refused_token(url: str) -> CliError | None:
    """Say what to do about a token that the server does not accept, by where it came from. None if there is none."""
    from shoal_api.client.credentials import TokenSource, find_logins_path, find_owner_file, find_token_source

    invalid = "is not valid: it has expired or was revoked, or it is another server's"
    match find_token_source(url):
        case None:
            return None
        case TokenSource.ENVIRONMENT:
            message = f"the token in SHOAL_TOKEN {invalid}"
            hint = "set SHOAL_TOKEN to another one, or unset it; an admin makes one with `shoal token create`"
        case TokenSource.LOGIN:
            message = f"the token that `shoal login` has stored for {url} ({find_logins_path()}) {invalid}"
            hint = "`shoal login` with another one, or `shoal logout` to forget it"
        case TokenSource.OWNER:
            message = f"the token of the server's owner, in {find_owner_file()}, {invalid}"
            hint = (
                "restart `shoal serve`, which replaces a revoked one; if this server has another state directory, set "
                "SHOAL_STATE_DIR to it"
            )
    return CliError(message, hint=hint)


def unreachable(url: str, why: str) -> CliError:
    return CliError(
        f"no Shoal server answers at {url} ({why or 'connection failed'})",
        hint="start one with `shoal serve`, or give its address with --url or SHOAL_URL",
        exit_code=ExitCode.UNREACHABLE,
    )


MEANINGS = {
    ExitCode.OK: "Done. With `--follow`, `--wait` and `watch`: the job succeeded.",
    ExitCode.FAILED: "The job failed or was cancelled; the losses of two jobs differ by more than the tolerance "
    "(`parity`); no layout fits (`plan`); a policy leaves jobs waiting for ever (`simulate`); "
    "the demo or a check of the doctor failed; the server had an internal error.",
    ExitCode.USAGE: "Invalid options, an invalid spec, or a request that the job's state does not allow.",
    ExitCode.UNREACHABLE: "No server answers at `--url`.",
    ExitCode.NOT_FOUND: "There is no such job, node, incident or file.",
    ExitCode.INTERRUPTED: "Ctrl-C. A followed job continues.",
}


Printable: TypeAlias = "RenderableType | list[RenderableType]"
"""What rich prints: a table, a text, or several of them below each other."""
_PIPED_WIDTH = 200
"""Columns when standard output is not a terminal: a table that wraps at 80 columns cannot be searched with grep."""


@dataclass(frozen=True)
class Output:
    """The output of one invocation of a command."""

    as_json: bool

    @cached_property
    def stdout(self) -> Console:
        return _console(stderr=False)

    @cached_property
    def stderr(self) -> Console:
        return _console(stderr=True)

    @property
    def live(self) -> bool:
        """Standard output is a terminal, so moving elements are allowed."""
        return not self.as_json and self.stdout.is_terminal

    def document(self, value: T, text: Printable | Callable[[T], Printable]) -> None:
        """Write the result of a command: `text`, or what it makes of the value; with `--json` the value."""
        if self.as_json:
            self._write(value, indent=2)
            return
        rendered = text(value) if callable(text) else text
        for part in rendered if isinstance(rendered, list) else [rendered]:
            self.stdout.print(part)

    def line(self, value: Any, text: str, style: str = "plain") -> None:
        """Write one item of a stream and flush it."""
        if self.as_json:
            self._write(value, separators=(",", ":"))
        else:
            self.stdout.print(text, style=STYLES[style], soft_wrap=True)

    def note(self, text: str, style: str = "plain") -> None:
        """Write a line for people to standard output; with `--json` to standard error."""
        (self.stderr if self.as_json else self.stdout).print(text, style=STYLES[style], soft_wrap=True)

    def say(self, text: str, style: str = "plain") -> None:
        """Write a progress message for people to standard error."""
        self.stderr.print(text, style=STYLES[style], soft_wrap=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Say on standard error what is being done while it takes time: on a terminal a line that disappears."""
        if self.stderr.is_terminal:
            with self.stderr.status(text):
                yield
        else:
            self.say(text, "dim")
            yield

    def fail(self, error: CliError) -> None:
        """Write the error to standard error; with `--json` also as a document to standard output."""
        if self.as_json:
            self._write(error.document())
        self.say(f"error: {error.message}", "bad")
        for detail in error.details:
            self.say(f"  {detail}", "bad")
        if error.hint:
            self.say(f"  {error.hint}", "dim")

    def _write(self, value: Any, **layout: Any) -> None:
        """Write a value, which may hold models, as JSON in this layout."""
        from pydantic_core import to_jsonable_python

        sys.stdout.write(json.dumps(to_jsonable_python(value), **layout) + "\n")
        sys.stdout.flush()


@contextmanager
def open_output(path: Path | None, *, parents: bool = False) -> Iterator[BinaryIO]:
    """Open a file that appears under its name only when all of it is written; without a path, or if it is `-`, the
    standard output. `parents`: make missing directories. Raises CliError."""
    if path is None or str(path) == "-":
        yield sys.stdout.buffer
        return
    part = path.with_name(f"{path.name}.part")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


STYLES = {"plain": "", "bold": "bold", "good": "green", "warn": "yellow", "bad": "red", "dim": "dim"}


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console.width = _PIPED_WIDTH
    return console
