"""Ctrl-C while the command line is still being loaded, in a process of its own, at a given import."""

import signal
import subprocess
import sys

import pytest

INTERRUPTED = f"""
import os, signal, sys

INTERRUPTED_AT = sys.argv[1]

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == INTERRUPTED_AT:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {signal.SIGINT:d})
        return None

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
from shoal_api.cli.entry import main
sys.argv = ["shoal", "version"]
main()
"""


@pytest.mark.parametrize("module", ["typer", "shoal_api.cli.main", "shoal_api.cli.commands.doctor"])
def test_an_interrupt_while_the_command_line_is_loaded_is_no_traceback(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_entry_runs_the_command_line_and_gives_ctrl_c_back_its_meaning() -> None:
    look = "\nimport signal; sys.exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)"
    program = INTERRUPTED.replace("main()\n", "try:\n    main()\nexcept SystemExit:\n    pass\n") + look
    done = subprocess.run([sys.executable, "-c", program, "-"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("shoal "), done.stderr
