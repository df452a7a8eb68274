"""The interpreter of tests that is forked from a warm process does what the real one does."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kit.processes.fleet import PATIENCE_S
from kit.processes.warm import warm_python

_SCRIPT = """
import atexit, os, sys, threading
print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ["GIVEN"], sys.stdin.read())
atexit.register(print, "at exit")
threading.Thread(target=lambda: print("a thread")).start()
def fail():
    raise ValueError("said on standard error")
if "fail" in sys.argv:
    fail()
"""
_COMMANDS: dict[str, list[str]] = {
    "a script": ["script.py", "one", "two words"],
    "a script that fails": ["script.py", "fail"],
    "a module": ["-m", "json.tool", "--indent", "1"],
    "code": ["-c", "import sys; print(sys.argv, repr(sys.path[0]))", "-m", "x"],
    "an exit status": ["-c", "import sys; sys.exit(3)"],
    "an exit with a text": ["-c", "import sys; sys.exit('a reason')"],
    "a signal": ["-c", "import os; os.kill(os.getpid(), 11)"],
    "an error in the syntax": ["-c", "not python"],
    "without a buffer": ["-u", "-c", "import os; print('first'); os._exit(0)"],
    "another option": ["-I", "-c", "import sys; print(sys.flags.isolated)"],
}


def test_output_and_end_are_those_of_the_real_interpreter(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    environment = {**os.environ, "GIVEN": "a value"}
    ends = {
        python: {
            name: subprocess.run(
                [python, *command], cwd=tmp_path, env=environment, input='{"a": 1}', capture_output=True, text=True
            )
            for name, command in _COMMANDS.items()
        }
        for python in (warm_python(), sys.executable)
    }
    warm, real = (
        {name: (end.returncode, end.stdout, end.stderr) for name, end in by_name.items()} for by_name in ends.values()
    )
    assert warm == real


@pytest.mark.parametrize("way", ["terminate", "kill"])
def test_the_forked_process_ends_with_the_one_that_waits_for_it(way: str) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([warm_python(), "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        forked = os.pidfd_open(int(process.stdout.readline()))
        getattr(process, way)()
        assert process.wait(PATIENCE_S) == {"terminate": -15, "kill": -9}[way]
        assert select.select([forked], [], [], PATIENCE_S)[0], "it lives on"
        os.close(forked)


def test_a_forked_process_has_torch_before_its_program_begins() -> None:
    program = "import sys; print('torch' in sys.modules)"
    assert subprocess.run([warm_python(), "-c", program], capture_output=True, text=True).stdout == "True\n"
