"""The console script `shoal`. It loads the command line, and leaves quietly if Ctrl-C is pressed meanwhile.

Nothing is imported before that, because an interrupt within an import would be shown as a traceback.
"""

import os
import signal
from types import FrameType

_INTERRUPTED = 130
"""Equal to `ExitCode.INTERRUPTED`, which is not imported yet."""


def main() -> None:
    """Run the command line; ends the process with one of `ExitCode`."""
    usual = signal.signal(signal.SIGINT, _leave)
    from shoal_api.cli.main import main as run

    signal.signal(signal.SIGINT, usual)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing was begun, so nothing is to be ended. An exception could be lost, or renamed, inside of an import."""
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
