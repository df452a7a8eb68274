"""Who is to blame when a group is slow or stands still: evidence of all ranks in, a `Suspect` for people out. Pure.

    step_done               a slow-down, and the rank whose own work has grown
    whom_do_they_wait_for   the rank for which the others of a standstill wait
    whose_link              the node with a bad link
    suspect_of              whom an incident suspects, from its cause and its exits

Called by the supervisor's `inspection`. Nothing about the training depends on it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal_service.core.attempt.faults import FAULTS, Blame
from shoal_service.core.attempt.state import Incident
from shoal_service.core.quantities import duration_text
from shoal_service.core.stacks import place
from shoal_workers.contract import (
    Collective,
    IncidentCause,
    Phase,
    Resource,
    StackSource,
    StepReport,
    Suspect,
    WorkerExit,
    WorkerStack,
)
from shoal_workers.contract.suspects import Link

SLOW_FACTOR = 1.5
"""A step is slow if it takes this many times the median of normal steps."""
LEAST_EXCESS_S = 0.5
"""Seconds by which consecutive slow steps must exceed what is slow, at least, to be a slow-down of the group."""
_MOST_NORMAL = 32
_LEAST_NORMAL = 5
_MOST_SLOW = 32
_SKIPPED = 2
"""First steps of a generation that are no measure: they touch new memory."""
_LOOK_AGAIN = 8
"""Slow steps after which a slow-down that lasts is judged again: another fault may have come."""
_STALL_S = 1.0
"""A checkpoint that keeps a rank for this much longer than the others is a slow-down of its own."""
_SLOW_RTT_S = 0.01
_LEAST_RESENT = 2
_BAD_SHARE = 0.005
_WORSE = 4.0
"""A connection is bad if it is this many times worse than the best one."""

_RESOURCES = {
    IncidentCause.CORRUPTED: Resource.NUMBERS,
    IncidentCause.NON_FINITE: Resource.NUMBERS,
    IncidentCause.STRAGGLER: Resource.COMPUTE,
    IncidentCause.UNREACHABLE: Resource.NETWORK,
    IncidentCause.NODE_UNREACHABLE: Resource.NETWORK,
}
Sample = tuple[int, str, WorkerStack]
"""A rank of the group, its node's address, and what its training thread does."""


class RankTimes(NamedTuple):
    """One rank in one step, or means over steps. Seconds."""

    compute_s: float
    data_s: float
    cpu_wait_s: float
    saving_s: float

    @property
    def own_s(self) -> float:
        """Seconds in which the rank did not wait for others."""
        return self.compute_s + self.saving_s


@dataclass(frozen=True, slots=True)
class StepTimes:
    step_s: float
    """Seconds of the step without validation."""
    ranks: tuple[RankTimes, ...]


@dataclass(frozen=True, slots=True)
class Pace:
    """What is remembered of one generation."""

    generation: int = 0
    num_steps: int = 0
    normal: tuple[StepTimes, ...] = ()
    slow: tuple[StepTimes, ...] = ()
    """The slow steps since the last normal one."""
    excess_s: float = 0.0
    is_named: bool = False
    """The slow-down that lasts has been reported."""
    suspect: Suspect | None = None
    """Whom the last report of it suspected."""
    num_slow: int = 0
    """Slow steps since it was reported."""


@dataclass(frozen=True, slots=True)
class SlowDown:
    """A finding. `suspect` is None if only the waiting has grown: the links have to be looked at."""

    step: int
    usual_s: float
    now_s: float
    suspect: Suspect | None


def step_done(pace: Pace, report: StepReport) -> tuple[Pace, SlowDown | None]:
    """The pace after this step, and a slow-down that it has made certain. Called with each report of a step.

    excess of a step = its time - SLOW_FACTOR x the median of the normal steps before
    sum of the excesses of consecutive slow steps >= LEAST_EXCESS_S, and two slow steps  ->  the group has slowed down
    a checkpoint keeps one rank for much longer than the others                       ->  at once
    """
    if report.generation != pace.generation:
        pace = Pace(generation=report.generation)
    pace = replace(pace, num_steps=pace.num_steps + 1)
    times = _times(report)
    if times is None or pace.num_steps <= _SKIPPED:
        return pace, None
    if len(pace.normal) < _LEAST_NORMAL:
        return replace(pace, normal=(*pace.normal, times)), None
    usual = _average(pace.normal, statistics.median)  # a checkpoint that is usual is none of the excess
    if _is_stall(times, usual):
        suspicion = None if pace.is_named else _found(report, usual, (times,))
        return replace(pace, slow=(times,), is_named=True, num_slow=0), suspicion
    if times.step_s <= SLOW_FACTOR * usual.step_s:
        normal = (*pace.normal, times)[-_MOST_NORMAL:]
        return replace(pace, normal=normal, slow=(), excess_s=0.0, is_named=False), None
    slow = (*pace.slow, times)[-_MOST_SLOW:]
    excess_s = pace.excess_s + times.step_s - SLOW_FACTOR * usual.step_s
    pace = replace(pace, slow=slow, excess_s=excess_s, num_slow=pace.num_slow + 1)
    if pace.is_named:
        return _looked_again(pace, report, usual)
    if excess_s < max(LEAST_EXCESS_S, usual.step_s) or len(slow) < 2:
        return pace, None
    suspicion = _found(report, usual, slow)
    return replace(pace, is_named=True, suspect=suspicion.suspect, num_slow=0), suspicion


