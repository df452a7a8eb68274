"""What a process writes to its standard output and error in any way is in the job's log, and where Ray put it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kit.processes.warm import warm_python

pytestmark = pytest.mark.dist

_PROGRAM = """
import ctypes, json, multiprocessing, os, subprocess, sys
from pathlib import Path
from shoal_workers.contract.messages import Phase, Progress
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.tee import CapturedOutput

outbox = Outbox(max_logs=100)
output = CapturedOutput(outbox, lambda text: text.replace("hunter2", "[secret]"), Path(sys.argv[1]))
def in_child():
    print("printed by a forked child")
{body}
output.flush()
now = Progress(generation=1, phase=Phase.FORWARD, step=3, at=0.0)
logs = [(line.stream, line.text) for line in outbox.poll(0, 0.0, now).logs]
Path(sys.argv[1], "logs").write_text(json.dumps(logs))
"""


def run(body: str, folder: Path, *, code: int = 0) -> tuple[list[list[str]], str, str]:
    """The job's log, and the process's own streams."""
    program = _PROGRAM.replace("{body}", body)
    done = subprocess.run([warm_python(), "-c", program, folder], capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    logs: Any = json.loads((folder / "logs").read_text()) if code == 0 else []
    return logs, *(stream.decode(errors="backslashreplace") for stream in (done.stdout, done.stderr))


@pytest.mark.parametrize(
    ("statement", "lines"),
    [
        ("print('printed')", ["printed"]),
        ("sys.stdout.writelines(['a\\n', 'b\\n'])", ["a", "b"]),
        ("sys.stdout.buffer.write(b'bytes\\n')", ["bytes"]),
        ("sys.__stdout__.write('the first stream\\n')", ["the first stream"]),
        ("os.write(1, b'below Python\\n')", ["below Python"]),
        ("ctypes.CDLL(None).puts(b'from C'); ctypes.CDLL(None).fflush(None)", ["from C"]),
        ("subprocess.run(['echo', 'a program'])", ["a program"]),
        ("subprocess.run(['echo', 'given the stream'], stdout=sys.stdout)", ["given the stream"]),
        (
            "child = multiprocessing.Process(target=in_child); child.start(); child.join()",
            ["printed by a forked child"],
        ),
        ("print('without an end', end='')", ["without an end"]),
        ("os.write(1, 'half a li'.encode() + 'né'.encode()[:2])", ["half a lin\\xc3"]),
    ],
)
def test_everything_that_is_written_is_in_the_log_and_passed_on(
    tmp_path: Path, statement: str, lines: list[str]
) -> None:
    logs, out, err = run(statement, tmp_path)
    assert logs == [["stdout", line] for line in lines]
    assert out.splitlines() == lines and err == ""


def test_escape_sequences_and_secrets_are_not_in_the_log(tmp_path: Path) -> None:
    logs, _, _ = run("os.write(1, b'\\x1b[2Jcleared \\x1b[31mred hunter2\\n')", tmp_path)
    assert logs == [["stdout", "cleared red [secret]"]]


def test_standard_error_is_captured_as_well(tmp_path: Path) -> None:
    logs, out, err = run("os.write(2, b'raw\\n'); print('printed', file=sys.stderr)", tmp_path)
    assert sorted(logs) == [["stderr", "printed"], ["stderr", "raw"]]
    assert (out, sorted(err.splitlines())) == ("", ["printed", "raw"])


def test_a_flood_from_code_that_holds_the_interpreter_blocks_nobody_and_is_passed_on_whole(tmp_path: Path) -> None:
    body = "for _ in range(200): ctypes.PyDLL(None).write(1, b'x' * 9999 + b'\\n', 10000)\nos.write(1, b'last\\n')"
    logs, out, _ = run(body, tmp_path)
    assert len(out) == 200 * 10_000 + 5
    assert logs[-1] == ["stdout", "last"]
    assert any("bytes of output were left out here" in text for _, text in logs)


def test_what_a_crashing_process_has_printed_is_passed_on_or_left_in_its_file(tmp_path: Path) -> None:
    body = "print('printed'); os.write(2, b'terminate called\\n'); os.kill(os.getpid(), 9)"
    _, out, err = run(body, tmp_path, code=-9)
    [left] = tmp_path.glob("*.stderr")
    assert out == "printed\n" and "terminate called\n" in (err, left.read_text())
