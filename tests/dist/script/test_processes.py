"""The tree of a script's processes: what a process finds, and that nothing of it is left, whatever dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes.script_bench import PATIENCE_S, Events, ForkServer, ScriptBench, num_descriptors, write_script
from kit.processes.server import until
from shoal_workers import stacks
from shoal_workers.contract.messages import ExitKind, Phase, StackSource
from shoal_workers.engine.process.use_meter import UseMeter
from shoal_workers.script.guardian import LOOK_AT_ALL_S, LOOK_S, Work, below

Bench = Callable[..., ScriptBench]
PROGRAM = Path(__file__).parents[2] / "kit" / "programs" / "script_worker.py"

_DESCRIBES = """
import events, os, signal, sys, threading
print("printed", end="")
events.say(
    argv=sys.argv, path=sys.path[0], name=__name__, file=globals().get("__file__"), cwd=os.getcwd(),
    main=sys.modules["__main__"].__dict__ is globals(), stdin=sys.stdin.read(), umask=os.umask(0o22),
    defaults=[signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)],
    interrupt=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), session=os.getsid(0), group=os.getpgid(0),
    threads=len(os.listdir("/proc/self/task")), descriptors=sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    is_warm="torch" in sys.modules, is_internal="SHOAL_FORK_SERVER" in os.environ,
)
"""
_LEAVES_CHILDREN = """
import events, subprocess, sys

