"""What an exception of a worker says about its cause. Pure functions over names, texts, error numbers and frames.

    class     what failed: the device, memory, the network library, the operating system; or nothing of these
    origin    whose code raised it: that of the task, or the engine's
    mistake   a common mistake of a task, with the line of the task and the way out, in one sentence for the user

The worker classifies its own exception (`engine/task/user_code.py`, `actor.py`) and reports the result with its exit.
It does not decide who is to blame: one rank alone cannot know whether the others have the same error, so the attempt
machine combines the classes of all ranks (`shoal_service.core.attempt.outcome`).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class ErrorClass(StrEnum):
    """What failed. All but PLAIN are faults of a worker or of its node if one rank reports them, and not all."""

    PLAIN = "plain"
    """None of the others: a fault of the code that raised it."""
    DEVICE = "device"
    """The GPU, its driver, its memory's ECC, or a kernel that it ended."""
    DEVICE_MEMORY = "device_memory"
    """No memory left on the GPU."""
    HOST_MEMORY = "host_memory"
    """No memory, or no shared memory, left on the node."""
    NETWORK = "network"
    """NCCL failed on this rank itself, not because another rank is gone."""
    SYSTEM = "system"
    """The operating system could not do what it was asked to: a disk, a mount, a limit of the node."""


class Origin(StrEnum):
    """Whose code raised the exception."""

    TASK = "task"
    ENGINE = "engine"


class FrameOwner(StrEnum):
    """Whose code a frame of the stack runs."""

    TASK = "task"
    ENGINE = "engine"
    LIBRARY = "library"
    """torch, the standard library, anything that is installed: it acts for its caller."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a traceback."""

    owner: FrameOwner
    is_communication: bool = False
    """The frame is one of torch.distributed; its owner is LIBRARY."""
    is_refusal: bool = False
    """The frame ended with a `raise` statement, other than a failed assertion."""


ERRNOS = frozenset(
    {
        errno.EIO,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.ESTALE,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENXIO,
        errno.EREMOTEIO,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.ENETDOWN,
        errno.EBUSY,
        errno.EUCLEAN,
    }
)
"""Error numbers that mean a fault of the node. ENOENT, EACCES and EEXIST are left out, because a task that names a
wrong path gets them."""

_TYPES: dict[str, ErrorClass] = {
    "MemoryError": ErrorClass.HOST_MEMORY,
    "torch.OutOfMemoryError": ErrorClass.DEVICE_MEMORY,
    "torch.cuda.OutOfMemoryError": ErrorClass.DEVICE_MEMORY,
}


@dataclass(frozen=True, slots=True)
class Link:
    """One exception of a chain of causes."""

    type: str
    """Qualified name; without the module if it is a builtin."""
    message: str
    errno: int | None = None


def error_class_of(chain: Sequence[Link]) -> ErrorClass:
    """Return the class of an exception: the first one in the chain of causes that is not PLAIN.

    Args:
        chain: the exception, then what it was raised from, and so on.
    """
    for link in chain:
        error_class = _class_of_link(link)
        if error_class is not ErrorClass.PLAIN:
            return error_class
    return ErrorClass.PLAIN


def origin_of(frames: Sequence[Frame], *, in_task_call: bool) -> Origin:
    """Return the owner of the code that raised.

    The innermost frame that is the task's or the engine's decides; libraries act for their caller. Two cases while the
    engine has called into the task: a library that the engine runs on the task's objects (a backward pass, a module's
    call) raises because of these objects, unless it communicates; and an explicit `raise` of the engine refuses
    something that the task has returned.

    Args:
        frames: outermost first.
        in_task_call: the engine had called into the task when the exception was raised.
    """
    inner: Frame | None = None
    """The frame that `frame` called; None for the innermost one."""
    for frame in reversed(frames):
        if frame.owner is FrameOwner.TASK:
            return Origin.TASK
        if frame.owner is FrameOwner.ENGINE:
            is_the_tasks = frame.is_refusal if inner is None else not inner.is_communication
            return Origin.TASK if in_task_call and is_the_tasks else Origin.ENGINE
        inner = frame
    return Origin.TASK if in_task_call else Origin.ENGINE


def _class_of_link(link: Link) -> ErrorClass:
    if link.type in _TYPES:
        return _TYPES[link.type]
    if link.errno is not None:
        if link.errno == errno.ENOMEM:
            return ErrorClass.HOST_MEMORY
        return ErrorClass.SYSTEM if link.errno in ERRNOS else ErrorClass.PLAIN
    for text in TEXTS:  # the first match decides, so general patterns come last
        if re.search(text.pattern, link.message, re.IGNORECASE):
            return text.error_class
    return ErrorClass.PLAIN


