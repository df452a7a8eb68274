"""Every way in which a script can end by itself, as its runner reports it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes.script_bench import Events, ScriptBench
from shoal_workers.contract.exception_causes import ErrorClass
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase

Bench = Callable[..., ScriptBench]

_RAISES = """
import sys

class Mistake(Exception):
    pass

def step(values):
    return values[7]

def main():
    try:
        step([1, 2])
    except IndexError as error:
        raise Mistake("no seventh value") from error

main()
"""


def _error(bench: ScriptBench, kind: ExitKind = ExitKind.USER_ERROR) -> ErrorReport:
    [end] = bench.run()
    assert end.kind is kind
    assert end.step == 0
    assert end.error is not None
    return end.error


def test_exit_status_0_is_the_end_of_the_training(bench: Bench) -> None:
    [end] = bench("pass").run()
    assert (end.kind, end.error, end.step) == (ExitKind.FINISHED, None, 0)


def test_an_exception_is_reported_with_the_line_of_the_script(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    error = _error(bench(_RAISES))
    assert (error.type, error.message, error.line) == ("Mistake", "no seventh value", "train.py:14 in main()")
    assert (error.phase, error.mistake, error.error_class) == (Phase.SCRIPT, "", ErrorClass.PLAIN)
    assert error.sentence == "Mistake: no seventh value (train.py:14 in main())"
    assert "IndexError" in error.traceback and "return values[7]" in error.traceback
    assert "shoal_workers" not in error.traceback
    printed = capfd.readouterr().err
    assert printed.startswith("Traceback (most recent call last):") and printed.endswith("no seventh value\n")
    assert "shoal_workers" not in printed, "as Python prints it"


def test_an_exit_status_is_reported_in_a_sentence(bench: Bench) -> None:
    error = _error(bench("import sys; sys.exit(3)"))
    assert (error.type, error.mistake) == ("ExitStatus", "exit_status")
    assert error.sentence == "train.py ended with exit status 3 at train.py:1, and its log says why."


def test_a_script_that_ends_with_a_text_has_failed(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    error = _error(bench("import sys; sys.exit('no data')"))
    assert error.sentence == "train.py ended with exit status 1 at train.py:1: no data"
    assert capfd.readouterr().err == "no data\n"


def test_what_a_script_writes_into_torchruns_error_file_is_said(bench: Bench) -> None:
    text = """
import sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def train():
    raise ValueError("no data")

try:
    train()
except ValueError:
    sys.exit(9)
"""
    sentence = "train.py ended with exit status 9 at train.py:7 in train(): ValueError: no data"
    assert _error(bench(text)).sentence == sentence


_RECORDED = """
import os, subprocess, sys
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    if sys.argv[1] == "execv":
        os.execv(sys.executable, [sys.executable, *sys.argv])
    subprocess.run([sys.executable, *sys.argv])
    raise SystemExit(0)
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    for number in range(4):
        globals()[number] = open(f"part{number}", "w")
        globals()[number].write("0.9")
        globals()[number].flush()
    raise ValueError("no metric")

main()
"""


@pytest.mark.parametrize("how", ["execv", "child"])
def test_another_program_with_torchelastics_record_overwrites_no_file_of_its_own(bench: Bench, how: str) -> None:
    runners = bench(_RECORDED, script={"args": [how]})
    [end] = runners.run()
    assert [(runners.folder / f"part{number}").read_text() for number in range(4)] == ["0.9"] * 4
    if how == "child":
        assert end.kind is ExitKind.FINISHED
    else:
        assert end.error is not None
        assert end.error.sentence == "train.py ended with exit status 1 at train.py:17 in main(): ValueError: no metric"


_THREAD = """
import sys, threading
import events
threading.Thread(target=threading.Event().wait).start()
def step():
    raise RuntimeError("no seventh shard: Connection closed by peer")
