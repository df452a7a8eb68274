"""Why a job's number of workers changes, in plain words: "Gave 2 workers to job-x: +31 % there, -9 % here."

Called by `decide`. Workers that some jobs give and others of their cluster get are matched in order; whatever is left
over was free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shoal_service.core.quantities import count_text
from shoal_service.core.scheduling.estimates import AGED_AFTER_S
from shoal_service.core.scheduling.market import MarketJob
from shoal_service.core.scheduling.plan import Entry

_AGED = f"was without workers for {AGED_AFTER_S / 3600:g} h longer than with them"


@dataclass(frozen=True, slots=True)
class Flow:
    """Workers that one job gives and another one gets."""

    workers: int
    giver: Entry
    taker: Entry


class Flows:
    """Who gives to whom; computed once for a decision."""

    def __init__(self, givers: Sequence[Entry], takers: Sequence[Entry]) -> None:
        self.given: dict[str, list[Flow]] = defaultdict(list)
        self.got: dict[str, list[Flow]] = defaultdict(list)
        clusters = dict.fromkeys(entry.shape.cluster for entry in givers)
        for cluster in clusters:
            self._match(
                [entry for entry in givers if entry.shape.cluster == cluster] if len(clusters) > 1 else givers,
                [entry for entry in takers if entry.shape.cluster == cluster],
            )

    def _match(self, givers: Sequence[Entry], takers: Sequence[Entry]) -> None:
        """Within a cluster."""
        by_id = {entry.job.job_id: entry for entry in takers}
        open_needs = {entry.job.job_id: entry.target - entry.job.granted for entry in takers}
        pools = [(entry, entry.job.granted - entry.target) for entry in givers]
        pools.sort(key=lambda pair: pair[0].beneficiary is None)
        order = iter(list(open_needs))
        current = next(order, None)
        for giver, amount in pools:
            if giver.beneficiary in by_id:
                amount -= self._flow(giver, by_id[giver.beneficiary], amount, open_needs)
            while amount > 0 and current is not None:
                amount -= self._flow(giver, by_id[current], amount, open_needs)
                if open_needs[current] == 0:
                    current = next(order, None)

    def _flow(self, giver: Entry, taker: Entry, most: int, open_needs: dict[str, int]) -> int:
        workers = min(most, open_needs[taker.job.job_id])
        if workers > 0:
            flow = Flow(workers, giver, taker)
            self.given[giver.job.job_id].append(flow)
            self.got[taker.job.job_id].append(flow)
            open_needs[taker.job.job_id] -= workers
        return workers


def start_words(entry: Entry, flows: Flows, where: str = "") -> str:
    """`where`: in which cluster, with a space before it; empty if there is only one."""
    job = entry.job
    needs = _starts_with(entry.target, entry.shape.words, job.min_workers, job.max_workers, where)
    if entry.donors:
        right = f"by its priority of {job.priority}"
        if entry.aged:
            right = f"because it {_AGED}"
        elif entry.owed is not None:
            right = f"for what is guaranteed to project {entry.owed.project.name}"
        return f"{needs}; preempts {names_of(entry.donors)} {right}."
    flowing = flows.got.get(job.job_id)
    if not flowing:
        return f"{needs}, which were free."
    givers = tuple(flow.giver.job.job_id for flow in flowing)
    return f"{needs}; {names_of(givers)} {_gives(givers)} workers."


def grow_words(entry: Entry, flows: Flows) -> str:
    job = entry.job
    if job.granted < job.min_workers <= entry.target:
        return f"elasticity.min_workers is {job.min_workers}, {workers_of(job.granted)} granted so far."
    here, got = percent(job, entry.target), flows.got[job.job_id]
    if not got:
        return f"Got {workers_of(entry.target - job.granted)} that were free: {here} here."
    flow = max(got, key=lambda one: one.workers)
    there = percent(flow.giver.job, flow.giver.target)
    return f"Got {workers_of(entry.target - job.granted)} from {names_of(_givers(got))}: {here} here, {there} there."


def shrink_words(entry: Entry, flows: Flows) -> str:
    job = entry.job
    less = job.granted - entry.target
    if job.granted > job.max_workers and entry.target == job.max_workers:
        return f"elasticity.max_workers is {job.max_workers}, {workers_of(job.granted)} granted so far."
    given = flows.given[job.job_id]
    if not given:
        return f"Gave back {workers_of(less)}: the nodes or the project's quota no longer hold {job.granted}."
    flow = max(given, key=lambda one: one.workers)
    taker, here = flow.taker.job, percent(job, entry.target)
    to = names_of(tuple(dict.fromkeys(one.taker.job.job_id for one in given)))
    if taker.granted == 0:
        return f"Gave {workers_of(less)} to {to}, which starts with {flow.taker.target}: {here} here."
    return f"Gave {workers_of(less)} to {to}: {percent(taker, flow.taker.target)} there, {here} here."


def preempt_words(entry: Entry, beneficiary: MarketJob | None) -> str:
    job = entry.job
    if beneficiary is None:
        return (
            f"The running jobs of project {entry.share.project.name} need more workers than its limit allows. "
            f"This one has the lowest priority ({job.priority}); it saves and returns to the queue."
        )
    if entry.aged:
        return (
            f"Preempted for {beneficiary.job_id}, which {_AGED} and needs {workers_of(beneficiary.min_workers)}. "
            f"It saves and returns to the queue; no step is lost."
        )
    if entry.owed is not None:
        project = entry.owed.project
        return (
            f"Preempted for {beneficiary.job_id}, which needs {workers_of(beneficiary.min_workers)} of the "
            f"{project.guaranteed} that are guaranteed to project {project.name}. It saves and returns to the queue; "
            f"no step is lost."
        )
    return (
        f"Preempted for {beneficiary.job_id} (priority {beneficiary.priority}, here {job.priority}), which needs "
        f"{workers_of(beneficiary.min_workers)}. It saves and returns to the queue; no step is lost."
    )


def percent(job: MarketJob, workers: int) -> str:
    """The change of the job's samples per second at this size: "+31 %"."""
    before = job.curve.rate(job.granted)
    return f"{100 * (job.curve.rate(workers) / before - 1):+.0f} %" if before > 0 else "new"


def workers_of(number: int) -> str:
    return count_text(number, "worker")


@lru_cache(maxsize=4096)
def _starts_with(workers: int, need: str, least: int, most: int, where: str) -> str:
    """Kept, since thousands of jobs may start at once."""
    sizes = str(least) if least == most else f"{least} to {most}"
    return f"Starts with {workers_of(workers)} of {need} ({sizes}){where}"


def _givers(flows: Sequence[Flow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(flow.giver.job.job_id for flow in flows))


def names_of(names: Sequence[str]) -> str:
    """At most three names, and how many more there are."""
    if len(names) <= 3:
        return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more"


def _gives(names: Sequence[str]) -> str:
    return "gives" if len(names) == 1 else "give"
