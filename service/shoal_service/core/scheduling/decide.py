"""The policy: who runs, with how many workers, and why. A pure function of the market and the time.

    1 keep     every running job keeps its minimum                                    admission.keep_minima
    2 admit    queued jobs start as soon as their minimum fits beside those minima    admission.admit
    3 divide   the rest goes where it adds most                                       gains.divide_rest
    4 settle   moves that do not pay for their pause are taken back                   gains.settle
    5 look     the same for the outcome, until nothing changes any more               decide
    6 explain  a decision with its reason for each change and each job that waits     explaining

So jobs are admitted by shrinking others: what is above a minimum is divided anew in each decision. The method's sources
are in docs/scheduling.md. Called by the control loop and by the simulator, which carry the decisions out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from shoal_service.core.scheduling.admission import admit, keep_minima
from shoal_service.core.scheduling.explaining import (
    Flows,
    describe_cluster,
    describe_growth,
    describe_preemption,
    describe_shrink,
    describe_start,
    explain_waits,
)
from shoal_service.core.scheduling.gains import divide_rest, settle
from shoal_service.core.scheduling.market import Decision, MarketJob, MarketState, Preempt, Resize, Start, Wait
from shoal_service.core.scheduling.plan import Entry, Plan

Change: TypeAlias = Start | Resize | Preempt

LOOKS = 6
"""Most times that a decision is checked against its own outcome."""

MOST_CHECKED = 1_000
"""With more jobs than this, a decision is not checked: a check takes as long as the decision, and on large clusters the
next pass is a check."""


def decide(state: MarketState, now: float) -> list[Decision]:
    """One decision for each queued job, and one for each running job that changes. Those that give workers come first.

    If more than MOST_STARTS jobs could start, MOST_STARTS start with their minimum, and the others with the next
    decisions.

    Asked again for the outcome of its decisions, it changes nothing, for up to MOST_CHECKED jobs. For this, the outcome
    is decided upon as well, and both are returned as one: sometimes what one job leaves behind suits another one, which
    is seen only in the outcome. A preempted job is not in the outcome: its workers are promised to another one.
    """
    plan, preempted, waiting = _planned(state, now)
    changes = _changes(plan, preempted)
    if not changes or len(state.jobs) > MOST_CHECKED:
        return [*changes, *waiting]
    first = [*changes, *waiting]
    entries = {entry.job.job_id: entry for entry in (*plan.running, *plan.queued)}
    places: dict[str, Mapping[str, int]] | None = _places(plan)
    for _ in range(LOOKS):
        later, preempted_later, waiting = _planned(after(state, changes, now, places), now)
        more = _changes(later, preempted_later)
        if not more and places is None:
            return [*changes, *waiting]
        if not more:
            places = None  # once more as the next pass may see it, before the new workers are on their nodes
            continue
        if places is None and not _is_whole(later, preempted_later, entries):
            return [*changes, *waiting] if _are_complete(state, changes, waiting) else first
        places = (places or {}) | _places(later)
        for change in more:
            entry = entries[change.job_id]
            if not isinstance(change, Preempt):
                entry.target = change.workers
                if isinstance(change, Start):
                    entry.start_in(change.cluster)
            elif entry.job.granted:
                entry.beneficiary = change.beneficiary
                preempted.append(entry)
            else:
                entry.target = 0  # it would start, and give way to another job at once: it waits
        changes = _changes(plan, preempted)
    return [*changes, *waiting] if _are_complete(state, changes, waiting) else first


def _is_whole(plan: Plan, preempted: Sequence[Entry], entries: Mapping[str, Entry]) -> bool:
    """Return whether every job has its workers as they are booked here. If not, what seems to be free is not."""
    if any(entries[entry.job.job_id].job.granted for entry in preempted):
        return False
    return all(entry.target >= entry.job.granted for entry in plan.running if entry not in preempted)


def _are_complete(state: MarketState, changes: Sequence[Change], waiting: Sequence[Wait]) -> bool:
    """Return whether there is exactly one decision for each queued job."""
    queued = {job.job_id for job in state.jobs if not job.granted and not job.is_leaving}
    settled = [entry.job_id for entry in (*changes, *waiting) if entry.job_id in queued]
    return len(settled) == len(queued) == len(set(settled))


def _planned(state: MarketState, now: float) -> tuple[Plan, list[Entry], list[Wait]]:
    """Plan one decision: what each job is to have, which jobs are preempted, and why others wait."""
    plan = Plan(state, now)
    admission = admit(plan, keep_minima(plan))
    waiting = explain_waits(plan, admission.waiting)
    if not admission.is_cut_short:  # else the next decision needs what is left for the jobs that it starts
        divide_rest(plan)
    settle(plan)
    return plan, admission.preempted, waiting


def after(
    state: MarketState,
    changes: Sequence[Change],
    now: float,
    places: Mapping[str, Mapping[str, int]] | None = None,
) -> MarketState:
    """The market once the decisions are in effect. Preempted jobs are not in it until they return to the queue.

    `places` has the workers of each changed job by node, if that is known. Without it, workers may count as if they
    were elsewhere, and a node as free that is not.
    """
    grants = {change.job_id: 0 if isinstance(change, Preempt) else change.workers for change in changes}
    clusters = {change.job_id: change.cluster for change in changes if isinstance(change, Start)}
    jobs = []
    for job in state.jobs:
        workers = grants.get(job.job_id)
        if workers is None:
            jobs.append(job)
        elif workers:
            on_nodes = (places or {}).get(job.job_id, job.on_nodes)
            cluster = clusters.get(job.job_id, job.cluster)
            jobs.append(replace(job, granted=workers, held=workers, moved_at=now, on_nodes=on_nodes, cluster=cluster))
    return replace(state, jobs=jobs)


def _places(plan: Plan) -> dict[str, Mapping[str, int]]:
    """The workers that each job has in this plan, by node."""
    places: dict[str, Mapping[str, int]] = {}
    for entry in (*plan.running, *plan.queued):
        if entry.target:
            on_nodes: Counter[str] = Counter()
            for free, workers in entry.sites:
                on_nodes[free.node.node_id] += workers
            places[entry.job.job_id] = on_nodes
    return places


def _changes(plan: Plan, preempted: list[Entry]) -> list[Change]:
    gone = set(preempted)
    running = [entry for entry in plan.running if entry.target != entry.job.granted and entry not in gone]
    shrunk = [entry for entry in running if _new_grant(entry) < entry.job.granted]
    grown = [entry for entry in running if _new_grant(entry) > entry.job.granted]
    started = [entry for entry in plan.queued if entry.target]
    if not (started or grown):
        shrunk = [entry for entry in shrunk if not _keeps_claim(entry)]
    flows = Flows([*preempted, *shrunk], [*started, *grown])
    changes: list[Change] = []
    if preempted:
        kept = [entry for entry in plan.running if entry not in gone]
        by_id: dict[str, MarketJob] = {entry.job.job_id: entry.job for entry in (*started, *kept)}
        for entry in preempted:
            name = entry.beneficiary or ""
            message = describe_preemption(entry, by_id.get(name))
            changes.append(Preempt(entry.job.job_id, message, name, flows.list_takers(entry)))
    for entry in shrunk:
        changes.append(
            Resize(entry.job.job_id, _new_grant(entry), describe_shrink(entry, flows), flows.list_takers(entry))
        )
    for entry in started:
        cluster = entry.shape.cluster
        message = describe_start(entry, flows, describe_cluster(plan, cluster))
        changes.append(Start(entry.job.job_id, entry.target, message, cluster, flows.list_givers(entry)))
    for entry in grown:
        changes.append(Resize(entry.job.job_id, entry.target, describe_growth(entry, flows), flows.list_givers(entry)))
    return changes


def _keeps_claim(entry: Entry) -> bool:
    """Return whether a job that has lost nodes keeps its grant, because no other job gains from a smaller one. With it
    the job is whole again as soon as the nodes come back."""
    job = entry.job
    return job.granted <= job.max_workers and entry.share.room() >= job.granted - entry.target


def _new_grant(entry: Entry) -> int:
    """The new grant. A job that lost nodes keeps the claim to its minimum, and waits for others in place."""
    if entry.is_below_minimum:
        return min(entry.job.granted, entry.job.min_workers)
    return entry.target