@dataclass(frozen=True, slots=True)
class Text:
    """A pattern of messages, and the class of the errors that have them."""

    error_class: ErrorClass
    pattern: str
    """In upper or lower case."""
    example: str
    """A message that matches, or its decisive line."""
    source: str
    """Where the example was seen: repository and number of an issue, or a document."""


TEXTS: tuple[Text, ...] = (
    # the code's own mistakes
    Text(
        ErrorClass.PLAIN,
        r"device-side assert triggered",
        "CUDA error: device-side assert triggered",
        "CUDA Runtime API, cudaErrorAssert",
    ),
    Text(
        ErrorClass.PLAIN,
        r"no kernel image is available|invalid (configuration|argument|device (ordinal|function))",
        "CUDA error: no kernel image is available for execution on the device",
        "CUDA Runtime API, cudaErrorNoKernelImageForDevice",
    ),
    # another rank is gone: not a fault of this one
    Text(
        ErrorClass.PLAIN,
        r"remote process exited or there was a network error|ncclRemoteError|Connection (closed|reset) by",
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a "
        "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote"
        " process exiting prematurely.",
        "NVIDIA/nccl#2076",
    ),
    # memory of the device
    Text(
        ErrorClass.DEVICE_MEMORY,
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
        "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 11.06 MiB is"
        " free.",
        "pytorch/pytorch#16417",
    ),
    # memory of the host
    Text(
        ErrorClass.HOST_MEMORY,
        r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc",
        "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
        " 132426121216 bytes. Error code 12 (Cannot allocate memory)",
        "mxfold/mxfold2#20",
    ),
    Text(
        ErrorClass.HOST_MEMORY,
        r"killed by signal: Bus error|insufficient shared memory|out of shared memory",
        "DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's workers are out"
        " of shared memory. Please try to raise your shared memory limit",
        "pytorch/pytorch#108861",
    ),
    Text(
        ErrorClass.HOST_MEMORY,
        r"Cannot allocate memory",
        "unable to mmap 1048576 bytes from file </torch_4711>: Cannot allocate memory (12)",
        "strerror of ENOMEM, glibc",
    ),
    # the device
    Text(
        ErrorClass.DEVICE,
        r"ECC error|uncorrectable NVLink error|fallen off the bus|GPU is lost|\bXid\b",
        "CUDA error: uncorrectable ECC error encountered",
        "vllm-project/vllm#5222",
    ),
    Text(
        ErrorClass.DEVICE,
        r"unspecified launch failure",
        "CUDA error: unspecified launch failure",
        "pytorch/pytorch#74235",
    ),
    Text(
        ErrorClass.DEVICE,
        r"illegal memory access|illegal instruction|misaligned address|hardware stack error",
        "CUDA error: an illegal memory access was encountered",
        "pytorch/pytorch#34220",
    ),
    Text(
        ErrorClass.DEVICE,
        r"devices? ?(\(s\))? (is/)?are busy or unavailable|no CUDA-capable device is detected|launch timed out",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "pytorch/pytorch#100691",
    ),
    Text(
        ErrorClass.DEVICE,
        r"(CUBLAS|CUDNN|CUFFT|CUSOLVER|CUSPARSE)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, "
        "lda, b, ldb, &beta, c, ldc)`",
        "facebookresearch/SparseConvNet#208",
    ),
    # NCCL on this rank
    Text(
        ErrorClass.NETWORK,
        r"NCCL error.*unhandled (cuda|system) error|ncclUnhandledCudaError|ncclSystemError",
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.",
        "NVIDIA/nccl#1410",
    ),
    # any other error of CUDA's
    Text(
        ErrorClass.DEVICE,
        r"CUDA (driver |runtime )?error( \(\d+\) )?:",
        "CUDA error: unknown error",
        "CUDA Runtime API, cudaErrorUnknown",
    ),
    # the operating system, where a library words it and no error number is left
    Text(
        ErrorClass.SYSTEM,
        r"Stale file handle|Input/output error|No space left on device|Too many open files|Remote I/O error|"
        r"Read-only file system|Disk quota exceeded|Transport endpoint is not connected",
        "read(): fd 33 failed with Stale file handle",
        "pytorch/pytorch#45826",
    ),
)