def _looked_again(pace: Pace, report: StepReport, usual: StepTimes) -> tuple[Pace, SlowDown | None]:
    """A rank that was not suspected before is reported."""
    if pace.num_slow < _LOOK_AGAIN:
        return pace, None
    pace, suspicion = replace(pace, num_slow=0), _found(report, usual, pace.slow[-_LOOK_AGAIN:])
    if suspicion.suspect is None or not suspicion.suspect.ranks or _is_same(suspicion.suspect, pace.suspect):
        return pace, None
    return replace(pace, suspect=suspicion.suspect), suspicion


def _is_same(suspect: Suspect, other: Suspect | None) -> bool:
    return other is not None and (suspect.resource, suspect.ranks) == (other.resource, other.ranks)


def whose_work_grew(slow: Sequence[StepTimes], usual: StepTimes) -> Suspect | None:
    """The suspect whose own work takes longer than usual. None if the ranks wait longer for each other than before,
    although each does what it did: then the network is the reason, and `whose_link` says whose.

              computes   makes batches   waits for a CPU   checkpoint   waits for others
    rank 0     40 ms          1 ms              0 ms          0 ms          260 ms
    rank 1    300 ms        262 ms              1 ms          0 ms            0 ms         <- suspected: data
    rank 2     41 ms          1 ms              0 ms          0 ms          259 ms

    A rank is suspected if its own work, without waiting, has grown by much more than that of the others. If the work of
    all ranks has grown, none is suspected, but the reason is named.
    """
    now = _average(slow, statistics.fmean)
    grown = [rank.own_s - before.own_s for rank, before in zip(now.ranks, usual.ranks, strict=True)]
    excess = max(now.step_s - usual.step_s, 1e-9)
    starved = _who_has_no_cpu(now, usual, excess)
    if starved is not None:
        return starved
    first = max(range(len(grown)), key=lambda rank: grown[rank])
    others = statistics.median(g for rank, g in enumerate(grown) if rank != first) if len(grown) > 1 else 0.0
    if grown[first] - others >= 0.4 * excess:
        limit = others + 0.5 * (grown[first] - others)
        ranks = tuple(rank for rank, g in enumerate(grown) if g >= limit)
        return _of_ranks(ranks, first, now, usual)
    if others >= 0.5 * excess:
        resource, share = _resource_of_work(now.ranks[first], usual.ranks[first])
        message = f"all ranks work {duration_text(others)} a step longer than before{share}"
        return Suspect(resource=resource, evidence=(message, _summary(now, usual)))
    return None


def _who_has_no_cpu(now: StepTimes, usual: StepTimes, excess: float) -> Suspect | None:
    """A rank whose training thread waits for a CPU much more than those of the others. Its own work may hardly have
    grown: while it waits for others, the threads of its process group have no CPU either."""
    waits = [rank.cpu_wait_s - before.cpu_wait_s for rank, before in zip(now.ranks, usual.ranks, strict=True)]
    first = max(range(len(waits)), key=lambda rank: waits[rank])
    others = [wait for rank, wait in enumerate(waits) if rank != first]
    if not others or waits[first] - statistics.median(others) < 0.25 * excess or waits[first] < 2 * max(others):
        return None
    own_wait = duration_text(now.ranks[first].cpu_wait_s)
    most = duration_text(max(rank_times.cpu_wait_s for rank, rank_times in enumerate(now.ranks) if rank != first))
    message = f"rank {first} is ready to run and has no CPU for {own_wait} a step, any other for {most} at most"
    return Suspect(resource=Resource.CPU, ranks=(first,), evidence=(message, _summary(now, usual)))


def _of_ranks(ranks: tuple[int, ...], first: int, now: StepTimes, usual: StepTimes) -> Suspect:
    resource, share = _resource_of_work(now.ranks[first], usual.ranks[first])
    others = [rank.own_s for number, rank in enumerate(now.ranks) if number not in ranks]
    beside = f", the others {duration_text(statistics.median(others))}" if others else ""
    own_time, before = duration_text(now.ranks[first].own_s), duration_text(usual.ranks[first].own_s)
    message = f"rank {first} works {own_time} a step{beside}, and worked {before} before{share}"
    return Suspect(resource=resource, ranks=ranks, evidence=(message, _summary(now, usual)))


