"""Host memory of one worker: what it trains with, and what it and its buddy keep of its state in shared memory.

    own snapshots   on a CPU with the built-in AdamW the state itself is in shared memory, twice: one more copy of it.
                    Otherwise two copies
    sent            copies of the state for the buddy: one is sent, one stays until the next has arrived, one is written
    kept            at the buddy: the two newest copies
    log             at the buddy: the gradients of the steps between two copies
    build           a task of the user's own that has not declared `deferred_init` builds its whole model first

Snapshots of an earlier layout stay until the new group has its own, and are not counted. `planning` and `ranking` call
this; `core/attempt/group/placement/node_memory.py` adds up the workers of a node.
"""

from __future__ import annotations

from shoal_service.core.attempt.plan_layout import UNKNOWN_NEED, HostNeed
from shoal_service.planner.collectives import Floats
from shoal_service.planner.gpus import CPU
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model import HF_TASK, LM_TASK
from shoal_workers.contract.spec import GradientLogMode, JobSpec, Precision

STATE_BYTES = 12
"""Bytes of a parameter: fp32 weight and the two moments of AdamW."""
SENT_COPIES = {True: 3, False: 2}
"""Copies of the state besides the own snapshots, by whether the state is double-buffered."""
OFFLOADED_BYTES = 16
"""Bytes of a parameter whose weight, gradient and moments are in the host's memory."""
KEPT_COPIES = 2
LOG_ENTRIES = 24
"""20 steps between two copies, two before the newest copy, and those that pass until a copy has arrived."""


def own_copies(spec: JobSpec) -> int:
    """Copies of the state beyond the one that is trained."""
    if not spec.snapshot.enabled:
        return 0
    return 1 if _is_double_buffered(spec) else 2


def host_need(spec: JobSpec, rank_params: float, training: float) -> HostNeed:
    """`rank_params`: parameters of the worker's shard. `training`: bytes of host memory at the peak of a step."""
    state = round(rank_params * STATE_BYTES)
    keeps = spec.snapshot.enabled
    has_log = keeps and not spec.worker.gpus and spec.snapshot.gradient_log is not GradientLogMode.OFF
    gradient_bytes = 2 if spec.reduce_precision is Precision.BF16 else 4
    return HostNeed(
        process=CPU.reserved_bytes,
        training=round(training),
        build=whole_build(spec),
        snapshots=own_copies(spec) * state,
        sent=SENT_COPIES[_is_double_buffered(spec)] * state * keeps,
        kept=KEPT_COPIES * state * keeps,
        log=round(LOG_ENTRIES * gradient_bytes * rank_params) * has_log,
    )


def gpu_host_bytes(spec: JobSpec, rank_params: Floats, *, offload: bool) -> Floats:
    """Bytes of the host's memory that workers with a GPU need, without copies for a buddy: what is offloaded, the
    snapshots, and the process.

    The start needs no more: a worker draws or reads its own part of the weights, piece by piece, onto the GPU.
    """
    found: Floats = rank_params * (OFFLOADED_BYTES * offload + STATE_BYTES * own_copies(spec)) + CPU.reserved_bytes
    return found


def least_need(spec: JobSpec, layout: Layout, num_params: int) -> HostNeed:
    """If only the number of parameters is known; 0: not even that. At least, because nothing is known of activations,
    nor how evenly the parameters are split."""
    if not num_params:
        return UNKNOWN_NEED
    params = num_params / (layout.pp * layout.tp * layout.num_shards)
    return host_need(spec, params, 0.0 if spec.worker.gpus else params * OFFLOADED_BYTES)


def num_params_of(spec: JobSpec) -> int:
    """As the spec declares it; 0: it does not."""
    return spec.plan.num_params if spec.plan is not None else 0


def whole_build(spec: JobSpec) -> int:
    """Bytes of the whole model, if each worker builds it and its number of parameters is declared."""
    if spec.task in (LM_TASK, HF_TASK) or spec.plan is None or spec.plan.deferred_init:
        return 0
    return 4 * num_params_of(spec)


def _is_double_buffered(spec: JobSpec) -> bool:
    return not spec.worker.gpus and spec.optimizer.fused is not True