_BROKEN_COLLECTIVE = re.compile(
    r"gloo/|Connection closed by peer|Connection reset by peer|Broken pipe|"
    r"Timed out waiting \d+ms for (send|recv)|Application timeout caused pair closure|"
    r"NCCL (error|communicator)|ncclComm|Process group .*(aborted|shut ?down)",
    re.IGNORECASE,
)


_COLLECTIVE_CODE = re.compile(r"/(torch|shoal_workers/engine)/")


def is_broken_collective(
    is_of_torch_distributed: bool, is_runtime_error: bool, message: str, raising_file: str
) -> bool:
    """Return whether an exception comes from a collective that another rank or the network has broken.

    Args:
        is_of_torch_distributed: it is a torch.distributed.DistError.
        is_runtime_error: it is a RuntimeError, which gloo and NCCL raise for everything.
        raising_file: the file whose `raise` statement has raised it; empty if native code did. A RuntimeError that the
            user's code or another library raises is no collective's, whatever its text is.
    """
    is_elsewhere = bool(raising_file) and _COLLECTIVE_CODE.search(raising_file) is None
    is_by_text = is_runtime_error and not is_elsewhere and _BROKEN_COLLECTIVE.search(message) is not None
    return is_of_torch_distributed or is_by_text


_UNEQUAL_SIZES = re.compile(r"gloo::EnforceNotMet'.*?\.length <= \S+\. (\d+) vs (\d+)", re.DOTALL)


def unequal_sizes(printed: str) -> tuple[int, int] | None:
    """Return the sizes in bytes if a process has aborted because gloo has received more than the collective expects:
    the ranks have called it with different tensors, or have called different ones. None if it did not.

    Args:
        printed: the end of what it has written to its standard error.
    """
    match = _UNEQUAL_SIZES.search(printed)
    return (int(match[1]), int(match[2])) if match is not None else None


_ABORTED_COLLECTIVE = re.compile(
    r"terminate called after throwing an instance of '(c10::Dist\w*Error|gloo::\w+)'|"
    r"Watchdog caught collective operation timeout|To avoid data inconsistency, we are taking the entire process down"
)


def is_collective_abort(printed: str) -> bool:
    """Return whether a process has aborted because a collective was broken: NCCL's watchdog and gloo's threads raise
    where nobody can catch it.

    Args:
        printed: the end of what it has written to its standard error.
    """
    return _ABORTED_COLLECTIVE.search(printed) is not None


REFUSED = "refused"
"""Name of a mistake that is not in MISTAKES: Shoal itself refuses something of the task, and its message says what."""
LAYOUT_REFUSED = "layout_refused"
"""Name of a mistake that is not in MISTAKES: the layout trains another model than one process does (engine/proof)."""


class Raised(StrEnum):
    """Where the exception was raised."""

    ANYWHERE = "anywhere"
    ON_ITS_OBJECT = "on_its_object"
    """The error was raised in Shoal's code, by an operation on something that the task returned."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One row of MISTAKES: how a common mistake is recognised, and what the user reads."""

    name: str
    """Stable name, used in reports of errors and in docs/tasks.md."""
    pattern: re.Pattern[str]
    """Pattern of the error, as `Type: text`."""
    member: str
    """Member of the task whose line is named if no line of the task is on the stack."""
    words: str
    """Text that follows the line: the cause and the way out. Groups of the pattern are inserted."""
    phases: tuple[str, ...] = ()
    """Values of `Phase` in which the row applies; empty: all."""
    raised: Raised = Raised.ANYWHERE
    innermost: str = ""
    """Regular expression for `file:function` of the innermost frame; empty: any."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of an exception that may be a common mistake."""

    text: str
    """`Type: text`."""
    phase: str
    innermost: str
    """`file:function` of the innermost frame."""
    is_in_engine: bool
    """True if the innermost frame is Shoal's."""


@dataclass(frozen=True, slots=True)
class Recognised:
    name: str
    member: str
    words: str


def recognise(links: Sequence[Seen]) -> Recognised | None:
    """Return the row of MISTAKES that fits, with its groups inserted; None if none fits. The first exception that a row
    fits decides, then the first such row.

    Args:
        links: the exception, then what it was raised from, and so on.
    """
    for seen in links:
        for row in MISTAKES:
            match = row.pattern.search(seen.text)
            if match is not None and _fits(row, seen):
                groups = [group or "" for group in match.groups()]
                return Recognised(row.name, row.member, row.words.format(match.group(0), *groups))
    return None


