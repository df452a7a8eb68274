"""Refuses collectives that a task's own code calls, and what else of torch.distributed makes results depend on ranks.

    all_gather(), barrier() ...            refused: a micro-batch is computed by itself, on whichever rank has it; ranks
                                           have different numbers of them, and padding takes part
    get_world_size()                       refused: the number changes while a job runs
    new_group(), init_process_group() ...  refused: Shoal forms the groups
    get_rank()                             a remark in the log, once: it is harmless in messages

Shoal's own collectives run inside the task's code as well: FSDP's hooks, DTensor's redistribution, the exchanges of the
tensor, context and expert axes, pipelines. So the innermost caller decides: on the way up the stack from the call,
torch's and the standard library's frames act for their caller; the first frame of the task means the task has called,
the first one of Shoal, or of a part of torch that communicates by itself, that it has not. That are some five frames,
1 us beside a collective of at least 100.

A refusal is no Exception, so that `except Exception` around the call does not take it for a lack of a group; a bare
`except` does. So the first one is also kept, for the end of the call into the task (see user_code.py). Calls are seen
on any thread, since a GPU's backward pass has its own. Not seen: `torch.ops._c10d_functional` called directly, and
collectives in code that torch.compile has compiled. Installed once per worker, by the engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shoal_workers.contract.exception_causes import FrameOwner
from shoal_workers.contract.messages import Phase
from shoal_workers.engine.task.code_owner import ENGINE, INSTALLED, STANDARD, line_in, owner_of
from shoal_workers.torch_internals import functional_collectives

_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_single",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""The methods of torch's ProcessGroup that communicate; all of torch.distributed ends there. Not every version has all
of them."""
_FUNCTIONAL = (
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
)
_GROUPS = ("init_process_group", "destroy_process_group", "new_group", "split_group", "init_device_mesh")

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_DISTRIBUTED = f"{_TORCH}distributed{os.sep}"
_COMMUNICATING = (
    *(f"{_TORCH}{part}{os.sep}" for part in ("_dynamo", "_functorch", "_inductor")),
    *(f"{_DISTRIBUTED}{part}{os.sep}" for part in ("_composable", "checkpoint", "fsdp", "pipelining", "tensor")),
)
"""Parts of torch that communicate by themselves, and compiled code, in which DTensors do."""
_FOR_THEIR_CALLER = (
    _TORCH,
    *(f"{path}typing_extensions.py" for path in INSTALLED),  # marks functions of torch as deprecated
    str(Path(ENGINE) / "engine" / "group" / "collectives.py"),
    __file__,
    "<",
)

_CALLS = "calls the collective {}() of torch.distributed: results would depend on the number of"
_READS = "reads get_world_size() of torch.distributed: results would depend on the number of"
_FORMS = "calls {}() of torch.distributed: Shoal itself forms the groups, anew for any number of"
"""What is refused; the workers follow."""
_WAYS = {
    Phase.OPTIMIZER: "The parameters are DTensors: their own operations (full_tensor(), redistribute(), sums, norms) "
    "communicate by themselves and are right in every layout; use these.",
    Phase.PREPARING: "Every worker prepares the same task for itself: leave it out.",
    Phase.BUILDING: "Every worker builds the same model from the same seed: leave it out.",
}
_WAY = (
    "Compute over the micro-batch that the task gets: batch.micro_size gives it more samples. A loss of the whole "
    "batch, with all negatives, has embed() and batch_loss(): see docs/tasks.md. Shoal itself averages loss, gradients "
    "and metrics over all workers."
)


class CollectiveRefused(BaseException):
    """The task has called a collective. The message is for the user."""


class _State:
    """What this process knows of its calls into the task. Written by the training thread, except a refusal."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Phase], Callable[[str], None]]] = []
        """Into the task, that are under way: the phase, and what takes a remark."""
        self.refused: CollectiveRefused | None = None


_state = _State()
_kinds: dict[str, bool | None] = {}
"""True if a file is the task's, by file; None if it acts for its caller."""


