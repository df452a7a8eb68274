"""An exception's report names its class and whose code raised it; the end of the generation follows from both."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal_workers.engine
from shoal_workers.contract.exception_causes import ErrorClass, Origin
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase
from shoal_workers.engine.generation_ends import TaskFailed
from shoal_workers.engine.process.exits import classify
from shoal_workers.engine.task.user_code import UserCode

ENGINE_FILE = str(Path(shoal_workers.engine.__file__).parent / "invented.py")
USER_FILE = "/home/somebody/task.py"


def function(file: str, body: str) -> Callable[..., Any]:
    """A function whose frames belong to this file."""
    found: dict[str, Any] = {"torch": torch, "__name__": "task"}
    exec(compile(f"def run(call=None):\n    {body}", file, "exec"), found)
    return found["run"]  # type: ignore[no-any-return]


def reported(*calls: Callable[..., Any], in_task: bool = True) -> tuple[ExitKind, ErrorReport]:
    """What the engine makes of the exception of the innermost call; each call is made by the one before."""
    run = calls[-1]
    for outer in reversed(calls[:-1]):
        run = (lambda caller, callee: lambda: caller(callee))(outer, run)
    try:
        if in_task:
            with UserCode(lambda: Phase.FORWARD):
                run()
        else:
            run()
    except Exception as error:
        end = classify(error, Phase.FORWARD, is_fenced=False, is_formed=True)
        assert end is not None and end.error is not None
        assert isinstance(error, TaskFailed) == in_task
        return end.kind, end.error
    raise AssertionError("nothing was raised")


CALL = "return call()"
ENGINE, USER = function(ENGINE_FILE, CALL), function(USER_FILE, CALL)


def test_an_error_of_the_users_code_is_the_users() -> None:
    kind, error = reported(ENGINE, function(USER_FILE, "raise ValueError('odd width')"))
    assert (kind, error.origin, error.type) == (ExitKind.USER_ERROR, Origin.TASK, "ValueError")
    assert "task.py" in error.traceback


def test_an_error_that_torch_raises_for_the_users_code_is_the_users() -> None:
    kind, error = reported(ENGINE, function(USER_FILE, "torch.nn.Linear(3, 4)(torch.ones(5))"))
    assert (kind, error.origin) == (ExitKind.USER_ERROR, Origin.TASK)


def test_an_error_in_the_backward_pass_of_the_users_loss_is_the_users() -> None:
    kind, _ = reported(function(ENGINE_FILE, "torch.ones(()).backward()"))
    assert kind is ExitKind.USER_ERROR


def test_the_users_code_below_the_engines_below_the_users_is_the_users() -> None:
    raising = function(USER_FILE, "raise KeyError('x')")
    assert reported(ENGINE, USER, ENGINE, raising)[0] is ExitKind.USER_ERROR
    assert reported(ENGINE, raising, in_task=False)[0] is ExitKind.USER_ERROR


@pytest.mark.parametrize("body", ["return {}['missing']", "assert False, 'cannot be'", "return None.attribute"])
def test_an_error_of_the_engines_code_is_never_the_users(body: str) -> None:
    for calls in ((ENGINE,), (ENGINE, USER)):
        for in_task in (True, False):
            kind, error = reported(*calls, function(ENGINE_FILE, body), in_task=in_task)
            assert (kind, error.origin) == (ExitKind.ENGINE_ERROR, Origin.ENGINE)
            assert "invented.py" in error.traceback


def test_what_the_engine_refuses_is_the_users() -> None:
    refusing = function(ENGINE_FILE, "raise TypeError('loss() must return a scalar tensor')")
    assert reported(ENGINE, refusing)[0] is ExitKind.USER_ERROR
    assert reported(ENGINE, refusing, in_task=False)[0] is ExitKind.ENGINE_ERROR


@pytest.mark.parametrize("owner", [USER_FILE, ENGINE_FILE])
@pytest.mark.parametrize(
    ("raised", "error_class"),
    [
        ("RuntimeError('CUDA error: unspecified launch failure')", ErrorClass.DEVICE),
        ("RuntimeError('CUDA error: uncorrectable ECC error encountered')", ErrorClass.DEVICE),
        ("torch.AcceleratorError('CUDA error: an illegal memory access was encountered')", ErrorClass.DEVICE),
        ("torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')", ErrorClass.DEVICE_MEMORY),
        ("MemoryError()", ErrorClass.HOST_MEMORY),
        ('RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried")', ErrorClass.HOST_MEMORY),
        ("torch.distributed.DistBackendError('NCCL error in: a.cpp:1, unhandled cuda error')", ErrorClass.NETWORK),
        *((f"OSError({number}, 'text')", ErrorClass.SYSTEM) for number in (errno.EIO, errno.ENOSPC, errno.ESTALE)),
        (f"OSError({errno.ENOMEM}, 'text')", ErrorClass.HOST_MEMORY),
    ],
)
def test_a_fault_of_the_worker_is_one_in_any_code(owner: str, raised: str, error_class: ErrorClass) -> None:
    is_collective = error_class is ErrorClass.NETWORK
    kind, error = reported(ENGINE, function(owner, f"raise {raised}"), in_task=not is_collective)
    assert (kind, error.error_class) == (ExitKind.WORKER_FAULT, error_class)


def test_the_loss_of_another_rank_is_a_broken_collective() -> None:
    text = "NCCL error in: a.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5"
    raising = function(USER_FILE, f"raise torch.distributed.DistBackendError({text!r})")
    assert reported(ENGINE, raising, in_task=False)[0] is ExitKind.COLLECTIVE_FAILED


def test_an_allocation_that_really_fails_is_the_nodes_memory() -> None:
    kind, error = reported(ENGINE, function(USER_FILE, "torch.empty(10**15)"))
    assert (kind, error.error_class) == (ExitKind.WORKER_FAULT, ErrorClass.HOST_MEMORY)


def test_an_exception_whose_text_cannot_be_made_is_the_users() -> None:
    body = "raise type('Odd', (Exception,), {'__str__': lambda self: self.missing})()"
    kind, error = reported(ENGINE, function(USER_FILE, body))
    assert (kind, error.origin) == (ExitKind.USER_ERROR, Origin.TASK)
    assert "__str__ of Odd raises AttributeError" in error.message and error.line.endswith("task.py:2 in run()")


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "GeneratorExit", "type('Stop', (BaseException,), {})"])
def test_what_except_exception_does_not_catch_is_the_users_on_the_training_thread(kind: str) -> None:
    raising = function(USER_FILE, f"raise {kind}('enough')")
    with ThreadPoolExecutor(1) as thread:
        found, error = thread.submit(reported, ENGINE, raising).result()
    assert (found, error.origin, error.message) == (ExitKind.USER_ERROR, Origin.TASK, "enough")


def test_ctrl_c_on_the_main_thread_goes_on() -> None:
    with pytest.raises(KeyboardInterrupt), UserCode(lambda: Phase.FORWARD):
        raise KeyboardInterrupt


def test_a_keyboard_interrupt_is_no_end_of_a_generation() -> None:
    assert classify(KeyboardInterrupt(), Phase.FORWARD, is_fenced=False, is_formed=True) is None
