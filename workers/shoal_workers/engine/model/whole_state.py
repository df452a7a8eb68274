"""Refuses plain replicas whose whole state does not fit: the planner does not know the size of a user's own task, nor
what other programs have left of a host's memory.

    needed by a worker     parameters, gradients and their buckets, two moments of each trained parameter; and twice
                           what snapshots keep of them. Nothing if it has the model of the generation before
    may be used            half of the memory that is left on the host, or of the `worker.memory_gib` of its workers,
                           for all of them together: the other half is for activations, data and whatever was not
                           counted. 90 % for a built-in task, whose activations the planner has counted

All ranks get the same answer, before anything of the state beside the model has been allocated. Another group follows,
whose layout is sharded. Where the spec asks for `shard: none`, nothing is refused. Called by `TaskProgram`.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from torch import nn

from shoal_workers.contract.checks.legality import is_plain_by_default
from shoal_workers.contract.layout import ShardLevel
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.generation_ends import LayoutRefused
from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.step.generation import Generation
from shoal_workers.machine_limits import available_bytes

_MOMENTS = 2
"""As AdamW has: the optimizer of a task is not known yet."""
_SNAPSHOTS = 2
_USABLE, _USABLE_IF_PLANNED = 0.5, 0.9
_BUILT_IN_TASKS = "shoal_workers.tasks."
_GIB = 1 << 30


def refuse_if_too_large(
    generation: Generation, group: Group, host: str, touched_bytes: int, model: nn.Module | None
) -> None:
    """All ranks.

    Args:
        host: differs between hosts.
        touched_bytes: memory that this worker keeps for its tensors, as long as it has none.
        model: the whole one; None if the worker has that of the generation before.

    Raises:
        LayoutRefused: on every rank, or on none.
    """
    layout, spec = generation.layout, generation.spec
    if layout.shard is not ShardLevel.NONE or layout.world_size == 1 or not is_plain_by_default(spec):
        return
    needed = 0 if model is None else bytes_needed(model, spec)
    limit = round(spec.worker.memory_gib * _GIB)
    usable = _USABLE_IF_PLANNED if spec.task.startswith(_BUILT_IN_TASKS) else _USABLE
    text = f"{host} {needed} {available_bytes()} {touched_bytes}"
    reason = group.decide("whole state", text, partial(decide, worker_bytes=limit, usable=usable))
    if reason:
        raise LayoutRefused(LayoutProof(layout=layout, outcome=ProofOutcome.REFUSED, words=reason))


def bytes_needed(model: nn.Module, spec: JobSpec) -> int:
    """What a worker allocates for the state of a whole model, and for its snapshots."""
    every = sum(parameter.nbytes for parameter in model.parameters())
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    state = every + _MOMENTS * trained
    gradients = 2 * trained
    return state + gradients + _SNAPSHOTS * state * spec.snapshot.enabled


def decide(texts: list[str], worker_bytes: int = 0, usable: float = _USABLE) -> str:
    """Return why the whole state does not fit; empty if it does.

    Args:
        texts: of each rank its host, the bytes that it needs, those that are left there, and those that it keeps for
            its tensors.
        worker_bytes: what one worker may use; 0 if it has no limit.
        usable: share of the memory that may be used.
    """
    needed: dict[str, int] = defaultdict(int)
    left: dict[str, int] = {}
    kept: dict[str, int] = defaultdict(int)
    num_workers: dict[str, int] = defaultdict(int)
    for host, more, there, touched in (text.split() for text in texts):
        num_workers[host] += 1
        needed[host] += int(more)
        kept[host] += int(touched)
        left[host] = min(left.get(host, int(there)), int(there))
    for host, num_bytes in needed.items():
        room = left[host] + kept[host]
        room = min(room, num_workers[host] * worker_bytes or room)
        if num_bytes > usable * room:
            return (
                f"the whole state of the model does not fit on each worker: {num_workers[host]} on {host} need "
                f"{num_bytes / _GIB:,.2f} GiB, and {usable:.0%} of {room / _GIB:,.2f} GiB may be used"
            )
    return ""