def _resource_of_work(now: RankTimes, usual: RankTimes) -> tuple[Resource, str]:
    """What the additional work of a rank consists of, and the words for it."""
    grown = max(now.own_s - usual.own_s, 1e-9)
    saving, data = now.saving_s - usual.saving_s, now.data_s - usual.data_s
    waiting = now.cpu_wait_s - usual.cpu_wait_s
    if saving >= 0.5 * grown:
        return Resource.STORAGE, f"; a checkpoint keeps it for {duration_text(now.saving_s)}"
    if waiting >= 0.4 * grown:
        return Resource.CPU, f"; for {duration_text(now.cpu_wait_s)} it is ready to run and has no CPU"
    if data >= 0.5 * grown:
        return Resource.DATA, f"; {duration_text(now.data_s)} of it to make batches"
    return Resource.COMPUTE, ""


def _is_stall(times: StepTimes, usual: StepTimes) -> bool:
    """A checkpoint has kept a rank for longer than the others."""
    saving = [rank.saving_s for rank in times.ranks]
    if len(saving) < 2 or max(saving) < _STALL_S:
        return False
    return max(saving) - statistics.median_low(saving) >= max(_STALL_S, 2 * SLOW_FACTOR * usual.step_s)


def _found(report: StepReport, usual: StepTimes, slow: tuple[StepTimes, ...]) -> SlowDown:
    now_s = statistics.fmean(step.step_s for step in slow)
    return SlowDown(step=report.step, usual_s=usual.step_s, now_s=now_s, suspect=whose_work_grew(slow, usual))


def _times(report: StepReport) -> StepTimes | None:
    """The times of the ranks in this step; None if the report has none."""
    columns = (report.compute_s, report.data_s, report.cpu_wait_s, report.saving_s)
    if not report.compute_s or len({len(column) for column in columns}) > 1:
        return None
    ranks = tuple(RankTimes(*values) for values in zip(*columns, strict=True))
    return StepTimes(max(0.0, report.step_s - report.validating_s), ranks)


def _average(steps: Sequence[StepTimes], average: Callable[[Iterable[float]], float]) -> StepTimes:
    """Average each time over the steps, by rank."""
    times_by_rank = zip(*(step.ranks for step in steps), strict=True)
    ranks = tuple(RankTimes(*map(average, zip(*times, strict=True))) for times in times_by_rank)
    return StepTimes(average(step.step_s for step in steps), ranks)


def _summary(now: StepTimes, usual: StepTimes) -> str:
    return f"a step takes {duration_text(now.step_s)} instead of {duration_text(usual.step_s)}"


def whom_do_they_wait_for(samples: Sequence[Sample]) -> Suspect | None:
    """The suspect for which the others wait, from what every rank does and has called. None if no rank stands out.

    a rank is stopped, or answers nothing                       that one
    a rank has called other collectives than in its last step   that one, if not all have
    some ranks wait in a collective, some do not                those that do not
    all wait, but not in the same collective                    those that are behind, or else the minority
    all wait in the same one                                    the node with a bad link, if there is one
    """
    if len(samples) < 2:
        return None
    silent = [sample for sample in samples if sample[2].source is not StackSource.WORKER]
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
    deviations = {rank: call.deviation for rank, call in calls.items() if call.deviation}
    if not deviations or 2 * len(deviations) > len(calls):
        return None
    evidence = tuple(f"rank {rank} {deviation}" for rank, deviation in deviations.items())
    return Suspect(resource=Resource.PROGRAM, ranks=tuple(deviations), evidence=evidence)


def _is_elsewhere(samples: Sequence[Sample], calls: dict[int, Collective]) -> Suspect | None:
    """The ranks that wait for no other rank, while others do."""
    active = [sample for sample in samples if sample[0] in calls and not calls[sample[0]].is_waiting]
    if not active or len(active) == len(samples):
        return None
    waiting = next(call for call in calls.values() if call.is_waiting)
    evidence = tuple(f"rank {rank} is {place(stack)}" for rank, _, stack in active)
    others = f"the others wait in {waiting.describe()}"
    return Suspect(resource=_resource_of_phase(active[0][2]), ranks=_ranks(active), evidence=(*evidence, others))


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
    evidence = tuple(f"rank {rank} waits in {calls[rank].describe()}" for rank in ranks)
    other = next(call for rank, call in calls.items() if rank not in ranks)
    return Suspect(
        resource=Resource.PROGRAM, ranks=tuple(ranks), evidence=(*evidence, f"the others wait in {other.describe()}")
    )


def _resource_of_phase(stack: WorkerStack) -> Resource:
    if stack.phase in (Phase.SAVING, Phase.COMMITTING):
        return Resource.STORAGE
    return Resource.DATA if "data loader" in place(stack) else Resource.COMPUTE


