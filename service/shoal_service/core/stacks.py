"""Clusters equal stacks of the ranks of a group, and describes what each rank does at that moment. Pure.

    rank 3 is in the data loader (shapes.py:41 __getitem__) of step 41; ranks 0-2, 4-7 wait in the all-reduce of step 41

The supervisor calls `cluster` on request, when a group makes no progress, and when a rank is slow. Incidents keep the
`trimmed` result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal_workers.contract import Phase, StackCluster, Stacks, StackSource, WorkerStack
from shoal_workers.contract.messages import Frame

_COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "all_reduce_small": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_object": "all-gather",
    "gather_values": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast": "broadcast",
    "all_to_all": "all-to-all",
    "all_to_all_single": "all-to-all",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "send": "send",
    "recv": "receive",
    "batch_isend_irecv": "send and receive",
    "hold_vote": "vote",
    "count_ballots": "vote",
    "wait_for_sums": "all-reduce",
    "foreach_all_gather": "all-gather",
    "wait_for_unshard": "all-gather",
    "foreach_reduce": "reduce-scatter",
}
"""Functions of torch.distributed, of FSDP and of the engine in which a rank waits for the others. If a stack has
several, the outermost counts."""
_COLLECTIVE_FILES = (
    "torch/distributed/",
    "shoal_workers/engine/group/all_ranks.py",
    "shoal_workers/engine/step/vote.py",
    "shoal_workers/engine/loop/gradients.py",
)
_DATA_FILE = "shoal_workers/engine/step/batches.py"
_OURS = "shoal_workers/"
_LIBRARIES = ("site-packages/", "python3", "<")
_PHASES = {
    Phase.FORWARD: "the forward pass",
    Phase.BACKWARD: "the backward pass",
    Phase.OPTIMIZER: "the optimizer",
    Phase.SNAPSHOT: "a snapshot",
    Phase.SAVING: "a checkpoint",
    Phase.VALIDATING: "the validation",
    Phase.RESTORING: "restoring the state",
    Phase.BUILDING: "building the model",
    Phase.PREPARING: "its preparation",
    Phase.FORMING: "the rendezvous",
    Phase.CONNECTING: "connecting to the others",
    Phase.COMMITTING: "waiting for the commit",
}
_STOPPED = "do_signal_stop"
"""Kernel function in which a process stays while a signal has stopped it; see shoal_workers.stacks."""
_MAX_CLUSTERS_IN_SUMMARY = 4
_KEPT_CLUSTERS, _KEPT_FRAMES = 16, 40


def cluster(samples: Iterable[tuple[int | None, WorkerStack]], *, at: float, generation: int, reason: str) -> Stacks:
    """Cluster equal stacks, and summarise them in one line.

    Args:
        samples: rank (None if the worker has none) and stack of each worker.
    """
    groups: dict[object, list[tuple[int | None, WorkerStack]]] = {}
    for rank, stack in samples:
        groups.setdefault((stack.frames, stack.error, _phase_of(stack)), []).append((rank, stack))
    clusters = sorted((_cluster(group) for group in groups.values()), key=lambda c: (len(c.worker_ids), c.ranks))
    displayed = clusters[:_MAX_CLUSTERS_IN_SUMMARY]
    summary = "; ".join(_sentence(stack_cluster) for stack_cluster in displayed)
    if len(clusters) > len(displayed):
        summary += f"; and {len(clusters) - len(displayed)} other stacks"
    return Stacks(at=at, generation=generation, reason=reason, clusters=tuple(clusters), summary=summary)


def trimmed(stacks: Stacks) -> Stacks:
    """Return the part that an incident keeps: the smallest clusters, and the inner frames of each."""
    clusters = (
        stack_cluster.model_copy(update={"frames": stack_cluster.frames[:_KEPT_FRAMES]})
        for stack_cluster in stacks.clusters[:_KEPT_CLUSTERS]
    )
    return stacks.model_copy(update={"clusters": tuple(clusters)})


def place(stack: WorkerStack) -> str:
    """Describe where a training thread is, as the end of a sentence such as "rank 3 is ..."."""
    if stack.error:
        return f"not to be seen: {stack.error}"
    if not stack.frames:
        return "idle"
    if stack.frames[0].function == _STOPPED:
        return "stopped by a signal"
    of_step = f" of step {stack.step + 1}" if stack.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER) else ""
    module = f", {stack.module}" if stack.module else ""
    phase = _PHASES.get(stack.phase)
    collective = _collective(stack.frames)
    code = _users_frame(stack.frames)
    at = f" ({code.file.rpartition('/')[2]}:{code.line} {code.function})" if code is not None else ""
    if collective is not None:
        where = f", in {phase}" if phase is not None and collective != _COLLECTIVES["hold_vote"] else ""
        return f"waiting in the {collective}{of_step}{where}{module}{at}"
    if any(frame.file.endswith(_DATA_FILE) for frame in stack.frames):
        return f"in the data loader{at}{of_step}"
    inner = stack.frames[0]
    at = at or f" ({inner.file.rpartition('/')[2]}:{inner.line} {inner.function})"
    return f"in {phase or 'its code'}{of_step}{module}{at}"


def _phase_of(stack: WorkerStack) -> object:
    """Return phase and step, which must be equal too: an equal stack in another step is another place.

    None for a stack of py-spy, which does not know the step.
    """
    return None if stack.source is StackSource.PY_SPY else (stack.phase, stack.step)


def _cluster(group: Sequence[tuple[int | None, WorkerStack]]) -> StackCluster:
    first = group[0][1]
    return StackCluster(
        ranks=tuple(sorted(rank for rank, _ in group if rank is not None)),
        worker_ids=tuple(stack.worker_id for _, stack in group),
        words=place(first),
        frames=first.frames,
        module=first.module,
        phase=first.phase,
        step=first.step,
        source=first.source,
        error=first.error,
    )


def _collective(frames: Sequence[Frame]) -> str | None:
    names = [
        _COLLECTIVES[frame.function]
        for frame in frames
        if frame.function in _COLLECTIVES and any(part in frame.file for part in _COLLECTIVE_FILES)
    ]
    return names[-1] if names else None


def _users_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of code that is neither Shoal's nor a library's."""
    for frame in frames:
        if not frame.file.startswith(_LIBRARIES) and _OURS not in frame.file:
            return frame
    return None


def _sentence(stack_cluster: StackCluster) -> str:
    return f"{_subject(stack_cluster)} {'is' if len(stack_cluster.worker_ids) == 1 else 'are'} {stack_cluster.words}"


def _subject(stack_cluster: StackCluster) -> str:
    if stack_cluster.ranks:
        return (
            f"rank {stack_cluster.ranks[0]}"
            if len(stack_cluster.ranks) == 1
            else f"ranks {_ranges(stack_cluster.ranks)}"
        )
    names = [name.rpartition("/")[2] for name in stack_cluster.worker_ids]
    return f"worker {names[0]}" if len(names) == 1 else f"workers {', '.join(names)}"


def _ranges(ranks: Sequence[int]) -> str:
    """Return the ranks as people read them, such as `0-2, 4`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
