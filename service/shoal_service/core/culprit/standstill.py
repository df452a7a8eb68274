"""Why a group stands still: which rank the others wait for. From what every rank does and has called.

a rank is stopped, or answers nothing                       that one
a rank has called other collectives than in its last step   that one, if not all have
some ranks wait in a collective, some do not                those that do not
all wait, but not in the same collective                    those that are behind, or else the minority
all wait in the same one                                    the node with a bad link, if there is one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal_service.core.attempt.stacks import place
from shoal_service.core.culprit.links import Ends, whose_link
from shoal_workers.contract.messages import Phase, StackSource, WorkerStack
from shoal_workers.contract.suspects import Collective, Resource, Suspect

Sample = tuple[int, str, WorkerStack]
"""A rank of the group, its node's address, and what its training thread does."""


def whom_do_they_wait_for(samples: Sequence[Sample]) -> Suspect | None:
    """The suspect for which the others wait. None: no rank stands out."""
    if len(samples) < 2:
        return None
    silent = [one for one in samples if one[2].source is not StackSource.WORKER]
    if silent and len(silent) < len(samples):
        evidence = tuple(f"rank {rank} is {place(stack)} and answers no call" for rank, _, stack in silent)
        return Suspect(resource=Resource.PROCESS, ranks=_ranks(silent), evidence=evidence)
    known = [(rank, stack.collective) for rank, _, stack in samples if stack.collective is not None]
    calls: dict[int, Collective] = {rank: call for rank, call in known if call is not None}
    return (
        _deviates(calls)
        or _is_elsewhere(samples, calls)
        or _waits_in_another(calls)
        or whose_link([Ends(rank, node_ip, stack.links) for rank, node_ip, stack in samples])
    )


def _deviates(calls: dict[int, Collective]) -> Suspect | None:
    found = {rank: call.deviation for rank, call in calls.items() if call.deviation}
    if not found or 2 * len(found) > len(calls):
        return None
    evidence = tuple(f"rank {rank} {deviation}" for rank, deviation in found.items())
    return Suspect(resource=Resource.PROGRAM, ranks=tuple(found), evidence=evidence)


def _is_elsewhere(samples: Sequence[Sample], calls: dict[int, Collective]) -> Suspect | None:
    """The ranks that wait for no other rank, while others do."""
    active = [one for one in samples if one[0] in calls and not calls[one[0]].is_waiting]
    if not active or len(active) == len(samples):
        return None
    waiting = next(call for call in calls.values() if call.is_waiting)
    evidence = tuple(f"rank {rank} is {place(stack)}" for rank, _, stack in active)
    others = f"the others wait in {waiting.words()}"
    return Suspect(resource=_resource(active[0][2]), ranks=_ranks(active), evidence=(*evidence, others))


def _waits_in_another(calls: dict[int, Collective]) -> Suspect | None:
    """All wait: for a rank that is behind, or for ranks that have called something else."""
    kinds = Counter((call.number, call.name, call.bytes) for call in calls.values())
    if len(kinds) < 2:
        return None
    usual, count = kinds.most_common(1)[0]
    behind = min(call.number for call in calls.values())
    ranks = [rank for rank, call in calls.items() if call.number == behind]
    if behind == usual[0] or 2 * len(ranks) > len(calls):
        ranks = [rank for rank, call in calls.items() if (call.number, call.name, call.bytes) != usual]
    if 2 * count <= len(calls) and 2 * len(ranks) > len(calls):
        return None
    evidence = tuple(f"rank {rank} waits in {calls[rank].words()}" for rank in ranks)
    other = next(call for rank, call in calls.items() if rank not in ranks)
    return Suspect(
        resource=Resource.PROGRAM, ranks=tuple(ranks), evidence=(*evidence, f"the others wait in {other.words()}")
    )


def _resource(stack: WorkerStack) -> Resource:
    if stack.phase in (Phase.SAVING, Phase.COMMITTING):
        return Resource.STORAGE
    return Resource.DATA if "data loader" in place(stack) else Resource.COMPUTE


def _ranks(samples: Sequence[Sample]) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, _, _ in samples))
