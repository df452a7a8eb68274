"""Runs the tests of `make test` as two pytest processes side by side: on two cores they end sooner than one.

    python tools/run_tests.py [options of pytest]

Most tests that start many processes (tests/chaos, tests/dist, tests/ray) and those in a browser run in the foreground.
The others run beside them at a lower priority, which takes from them only what they leave; their output follows at the
end. The exit status is 0 if both succeed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("tests/unit", "tests/store", "tests/http", "tests/dist/checkpoint", "tests/dist/parallel")
_NICENESS = 5


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    ignored = [f"--ignore={folder}" for folder in BESIDE]
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(
            ["nice", "-n", str(_NICENESS), *pytest, *BESIDE], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            in_front = subprocess.run([*pytest, *ignored], cwd=ROOT).returncode
            status = beside.wait()
        finally:
            if beside.poll() is None:
                beside.terminate()
                beside.wait()
        print(f"== {', '.join(BESIDE)}", flush=True)
        output.seek(0)
        os.write(sys.stdout.fileno(), output.read())
    return in_front or status


if __name__ == "__main__":
    sys.exit(main())