step()
"""


def test_an_exception_ends_a_process_whose_threads_go_on(bench: Bench) -> None:
    runners = bench(_THREAD, script={"grace_s": 0.5})
    [end] = runners.run()
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert end.error.line == "train.py:6 in step()" and end.error.message.startswith("no seventh shard")
    assert len(runners.said()) == 1 and "because of its threads" in runners.said()[0]


@pytest.mark.parametrize(("end", "status"), [("'no data'", "1 at train.py:4: no data"), ("3", "3 at train.py:4, and")])
def test_a_script_that_ends_with_a_text_has_failed_although_its_threads_go_on(
    bench: Bench, end: str, status: str
) -> None:
    text = "import sys, threading\nevent = threading.Event()\nthreading.Thread(target=event.wait).start()\n"
    error = _error(bench(f"{text}sys.exit({end})", script={"grace_s": 0.5}))
    assert error.sentence.startswith(f"train.py ended with exit status {status}")


def test_a_breakpoint_is_that_of_python_with_empty_input(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")  # as Ray has it in its workers
    error = _error(bench("x = 1\nbreakpoint()\nprint(x)"))
    assert error.type == "bdb.BdbQuit" and error.line == "train.py:3"


def test_ps_shows_the_script(bench: Bench, events: Events) -> None:
    runners = bench("import events; events.say(ready=True); events.wait()", script={"args": ["--lr", "3"]})
    runners.start()
    pid = events.next(ready=True)["pid"]
    shown = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    os.kill(pid, signal.SIGKILL)
    runners.exits()
    assert shown == [b"python", b"-u", b"train.py", b"--lr", b"3"]


def test_tensors_of_unequal_sizes_are_named_with_the_line(bench: Bench) -> None:
    text = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
size = 4 - dist.get_rank()
dist.all_gather([torch.zeros(size) for _ in range(2)], torch.zeros(size))
"""
    with tempfile.TemporaryFile() as stderr:  # as in a worker
        own = os.dup(2)
        os.dup2(stderr.fileno(), 2)
        try:
            runners = bench(text, 2)
            runners.start()
            ends = runners.exits()
        finally:
            os.dup2(own, 2)
            os.close(own)
    first = min(ends, key=lambda end: end.kind is not ExitKind.USER_ERROR)
    assert first.kind is ExitKind.USER_ERROR and first.error is not None
    assert first.error.sentence.startswith("a collective of train.py at train.py:5 has received 8 bytes and expects 6")


def test_a_crash_is_the_scripts_own(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    error = _error(bench("import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()"))
    assert (error.type, error.mistake) == ("Crash", "crash")
    assert error.sentence.startswith(
        "train.py crashed at train.py:3 in crash(): its process was killed by signal 11 (SIGSEGV)."
    )
    assert "line 3 in crash" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("printed", "kind"),
    [("", ExitKind.USER_ERROR), ("Watchdog caught collective operation timeout", ExitKind.COLLECTIVE_FAILED)],
)
def test_an_abort_is_judged_by_what_the_process_printed_before(bench: Bench, printed: str, kind: ExitKind) -> None:
    with tempfile.TemporaryFile() as stderr:  # as in a worker
        own = os.dup(2)
        os.dup2(stderr.fileno(), 2)
        try:
            [end] = bench(f"import os, sys\nprint({printed!r}, file=sys.stderr)\nos.abort()").run()
        finally:
            os.dup2(own, 2)
            os.close(own)
    assert end.kind is kind and end.error is not None and end.error.mistake == "crash"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_from_outside_is_not_the_scripts_fault(bench: Bench, events: Events, number: signal.Signals) -> None:
    runners = bench("import events; events.say(ready=True); events.wait()")
    runners.start()
    os.kill(events.next(ready=True)["pid"], number)
    [end] = runners.exits()
    assert end.kind is ExitKind.SCRIPT_DIED and end.error is not None
    assert end.error.sentence == f"the process of train.py was killed by signal {number.value} ({number.name})"
    assert runners.said() == [end.error.sentence]


def test_a_full_disk_is_a_fault_of_the_node(bench: Bench) -> None:
    error = _error(
        bench("import errno, os\nraise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))"), ExitKind.WORKER_FAULT
    )
    assert error.error_class is ErrorClass.SYSTEM


def test_a_module_that_does_not_exist_is_named(bench: Bench) -> None:
    error = _error(bench("", script={"file": None, "module": "missing.train"}))
    assert error.sentence.startswith("ModuleNotFoundError: No module named 'missing'")


def test_a_file_that_does_not_exist_is_refused_before_the_group_forms(bench: Bench) -> None:
    runners = bench("", script={"file": "trian.py"})
    [end] = runners.run()
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert end.error.sentence == (
        "script.file trian.py is not in the code directory of the job (code.working_dir). It has events.py, train.py."
    )


_COLLECTIVES = """
import torch, torch.distributed as dist, events
dist.init_process_group("gloo")
events.say(rank=dist.get_rank(), ready=True)
while True:
    dist.all_reduce(torch.ones(1))
"""


def test_a_collective_that_a_dead_rank_has_broken_is_no_mistake_of_the_script(bench: Bench, events: Events) -> None:
    runners = bench(_COLLECTIVES, 2)
    runners.start()
    os.kill(events.next(rank=1, ready=True)["pid"], signal.SIGKILL)
    first, second = runners.exits()
    assert second.kind is ExitKind.SCRIPT_DIED
    assert first.kind is ExitKind.COLLECTIVE_FAILED and first.error is not None
    assert first.error.line == "train.py:6"


def test_a_failure_after_which_the_group_is_interrupted_is_a_consequence(bench: Bench, events: Events) -> None:
    runners = bench(_COLLECTIVES, 2)
    runners.start()
    os.kill(events.next(rank=1, ready=True)["pid"], signal.SIGKILL)
    assert runners.exit_of(1).kind is ExitKind.SCRIPT_DIED
    runners.runners[0].interrupt(runners.generation)  # as the supervisor does
    assert runners.exit_of(0).kind is ExitKind.INTERRUPTED