CHILD = '''
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
events.say(ready=True)
"""


def _is_alive(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def test_a_script_finds_what_a_new_interpreter_would_find(
    bench: Bench, events: Events, capfd: pytest.CaptureFixture[str]
) -> None:
    runners = bench(_DESCRIBES, script={"args": ["--lr", "3e-4"]})
    [end] = runners.run()
    assert end.kind is ExitKind.FINISHED
    found = events.next()
    folder = str(runners.folder)
    assert found["argv"] == ["train.py", "--lr", "3e-4"]
    assert (found["path"], found["name"], found["file"]) == (folder, "__main__", f"{folder}/train.py")
    assert (found["cwd"], found["main"], found["stdin"], found["umask"]) == (folder, True, "", 0o22)
    assert all(found["defaults"]) and found["interrupt"] and found["blocked"] == 0
    assert found["session"] == found["group"] == found["pid"]
    assert found["is_warm"], "forked from a process that has imported torch"
    assert found["threads"] == 1
    assert [number for number in found["descriptors"] if number > 2] == found["descriptors"][3:6], (
        "two files and the events"
    )
    assert not found["is_internal"]
    assert capfd.readouterr().out == "printed"


def test_a_module_is_run_as_with_python_m(bench: Bench, events: Events) -> None:
    runners = bench("", script={"file": None, "module": "package.train", "args": ["a"]})
    write_script(runners.folder / "package", "", "__init__.py")
    write_script(runners.folder / "package", _DESCRIBES)
    assert runners.run()[0].kind is ExitKind.FINISHED
    found = events.next()
    assert found["argv"] == [f"{runners.folder}/package/train.py", "a"]
    assert (found["path"], found["name"], found["main"]) == (str(runners.folder), "__main__", True)


def test_a_module_beside_the_script_wins_over_an_imported_one(bench: Bench, events: Events) -> None:
    runners = bench("import events, yaml; events.say(own=yaml.OWN)")
    (runners.folder / "yaml.py").write_text("OWN = 7")
    assert runners.run()[0].kind is ExitKind.FINISHED
    assert events.next()["own"] == 7


def test_processes_that_a_script_starts_from_its_own_file_work(bench: Bench, events: Events) -> None:
    text = """
import multiprocessing, events

def square(value):
    return value * value

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        events.say(result=pool.apply(square, (7,)))
"""
    assert bench(text).run()[0].kind is ExitKind.FINISHED
    assert events.next()["result"] == 49


@pytest.mark.parametrize("way", ["ends", "is interrupted"])
def test_what_a_script_starts_ends_with_it(bench: Bench, events: Events, way: str) -> None:
    runners = bench(_LEAVES_CHILDREN + ("" if way == "ends" else "events.wait()\n"))
    runners.prepare()
    guardian = runners.runners[0].guardian_pid
    runners.start()
    pid = events.next(ready=True)["pid"]
    tree = below(pid) | {pid} if way != "ends" else set()
    if way != "ends":
        assert len(tree) == 3, "the script, its child and its grandchild, in three sessions"
        runners.on_all(lambda runner: runner.interrupt(1))
    runners.exits()
    assert below(guardian) == set()
    assert not any(map(_is_alive, tree))


@pytest.mark.parametrize("dies", ["worker", "guardian"])
def test_nothing_is_left_of_a_script_whose_worker_or_guardian_is_killed(
    fork_server: ForkServer, events: Events, tmp_path: Path, dies: str
) -> None:
    write_script(tmp_path, _LEAVES_CHILDREN + "events.wait()\n")
    worker = subprocess.Popen(
        [sys.executable, PROGRAM, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"SHOAL_FORK_SERVER": fork_server.address},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    try:
        guardian = int(worker.stdout.readline())
        pid = events.next(ready=True)["pid"]
        tree = below(guardian)
        assert len(tree) == 3 and pid in tree
        ends = [os.pidfd_open(one) for one in (*tree, guardian)]
        os.kill(worker.pid if dies == "worker" else guardian, signal.SIGKILL)
        _wait_for_ends(ends)
        if dies == "guardian":
            assert worker.stdout.readline() == "script_died\n"
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


def _wait_for_ends(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000), "a process is left"
        os.close(pidfd)


@pytest.mark.parametrize("is_in_child", [False, True])
def test_a_process_works_while_it_or_its_children_use_a_cpu(is_in_child: bool) -> None:
    program = """
import sys, time
print(flush=True)
for line in sys.stdin:
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass
    print(flush=True)
"""
    if is_in_child:
        program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        work = Work(process.pid, 0.0)
        assert not work.has_gone_on(2 * LOOK_AT_ALL_S), "it waits"
        process.stdin.write("on\n")
        process.stdin.flush()
        process.stdout.readline()
        assert work.has_gone_on(3 * LOOK_AT_ALL_S)
        assert not work.has_gone_on(3 * LOOK_AT_ALL_S + LOOK_S / 2), "too early for a look"
        process.stdin.close()


def test_the_stack_of_a_script_is_that_of_its_own_code(bench: Bench, events: Events) -> None:
    if stacks.find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    runners = bench("import events\ndef stand_still():\n    events.say(ready=True)\n    events.wait()\nstand_still()")
    runners.start()
    events.next(ready=True)
    runner = runners.runners[0]
    found = stacks.of_script("w0", runner.progress, runner.pid_of_script)
    assert (found.error, found.phase, found.source) == ("", Phase.SCRIPT, StackSource.PY_SPY)
    own = [(frame.function, Path(frame.file).name, frame.line) for frame in found.frames[-2:]]
    assert own == [("stand_still", "train.py", 4), ("<module>", "train.py", 5)]
    assert runners.interrupt()[0].kind is ExitKind.INTERRUPTED
    assert stacks.of_script("w0", runner.progress, runner.pid_of_script).frames == ()


def test_what_a_script_takes_of_its_machine_is_the_workers(bench: Bench, events: Events, tmp_path: Path) -> None:
    runners = bench("import events; memory = bytearray(b'x') * (256 << 20); events.say(ready=True); events.wait()")
    meter = UseMeter(str(tmp_path), has_gpu=False)
    before = meter.measure().resident_bytes
    runners.start()
    events.next(ready=True)
    meter.processes = runners.runners[0].processes
    assert meter.measure().resident_bytes - before > 200 << 20


def test_a_runner_goes_on_after_its_guardian_was_killed(bench: Bench, events: Events) -> None:
    runners = bench("import events; events.say(ready=True); events.wait()")
    runners.start()
    events.next(ready=True)
    os.kill(runners.runners[0].guardian_pid, signal.SIGKILL)
    assert runners.exits()[0].kind is ExitKind.SCRIPT_DIED
    runners.start()
    events.next(ready=True)
    assert runners.interrupt()[0].kind is ExitKind.INTERRUPTED
    idle = os.pidfd_open(runners.runners[0].guardian_pid)
    signal.pidfd_send_signal(idle, signal.SIGKILL)
    _wait_for_ends([idle])
    runners.start()
    events.next(ready=True)
    assert runners.interrupt()[0].kind is ExitKind.INTERRUPTED


def test_the_libraries_of_the_last_script_are_imported_before_the_next_one(bench: Bench, events: Events) -> None:
    text = """
import sys
import events
known = [name for name in ("plistlib", "helper") if name in sys.modules]
import helper, plistlib
events.say(known=known)
"""
    runners = bench(text)
    (runners.folder / "helper.py").touch()
    for known in ([], ["plistlib"]):
        assert runners.run()[0].kind is ExitKind.FINISHED
        assert events.next()["known"] == known, "its own modules are new in each process"


def test_a_stream_that_a_library_keeps_is_that_of_the_process(
    bench: Bench, events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that was imported by the guardian may have kept its standard error, for example for its log."""
    text = """
import events, sys
was_known = "logging_library" in sys.modules
import io, logging_library
sys.stderr = io.StringIO()
logging_library.log.warning("hello")
events.say(was_known=was_known, said=sys.stderr.getvalue())
"""
    library = tmp_path / "site-packages" / "logging_library.py"
    library.parent.mkdir()
    library.write_text(
        "import logging\nlog = logging.getLogger('library')\nlog.propagate = False\n"
        "log.addHandler(logging.StreamHandler())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(library.parent), prepend=os.pathsep)
    runners = bench(text)
    for said, was_known in (("", False), ("hello\n", True)):
        assert runners.run()[0].kind is ExitKind.FINISHED
        found = events.next()
        assert (found["said"], found["was_known"]) == (said, was_known)


def test_a_guardian_to_which_a_library_has_given_a_thread_starts_anew(
    bench: Bench, events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import events, os, sys
was_known = "threading_library" in sys.modules
import threading_library
events.say(threads=len(os.listdir("/proc/self/task")), was_known=was_known)
"""
    library = tmp_path / "site-packages" / "threading_library.py"
    library.parent.mkdir()
    library.write_text("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()")
    monkeypatch.setenv("PYTHONPATH", str(library.parent), prepend=os.pathsep)
    runners = bench(text)
    runners.prepare()
    guardian = runners.runners[0].guardian_pid
    for _ in range(2):
        assert runners.run()[0].kind is ExitKind.FINISHED
        found = events.next()
        assert (found["threads"], found["was_known"]) == (2, False)
        assert runners.runners[0].guardian_pid == guardian


def test_generations_leak_no_descriptor(bench: Bench, events: Events) -> None:
    runners = bench("import events, shoal; shoal.log(step=1); events.say(ready=True); events.wait()", 2)

    def generation() -> None:
        runners.start()
        events.next(ready=True)
        events.next(ready=True)
        runners.interrupt()
        events.settle()

    def num_open() -> int:
        guardians = [runner.guardian_pid for runner in runners.runners]
        return num_descriptors() + sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in guardians)  # noqa: PTH208

    generation()
    generation()
    before = num_open()
    for _ in range(8):
        generation()
    # A guardian that looks around has files open for a moment; what has leaked stays open.
    until(lambda: num_open() <= before, f"at most {before} descriptors are open")


def test_without_a_fork_server_a_new_interpreter_guards_the_script(
    bench: Bench, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = bench(_DESCRIBES)
    monkeypatch.delenv("SHOAL_FORK_SERVER")
    assert runners.run()[0].kind is ExitKind.FINISHED
    found = events.next()
    assert found["is_warm"] and found["threads"] == 1
    assert found["path"] == str(runners.folder)
