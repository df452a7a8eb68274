"""The class of an error follows from its type, number and text; its origin from the frames of its traceback."""

import errno

import pytest

from shoal_workers.contract.exception_causes import (
    ERRNOS,
    TEXTS,
    ErrorClass,
    Frame,
    FrameOwner,
    Link,
    Origin,
    error_class_of,
    origin_of,
)

TASK = Frame(FrameOwner.TASK)
ENGINE = Frame(FrameOwner.ENGINE)
REFUSAL = Frame(FrameOwner.ENGINE, is_refusal=True)
TORCH = Frame(FrameOwner.LIBRARY)
DISTRIBUTED = Frame(FrameOwner.LIBRARY, is_communication=True)


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row.example[:40])
def test_each_text_of_the_table_has_the_class_of_its_row(row: object) -> None:
    assert error_class_of([Link("RuntimeError", row.example)]) == row.error_class  # type: ignore[attr-defined]
    assert row.source  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: an illegal instruction was encountered", ErrorClass.DEVICE),
        ("CUDA error: misaligned address", ErrorClass.DEVICE),
        ("CUDA error: uncorrectable NVLink error detected during the execution", ErrorClass.DEVICE),
        ("cuda runtime error (4) : unspecified launch failure at /pytorch/THCTensorCopy.cu:85", ErrorClass.DEVICE),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", ErrorClass.DEVICE),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", ErrorClass.DEVICE),
        ("CUDNN_STATUS_EXECUTION_FAILED", ErrorClass.DEVICE),
        ("CUDA error: out of memory", ErrorClass.DEVICE_MEMORY),
        ("NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.20.5", ErrorClass.NETWORK),
        ("Connection closed by peer [127.0.0.1]:5", ErrorClass.PLAIN),
        ("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", ErrorClass.PLAIN),
        ("the CUDA errors of my own", ErrorClass.PLAIN),
        ("expected 3 channels", ErrorClass.PLAIN),
    ],
)
def test_the_class_of_other_texts(message: str, expected: ErrorClass) -> None:
    assert error_class_of([Link("RuntimeError", message)]) is expected


@pytest.mark.parametrize("number", sorted(ERRNOS))
def test_an_error_number_of_the_node_is_the_systems(number: int) -> None:
    expected = ErrorClass.HOST_MEMORY if number == errno.ENOMEM else ErrorClass.SYSTEM
    assert error_class_of([Link("OSError", "whatever", number)]) is expected


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EEXIST, errno.EINVAL])
def test_an_error_number_that_a_wrong_path_gives_is_plain(number: int) -> None:
    assert error_class_of([Link("FileNotFoundError", "No space left on device", number)]) is ErrorClass.PLAIN


def test_the_type_decides_where_the_text_says_nothing() -> None:
    assert error_class_of([Link("MemoryError", "")]) is ErrorClass.HOST_MEMORY
    assert error_class_of([Link("torch.OutOfMemoryError", "no")]) is ErrorClass.DEVICE_MEMORY


def test_an_exception_has_the_class_of_what_it_was_raised_from() -> None:
    chain = [Link("ValueError", "cannot read sample 3"), Link("OSError", "", errno.EIO)]
    assert error_class_of(chain) is ErrorClass.SYSTEM


@pytest.mark.parametrize(
    ("frames", "in_task_call", "origin"),
    [
        ([ENGINE, TASK], True, Origin.TASK),
        ([ENGINE, TASK, TORCH], True, Origin.TASK),
        ([ENGINE, TASK, TORCH, DISTRIBUTED], True, Origin.TASK),
        ([ENGINE, TASK, TORCH, ENGINE], True, Origin.ENGINE),  # a hook of the engine in the task's forward pass
        ([ENGINE, TASK, ENGINE, TASK], True, Origin.TASK),
        ([ENGINE, TASK, ENGINE, TASK], False, Origin.TASK),
        ([ENGINE, TORCH], True, Origin.TASK),  # a backward pass: the graph is the task's
        ([ENGINE, TORCH, DISTRIBUTED], True, Origin.TASK),
        ([ENGINE, DISTRIBUTED], True, Origin.ENGINE),
        ([ENGINE], True, Origin.ENGINE),
        ([REFUSAL], True, Origin.TASK),  # "loss() must return a scalar tensor"
        ([REFUSAL], False, Origin.ENGINE),
        ([ENGINE, TORCH], False, Origin.ENGINE),
        ([], True, Origin.TASK),
        ([], False, Origin.ENGINE),
    ],
)
def test_the_innermost_frame_that_is_no_librarys_decides_the_origin(
    frames: list[Frame], in_task_call: bool, origin: Origin
) -> None:
    assert origin_of(frames, in_task_call=in_task_call) is origin
