"""The exit codes of the `shoal` command. They are public: scripts rely on them, docs/reference/cli.md lists them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """0 means done."""

    OK = 0
    FAILED = 1
    """The job failed or was cancelled; the losses of two jobs differ by more than the tolerance; nothing fits (`plan`);
    the demo or a check of the doctor failed; or the server had an internal error."""
    USAGE = 2
    """Invalid options, an invalid spec, or a request that the job's state does not allow."""
    UNREACHABLE = 3
    """No server answers at --url."""
    NOT_FOUND = 4
    """No such job, or no such file."""
    INTERRUPTED = 130
    """Ctrl-C. A followed job continues."""
