"""Errors as a person reads them: one short sentence and a hint. `explain` is the only place that converts errors.

CliError
  raised by the commands, and made by `explain` from
    SpecError              an invalid spec                    -> exit code 2
    CodeArchiveError       a working_dir that cannot be sent  -> 2
    SettingsError, StoreUnavailable                           -> 2
    StateDirectoryInUse, BackupError                          -> 2
    client.ApiError        a problem document of the server   -> 4 (404), 2 (other 4xx), 1 (5xx)
    client.Disconnected    no server answers                  -> 3
    client.UntrustedServer the port is another user's         -> 2

The exit codes of the `shoal` command. They are public: scripts rely on them, docs/reference/cli.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal_api.client import ApiError
from enum import IntEnum


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
def reading(path: Path, hint: str) -> Iterator[None]:
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
    from shoal_api.client.credentials import TokenSource, find_token_source, logins_path, owner_file

    invalid = "is not valid: it has expired or was revoked, or it is another server's"
    match find_token_source(url):
        case None:
            return None
        case TokenSource.ENVIRONMENT:
            message = f"the token in SHOAL_TOKEN {invalid}"
            hint = "set SHOAL_TOKEN to another one, or unset it; an admin makes one with `shoal token create`"
        case TokenSource.LOGIN:
            message = f"the token that `shoal login` has stored for {url} ({logins_path()}) {invalid}"
            hint = "`shoal login` with another one, or `shoal logout` to forget it"
        case TokenSource.OWNER:
            message = f"the token of the server's owner, in {owner_file()}, {invalid}"
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