@cache
def guard_collectives() -> None:
    """Idempotent. Replaces functions of torch before the task is imported."""
    for name in _METHODS:
        _replace(name, partial(_refuse, _CALLS), ProcessGroup)
    for name in _FUNCTIONAL:
        _replace(name, partial(_refuse, _CALLS), functional_collectives)
    for name in _GROUPS:
        _replace(name, partial(_refuse, _FORMS), dist, dist.distributed_c10d, device_mesh)
    _replace("get_world_size", partial(_refuse, _READS), dist)
    _replace("get_rank", _remark_rank, dist)


def enter_task(phase: Callable[[], Phase], remark: Callable[[str], None]) -> None:
    """The training thread calls into the task. `remark` is called with sentences for the job's log."""
    _state.calls.append((phase, remark))


def leave_task() -> CollectiveRefused | None:
    """It has returned. The refusal of this call into the task, which its code may have caught."""
    _state.calls.pop()
    refused, _state.refused = _state.refused, None
    return refused


def refuse_wrapped(model: nn.Module, line: str) -> None:
    """Raises for a model that exchanges gradients, parameters or statistics by itself. `line`: of build_model.

    Raises:
        TypeError: with the way out.
    """
    for name, module in model.named_modules():
        kind = f"{type(module).__name__}{f' ({name})' if name else ''}"
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)):
            raise TypeError(
                f"{line}: build_model() returned a model with {kind}: Shoal itself shards the model and averages "
                "gradients. Return the plain module."
            )
        if type(module).forward is nn.SyncBatchNorm.forward:
            raise TypeError(
                f"{line}: build_model() returned a model with {kind}: its statistics would depend on the number of "
                "workers, which changes while a job runs. Set batch.sync to global in the spec: then every BatchNorm, "
                "and this one, normalises over the whole global batch. Or leave out convert_sync_batchnorm()."
            )


def _replace(name: str, refuse: Callable[[str, FrameType], None], *places: Any) -> None:
    for place in places:
        plain = getattr(place, name, None)
        if plain is not None and not hasattr(plain, "__shoal_plain__"):
            setattr(place, name, _guarded(plain, refuse))


def _guarded(plain: Callable[..., Any], check: Callable[[str, FrameType], None]) -> Callable[..., Any]:
    @wraps(plain)
    def call(*arguments: Any, **named: Any) -> Any:
        if _state.calls:
            _look(check, plain.__name__)
        return plain(*arguments, **named)

    call.__shoal_plain__ = plain  # type: ignore[attr-defined]
    return call


def _look(check: Callable[[str, FrameType], None], name: str) -> None:
    """Call `check` with what the task has called, and its frame, if it is the task that has called."""
    # Two frames up: that of the caller, beyond this function and the guard.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file not in _kinds:
            _kinds[file] = _is_of_task(file)
        is_of_task = _kinds[file]
        if is_of_task:
            check(name, frame)
            return
        if is_of_task is False:
            return
        if file.startswith(_DISTRIBUTED) and code.co_name != "wrapper":
            name = code.co_name
        frame = frame.f_back


def _is_of_task(file: str) -> bool | None:
    """An installed package counts as the task's, unless it is torch."""
    if file.startswith(_COMMUNICATING) or "torchinductor" in file:
        return False
    if file.startswith(_FOR_THEIR_CALLER):
        return None
    if file.startswith(ENGINE):
        return False
    return None if file.startswith(STANDARD) and not file.startswith(INSTALLED) else True


def _line(frame: FrameType) -> str:
    """The task's own line, if a library has called for it."""
    caller: FrameType | None = frame
    while caller is not None and owner_of(caller.f_code.co_filename) is FrameOwner.LIBRARY:
        caller = caller.f_back
    caller = frame if caller is None or owner_of(caller.f_code.co_filename) is FrameOwner.ENGINE else caller
    return line_in(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)


def _refuse(what: str, name: str, frame: FrameType) -> None:
    phase, _remark = _state.calls[-1]
    way = _WAYS.get(phase(), _WAY)
    error = CollectiveRefused(f"{_line(frame)} {what.format(name)} workers, which changes while a job runs. {way}")
    # Also kept, because a bare `except` of the task may catch what is raised.
    _state.refused = _state.refused or error
    raise error


def _remark_rank(_name: str, frame: FrameType) -> None:
    _phase, remark = _state.calls[-1]
    remark(
        f"{_line(frame)} reads get_rank() of torch.distributed. That is harmless in messages; but ranks and their "
        "number change while a job runs, so no result may depend on them."
    )
