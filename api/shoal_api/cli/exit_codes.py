"""The exit codes of the `shoal` command. They are public: scripts rely on them, docs/reference/cli.md lists them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """0 means done; `MEANINGS` explains the others."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    INTERRUPTED = 130


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