def _ranks(samples: Sequence[Sample]) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, _, _ in samples))


@dataclass(frozen=True, slots=True)
class Ends:
    """What one rank knows: its rank, its node, its connections."""

    rank: int
    node_ip: str
    links: Sequence[Link]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both directions between two nodes."""

    rtt_s: float
    sent: int
    resent: int

    @property
    def share(self) -> float:
        return self.resent / max(self.sent, 1)


def whose_link(known: Sequence[Ends]) -> Suspect | None:
    """Which node has a bad link, from what the kernels of all ranks know of their connections. None if no connection
    between nodes is bad.

        A --- B   1 ms                 every bad connection ends at C, and one that does not end there is good:
        A --- C  80 ms                 C is suspected
        B --- C  81 ms

    With two nodes, or if no node is an end of all bad connections, the connection is named and no node.
    """
    pairs = _pairs(known)
    bad = {ends: message for ends in pairs if (message := _what_is_bad(ends, pairs))}
    if not bad:
        return None
    common = frozenset.intersection(*bad)
    good = [ends for ends in pairs if ends not in bad]
    evidence = tuple(
        f"{' - '.join(sorted(ends))}: {message}" for ends, message in sorted(bad.items(), key=lambda b: sorted(b[0]))
    )
    if len(common) == 1 and any(not ends & common for ends in good):
        (node_ip,) = common
        ranks = tuple(sorted(candidate.rank for candidate in known if candidate.node_ip == node_ip))
        rest = "; ".join(f"{' - '.join(sorted(ends))}: {duration_text(pairs[ends].rtt_s)}" for ends in good)
        return Suspect(resource=Resource.NETWORK, ranks=ranks, node_ip=node_ip, evidence=(*evidence, f"but {rest}"))
    return Suspect(resource=Resource.NETWORK, evidence=evidence)


def _pairs(known: Sequence[Ends]) -> dict[frozenset[str], _Pair]:
    pairs: dict[frozenset[str], _Pair] = {}
    for candidate in known:
        for link in candidate.links:
            ends = frozenset((candidate.node_ip, link.peer_ip))
            if len(ends) == 2:
                before = pairs.get(ends, _Pair(0.0, 0, 0))
                rtt_s = max(before.rtt_s, link.rtt_s)
                pairs[ends] = _Pair(rtt_s, before.sent + link.sent, before.resent + link.resent)
    return pairs


def _what_is_bad(ends: frozenset[str], pairs: Mapping[frozenset[str], _Pair]) -> str:
    """Empty: nothing."""
    this = pairs[ends]
    best_rtt = min(pair.rtt_s for pair in pairs.values())
    least_share = min(pair.share for pair in pairs.values())
    is_slow = this.rtt_s >= _SLOW_RTT_S and (len(pairs) == 1 or this.rtt_s >= _WORSE * best_rtt)
    is_lossy = this.resent >= _LEAST_RESENT and this.share >= max(_BAD_SHARE, _WORSE * least_share)
    message = []
    if is_lossy:
        message.append(f"{this.resent} of {this.sent} segments were sent again")
    if is_slow:
        message.append(f"a round trip takes {duration_text(this.rtt_s)}")
    return ", ".join(message)


def suspect_of(incident: Incident, exits: Sequence[WorkerExit], *, all_left: bool) -> Suspect | None:
    """Whom an incident suspects, without stacks: from its cause, and from what the ranks that left have seen. If a
    standstill has stacks, they are looked at first (`whom_do_they_wait_for`).

    a worker or a node was lost         that one: its end is the evidence
    the ranks suspect a rank            those that most of them name, once all have left
    otherwise                           none, until a witness comes

    Args:
        exits: of the ranks of the group that have left it.
        all_left: no rank is in the group any more, so no further exit will come.
    """
    named = [worker_exit.suspect for worker_exit in exits if worker_exit.suspect is not None]
    if named and all_left:
        agreed = {rank for worker_exit in named for rank in worker_exit.ranks}
        if agreed and 2 * len(agreed) <= max(incident.before.num_workers, 2):
            evidence = tuple(dict.fromkeys(message for worker_exit in named for message in worker_exit.evidence))
            return Suspect(resource=named[0].resource, ranks=tuple(sorted(agreed)), evidence=evidence)
    if not incident.ranks or FAULTS[incident.cause].blames not in (Blame.WORKER, Blame.NODE):
        return None
    message = [FAULTS[incident.cause].description, incident.message, f"noticed by: {incident.witness}"]
    resource = _RESOURCES.get(incident.cause, Resource.PROCESS)
    return Suspect(resource=resource, ranks=incident.ranks, evidence=tuple(dict.fromkeys(w for w in message if w)))
