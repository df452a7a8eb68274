"""The table of texts: how torch, CUDA, NCCL and the C library word the faults of a device, of memory or of the system.

torch raises most of them as plain RuntimeErrors, so the text decides. Each row has an example as it was really seen,
and where. The first row that matches counts. A text of the task's own mistakes ("device-side assert triggered" is an
index out of range, "no kernel image" a wrong build) is PLAIN on purpose, and stands first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    pattern: re.Pattern[str]
    error_class: str
    """A value of `ErrorClass`."""
    example: str
    """The message, or its decisive line."""
    source: str
    """Where the example was seen: repository and number of an issue, or a document."""


def _row(error_class: str, pattern: str, example: str, source: str) -> Text:
    return Text(re.compile(pattern, re.IGNORECASE), error_class, example, source)


TEXTS: tuple[Text, ...] = (
    # the code's own mistakes
    _row(
        "plain",
        r"device-side assert triggered",
        "CUDA error: device-side assert triggered",
        "CUDA Runtime API, cudaErrorAssert",
    ),
    _row(
        "plain",
        r"no kernel image is available|invalid (configuration|argument|device (ordinal|function))",
        "CUDA error: no kernel image is available for execution on the device",
        "CUDA Runtime API, cudaErrorNoKernelImageForDevice",
    ),
    # another rank is gone: not a fault of this one
    _row(
        "plain",
        r"remote process exited or there was a network error|ncclRemoteError|Connection (closed|reset) by",
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a "
        "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote"
        " process exiting prematurely.",
        "NVIDIA/nccl#2076",
    ),
    # memory of the device
    _row(
        "device_memory",
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
        "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 11.06 MiB is"
        " free.",
        "pytorch/pytorch#16417",
    ),
    # memory of the host
    _row(
        "host_memory",
        r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc",
        "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
        " 132426121216 bytes. Error code 12 (Cannot allocate memory)",
        "mxfold/mxfold2#20",
    ),
    _row(
        "host_memory",
        r"killed by signal: Bus error|insufficient shared memory|out of shared memory",
        "DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's workers are out"
        " of shared memory. Please try to raise your shared memory limit",
        "pytorch/pytorch#108861",
    ),
    _row(
        "host_memory",
        r"Cannot allocate memory",
        "unable to mmap 1048576 bytes from file </torch_4711>: Cannot allocate memory (12)",
        "strerror of ENOMEM, glibc",
    ),
    # the device
    _row(
        "device",
        r"ECC error|uncorrectable NVLink error|fallen off the bus|GPU is lost|\bXid\b",
        "CUDA error: uncorrectable ECC error encountered",
        "vllm-project/vllm#5222",
    ),
    _row(
        "device",
        r"unspecified launch failure",
        "CUDA error: unspecified launch failure",
        "pytorch/pytorch#74235",
    ),
    _row(
        "device",
        r"illegal memory access|illegal instruction|misaligned address|hardware stack error",
        "CUDA error: an illegal memory access was encountered",
        "pytorch/pytorch#34220",
    ),
    _row(
        "device",
        r"devices? ?(\(s\))? (is/)?are busy or unavailable|no CUDA-capable device is detected|launch timed out",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "pytorch/pytorch#100691",
    ),
    _row(
        "device",
        r"(CUBLAS|CUDNN|CUFFT|CUSOLVER|CUSPARSE)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, "
        "lda, b, ldb, &beta, c, ldc)`",
        "facebookresearch/SparseConvNet#208",
    ),
    # NCCL on this rank
    _row(
        "network",
        r"NCCL error.*unhandled (cuda|system) error|ncclUnhandledCudaError|ncclSystemError",
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.",
        "NVIDIA/nccl#1410",
    ),
    # any other error of CUDA's
    _row(
        "device",
        r"CUDA (driver |runtime )?error( \(\d+\) )?:",
        "CUDA error: unknown error",
        "CUDA Runtime API, cudaErrorUnknown",
    ),
    # the operating system, where a library words it and no error number is left
    _row(
        "system",
        r"Stale file handle|Input/output error|No space left on device|Too many open files|Remote I/O error|"
        r"Read-only file system|Disk quota exceeded|Transport endpoint is not connected",
        "read(): fd 33 failed with Stale file handle",
        "pytorch/pytorch#45826",
    ),
)
