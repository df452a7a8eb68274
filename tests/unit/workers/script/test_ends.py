"""Which end a process status, an exception or a signal means."""

from __future__ import annotations

import signal
import sysconfig
from typing import Any

import pytest

from shoal_workers.contract.exception_causes import ErrorClass
from shoal_workers.contract.messages import ExitKind
from shoal_workers.script.ends import Ended, end_of, killed

_LIBRARIES = sysconfig.get_paths()["purelib"]
_DIST = ["torch.distributed.DistBackendError", "torch.distributed.DistError", "builtins.RuntimeError"]
_RUNTIME = ["builtins.RuntimeError", "builtins.Exception"]


def raised(
    message: str, bases: list[str], *, cause: dict[str, Any] | None = None, raising_file: str = ""
) -> dict[str, Any]:
    link = {
        "type": bases[0].removeprefix("builtins."),
        "message": message,
        "errno": None,
        "bases": bases,
        "raising_file": raising_file,
    }
    frames = [["/code/train.py", 41, "step"], [f"{_LIBRARIES}/torch/x.py", 3, "all_reduce"]]
    return {"traceback": "Traceback ...", "frames": frames, "chain": [link, *([cause["chain"][0]] if cause else [])]}


@pytest.mark.parametrize(
    ("message", "bases"),
    [
        ("NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error", _DIST),
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:19", _RUNTIME),
        ("wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1", ["torch.distributed.DistStoreError", *_DIST]),
    ],
)
def test_a_broken_collective_is_known_by_type_and_text(message: str, bases: list[str]) -> None:
    kind, error = end_of(Ended(code=1, raised=raised(message, bases)), "train.py", "/code")
    assert kind is ExitKind.COLLECTIVE_FAILED
    assert error is not None and error.line == "train.py:41 in step()"


def test_the_cause_of_an_exception_counts_too() -> None:
    cause = raised("Connection closed by peer", _RUNTIME)
    end = Ended(code=1, raised=raised("epoch 3 failed", ["builtins.ValueError"], cause=cause))
    assert end_of(end, "train.py", "/code")[0] is ExitKind.COLLECTIVE_FAILED


def test_a_broken_connection_of_the_scripts_own_is_its_own_error() -> None:
    bases = ["builtins.ConnectionResetError", "builtins.OSError", "builtins.Exception"]
    kind, error = end_of(Ended(code=1, raised=raised("Connection reset by peer", bases)), "train.py", "/code")
    assert kind is ExitKind.USER_ERROR and error is not None and error.error_class is ErrorClass.PLAIN


@pytest.mark.parametrize(
    ("raising_file", "kind"),
    [
        ("/code/train.py", ExitKind.USER_ERROR),
        (f"{_LIBRARIES}/requests/adapters.py", ExitKind.USER_ERROR),
        (f"{_LIBRARIES}/torch/distributed/distributed_c10d.py", ExitKind.COLLECTIVE_FAILED),
    ],
)
def test_the_place_where_it_was_raised_decides_and_not_its_text(raising_file: str, kind: ExitKind) -> None:
    error = raised("could not fetch shard 7: Connection closed by peer", _RUNTIME, raising_file=raising_file)
    assert end_of(Ended(code=1, raised=error), "train.py", "/code")[0] is kind


def test_tensors_of_unequal_sizes_are_the_scripts_own_mistake_with_its_line() -> None:
    printed = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /pytorch/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 16 vs 12
Fatal Python error: Aborted

Thread 0x00007f2b (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Thread 0x00007f2c (most recent call first):
  File "/code/train.py", line 12 in step
  File "/code/train.py", line 20 in <module>
"""
    kind, error = end_of(Ended(signal=signal.SIGABRT, printed=printed), "train.py", "/code")
    assert kind is ExitKind.USER_ERROR and error is not None
    assert error.sentence == (
        "a collective of train.py at train.py:12 in step() has received 16 bytes and expects 12: the ranks have called "
        "it with tensors of different sizes, or have called different collectives."
    )


def test_an_exception_counts_although_the_process_was_killed_afterwards() -> None:
    end = Ended(signal=signal.SIGKILL, raised=raised("no metric", ["builtins.ValueError", "builtins.Exception"]))
    assert end_of(end, "train.py", "/code")[0] is ExitKind.USER_ERROR


def test_a_lack_of_device_memory_is_a_fault_that_other_ranks_may_not_have() -> None:
    message = "CUDA out of memory. Tried to allocate 22.00 MiB."
    kind, error = end_of(Ended(code=1, raised=raised(message, ["torch.OutOfMemoryError", *_RUNTIME])), "t.py", "/")
    assert kind is ExitKind.WORKER_FAULT and error is not None and error.error_class is ErrorClass.DEVICE_MEMORY


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE])
def test_a_signal_that_a_process_causes_itself_is_a_crash(number: signal.Signals) -> None:
    kind, error = end_of(Ended(signal=number), "-m package.train", "/code")
    assert kind is ExitKind.USER_ERROR and error is not None and error.mistake == "crash"
    assert f"({number.name})" in error.sentence and error.sentence.startswith("-m package.train crashed")


@pytest.mark.parametrize(
    "printed",
    [
        "[rank1]:[E ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3",
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 Rank 1] Process",
        "terminate called after throwing an instance of 'gloo::IoException'",
    ],
)
def test_an_abort_for_a_broken_collective_is_no_crash(printed: str) -> None:
    kind, error = end_of(Ended(signal=signal.SIGABRT, printed=printed), "train.py", "/code")
    assert kind is ExitKind.COLLECTIVE_FAILED and error is not None
    assert error.sentence == "a collective of train.py was broken, and its process was killed by signal 6 (SIGABRT)."


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_from_outside_is_nobodys_mistake(number: signal.Signals) -> None:
    assert end_of(Ended(signal=number), "train.py", "/code") == (ExitKind.SCRIPT_DIED, None)
    for has_killed in (False, True):
        report = killed(Ended(signal=number), "train.py", out_of_memory=has_killed)
        is_oom = has_killed and number is signal.SIGKILL
        words = "the kernel: out of memory" if is_oom else f"signal {number.value} ({number.name})"
        assert report.sentence == f"the process of train.py was killed by {words}"
        assert report.type == ("OutOfMemory" if is_oom else f"Signal{number.value}")