def _fits(row: Mistake, seen: Seen) -> bool:
    return (
        (not row.phases or seen.phase in row.phases)
        and (row.raised is Raised.ANYWHERE or seen.is_in_engine)
        and (not row.innermost or re.search(row.innermost, seen.innermost) is not None)
    )


_PREPARING = ("preparing",)
_BUILDING = ("building",)
_PASSES = ("forward", "backward", "validating")


def _mistake(
    name: str,
    pattern: str,
    member: str,
    message: str,
    *,
    phases: tuple[str, ...] = (),
    raised: Raised = Raised.ANYWHERE,
    innermost: str = "",
) -> Mistake:
    return Mistake(name, re.compile(pattern), member, message, phases, raised, innermost)


MISTAKES: tuple[Mistake, ...] = (
    # importing and constructing the task
    _mistake(
        "missing_package",
        r"^ModuleNotFoundError: No module named '([^']+)'",
        "__init__",
        "the node of this worker has no module {1}; install its package on every node, or put the "
        "module into the directory that code.working_dir names.",
    ),
    _mistake(
        "missing_variable",
        r"^KeyError: '([^']*)'",
        "__init__",
        "the environment variable {1} is not set in this worker, which has the environment of its node, not of your "
        "shell; pass the value in the model or data section of the spec, or read os.environ.get({1!r}, DEFAULT).",
        innermost=r"os(\.py|>):__getitem__$",
    ),
    _mistake(
        "script",
        r"^SystemExit: ?(.*)",
        "__init__",
        "importing the module ended the process (sys.exit, argparse); put the code of the script "
        'below `if __name__ == "__main__":`, and model, data and loss into a class, which the spec\'s '
        "task names.",
        phases=_PREPARING,
    ),
    _mistake(
        "relative_path",
        r"^FileNotFoundError: .*No such file or directory: '(?!/)(?!\w+://)([^']+)'",
        "build_dataset",
        "the directory of this worker, a copy of code.working_dir, has no file {1}; put the file "
        "there, or give an absolute path that exists on every node.",
    ),
    _mistake(
        "signal_handler",
        r"^ValueError: signal only works in main thread",
        "__init__",
        "signal.signal() works in the main thread only, and a worker runs the task in another one; "
        "leave it out: on SIGTERM Shoal continues without this worker and writes the checkpoints.",
    ),
    _mistake(
        "no_group",
        r"^ValueError: Default process group has not been initialized",
        "__init__",
        "torch.distributed has no group in prepare(); leave the call out: every worker prepares the "
        "same task, and Shoal chooses which samples each one reads.",
        phases=_PREPARING,
    ),
    # its data
    _mistake(
        "dataset_without_length",
        r"^TypeError: object of type '(\w+)' has no len\(\)",
        "build_dataset",
        "build_dataset() returns an object of type {1}, which has no len(), but Shoal itself chooses which samples are "
        "read. Two ways out: return a map-style dataset, with __len__ and __getitem__, which batch.num_workers reads "
        "ahead; or keep the stream and read it in a loop, with run.batches(...) (docs/loops.md).",
        phases=_PREPARING,
        raised=Raised.ON_ITS_OBJECT,
    ),
    _mistake(
        "dataset_without_index",
        r"^(?:TypeError: '(\w+)' object is not subscriptable|NotImplementedError: Subclasses of Dataset should "
        r"implement __getitem__|KeyError: (\d+)$)",
        "build_dataset",
        "build_dataset() returns an object without samples by index ({0}); give it a __getitem__ that returns sample i "
        "for every i from 0 to len() - 1.",
        phases=_PASSES,
        raised=Raised.ON_ITS_OBJECT,
    ),
    _mistake(
        "dataset_signature",
        r"^TypeError: (?:[\w<>]+\.)*(__len__|__getitem__)\(\) (?:takes|missing) .*",
        "build_dataset",
        "the dataset cannot be read: {0}; write def __len__(self) and def __getitem__(self, index).",
        raised=Raised.ON_ITS_OBJECT,
    ),
    _mistake(
        "samples_of_different_sizes",
        r"^RuntimeError: stack expects each tensor to be equal size, but got (\[.*?\]) at entry \d+ and (\[.*?\])",
        "build_dataset",
        "samples of one micro-batch have the sizes {1} and {2}, and cannot be stacked; pad or cut them to one size, or "
        "define collate(self, samples) in the task.",
        phases=_PASSES,
    ),
    _mistake(
        "samples_that_are_no_tensors",
        r"^TypeError: default_collate: batch must contain .*; found <class '([^']+)'>",
        "build_dataset",
        "a sample contains an object of type {1}, which cannot be batched; return tensors, numbers, or dicts and "
        "tuples of them, or define collate(self, samples) in the task.",
        phases=_PASSES,
    ),
    # its model
    _mistake(
        "container_without_forward",
        r"^ValueError: fully_shard does not support containers that do not implement forward: (\w+)",
        "build_model",
        "a {1} has no forward(), and parameters are gathered when a module is called; return an nn.Sequential or a "
        "module with a forward() from build_model() and from shard_units().",
        phases=_BUILDING,
    ),
    _mistake(
        "torch_script",
        r"^AttributeError: '_CachedForward' object has no attribute|\bRecursiveScriptModule\b|\bScriptModule\b",
        "build_model",
        "the model is TorchScript (torch.jit), whose modules cannot be sharded; return the module as it was before "
        "torch.jit.script or torch.jit.trace, and set compile: true in the spec if it should be compiled.",
        phases=_BUILDING,
    ),
    _mistake(
        "lazy_module",
        r"\b[Uu]ninitialized ?[Pp]arameter\b",
        "build_model",
        "the model has lazy modules (nn.LazyLinear and the like), whose parameters have no shape until a first forward "
        "pass; give the sizes, or pass one sample through the model before build_model() returns it.",
        phases=_BUILDING,
    ),
    _mistake(
        "sparse_gradient",
        r"^NotImplementedError: Could not run '\S+' with arguments from the 'Sparse\w+' backend",
        "build_model",
        "a parameter has a sparse gradient, which cannot be summed over workers; leave out sparse=True where the model "
        "looks up an embedding.",
        phases=("backward", "optimizer"),
    ),
    _mistake(
        "optimizer_on_shards",
        r"(?:^(?:RuntimeError|NotImplementedError): (?:Operator )?"
        r"(?=\S+ (?:in-place operations that require placement changes|does not have a sharding strategy))"
        r"|\bSharding propagation failed for )(aten\.[\w.]*\w)",
        "build_optimizer",
        "the optimizer uses {1}, which torch does not have for parameters that are split over workers (DTensor); if it "
        "updates each element on its own, set elementwise_optimizer = True in the task, else write that operation "
        "another way, for example not in place, or set parallelism: {{shard: none}}, with which each worker has whole "
        "parameters.",
        phases=("restoring", "optimizer"),
    ),
    # its loss
    _mistake(
        "part_of_the_model",
        r"got mixed torch\.Tensor and DTensor",
        "loss",
        "loss() uses a layer or a parameter outside of model(...), where parameters are sharded; "
        "call model(...), and move the use of single layers, or a penalty on a weight, into "
        "forward(). For an L2 penalty on all weights set weight_decay of the optimizer.",
        phases=_PASSES,
    ),
    _mistake(
        "detached_loss",
        r"element 0 of tensors does not require grad and does not have a grad_fn",
        "loss",
        "loss() returns a tensor that does not depend on the model's parameters, so there is no gradient; do not "
        "detach it, do not compute it under torch.no_grad(), and do not make it from a number (.item(), numpy).",
        phases=("backward",),
    ),
    _mistake(
        "backward_in_the_task",
        r"^RuntimeError: Trying to backward through the graph a second time",
        "loss",
        "loss() calls backward(), or keeps a graph of an earlier call; return the loss only: Shoal "
        "runs the backward pass and the optimizer.",
        phases=("backward",),
    ),
    _mistake(
        "label_out_of_range",
        r"^IndexError: Target (-?\d+) is out of bounds",
        "loss",
        "the model has no output for the label {1}; give it as many outputs as there are classes, "
        "and number the classes from 0.",
        phases=_PASSES,
    ),
    _mistake(
        "index_out_of_range",
        r"^IndexError: index out of range in self",
        "loss",
        "an index has no row in an nn.Embedding; give it as many rows as there are tokens, and "
        "number the tokens from 0.",
        phases=_PASSES,
    ),
    _mistake(
        "shapes",
        r"mat1 and mat2 shapes cannot be multiplied \((\w+) and (\w+)\)",
        "loss",
        "an input of {1} (rows x columns) does not fit a layer with weights of {2}; set its "
        "in_features to the last dimension of its input.",
        phases=_PASSES,
    ),
    _mistake(
        "dtypes",
        r"mat1 and mat2 must have the same dtype, but got (\w+) and (\w+)",
        "loss",
        "the input of a layer is {1} and its weights are {2}; convert the input, for example with .float(), in "
        "build_dataset() or before model(...).",
        phases=_PASSES,
    ),
)
