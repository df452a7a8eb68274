"""The exit codes of the `shoal` command. They are public: scripts rely on them, docs/reference/cli.md lists them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """0 done; everything else says who has to act."""

    OK = 0
    FAILED = 1
    """The job failed or was cancelled, two jobs have no parity, the demo or a check of the doctor did not pass, or the
    server broke."""
    USAGE = 2
    """Wrong options, a spec that is refused, or a request that does not fit the job's state."""
    UNREACHABLE = 3
    """No server answers at --url."""
    NOT_FOUND = 4
    """No such job, or no such file."""
    INTERRUPTED = 130
    """Ctrl-C. A followed job goes on."""
