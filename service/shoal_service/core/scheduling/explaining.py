"""Describes the division of workers for people: why a grant changes, why a queued job waits and until when, and why a
running job gets no more workers. It decides nothing, and repeats the numbers that the decisions used.

    Flows              who gives workers to whom: "Gave 2 workers to job-x: +31 % there, -9 % here."
    describe_*         what is in the way of a queued job: a limit, clusters that take no jobs, nodes that are too small
    explain_waits      a decision for each job that waits: its position, who holds what it waits for, its expected start
    explain_held_back  an answer for each running job below its `elasticity.max_workers`

A market with one cluster is described without naming it, unless a job asks for another one.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache, partial
from itertools import islice

from shoal_service.core.quantities import count_text, duration_text, range_text
from shoal_service.core.scheduling.gains import HORIZON_S, pays
from shoal_service.core.scheduling.market import (
    AGED_AFTER_S,
    ClusterState,
    MarketJob,
    MarketState,
    Wait,
    WorkerFlow,
    hull,
    seconds_left,
)
from shoal_service.core.scheduling.plan import Claim, Entry, Obstacle, Plan, Share
from shoal_service.core.scheduling.room import UNLIMITED, Shape

_AGED = f"was without workers for {AGED_AFTER_S / 3600:g} h longer than with them"

MAX_HOLDERS = 5
"""Most jobs that are listed; a longer list is no help to a reader."""

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Flow:
    """A number of workers that one job gives and another one gets."""

    workers: int
    giver: Entry
    taker: Entry


class Flows:
    """Who gives workers to whom. Computed once for a decision."""

    def __init__(self, givers: Sequence[Entry], takers: Sequence[Entry]) -> None:
        self.given: dict[str, list[Flow]] = defaultdict(list)
        self.got: dict[str, list[Flow]] = defaultdict(list)
        clusters = dict.fromkeys(entry.shape.cluster for entry in givers)
        for cluster in clusters:
            self._match(
                [entry for entry in givers if entry.shape.cluster == cluster] if len(clusters) > 1 else givers,
                [entry for entry in takers if entry.shape.cluster == cluster],
            )

    def list_takers(self, entry: Entry) -> tuple[WorkerFlow, ...]:
        """The jobs that get workers of this one."""
        return tuple((flow.taker.job.job_id, flow.workers) for flow in self.given.get(entry.job.job_id, ()))

    def list_givers(self, entry: Entry) -> tuple[WorkerFlow, ...]:
        """The jobs that give workers to this one."""
        return tuple((flow.giver.job.job_id, flow.workers) for flow in self.got.get(entry.job.job_id, ()))

    def _match(self, givers: Sequence[Entry], takers: Sequence[Entry]) -> None:
        """Match those that give workers with those that take them, within one cluster."""
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


def describe_start(entry: Entry, flows: Flows, where: str = "") -> str:
    """Why a queued job starts, and who makes room for it. `where`: in which cluster, with a space before it; empty if
    there is only one."""
    job = entry.job
    needs = _describe_first_grant(entry.target, entry.shape.need_text, job.min_workers, job.max_workers, where)
    if entry.donors:
        right = f"by its priority of {job.priority}"
        if entry.aged:
            right = f"because it {_AGED}"
        elif entry.owed is not None:
            right = f"for what is guaranteed to project {entry.owed.project.name}"
        return f"{needs}; preempts {join_names(entry.donors)} {right}."
    flowing = flows.got.get(job.job_id)
    if not flowing:
        return f"{needs}."
    givers = tuple(flow.giver.job.job_id for flow in flowing)
    return f"{needs}; {join_names(givers)} {_inflect_gives(givers)} workers."


def describe_growth(entry: Entry, flows: Flows) -> str:
    job = entry.job
    if job.granted < job.min_workers <= entry.target:
        return f"elasticity.min_workers is {job.min_workers}, {count_workers(job.granted)} granted so far."
    here, got = describe_change(job, entry.target), flows.got[job.job_id]
    if not got:
        return f"Got {count_text(entry.target - job.granted, 'free worker')}: {here} here."
    flow = max(got, key=lambda option: option.workers)
    there = describe_change(flow.giver.job, flow.giver.target)
    number, givers = count_workers(entry.target - job.granted), join_names(_name_givers(got))
    return f"Got {number} from {givers}: {here} here, {there} there."


def describe_shrink(entry: Entry, flows: Flows) -> str:
    job = entry.job
    less = job.granted - entry.target
    if job.granted > job.max_workers and entry.target == job.max_workers:
        return f"elasticity.max_workers is {job.max_workers}, {count_workers(job.granted)} granted so far."
    given = flows.given[job.job_id]
    if not given:
        return f"Gave back {count_workers(less)}: {_describe_lost_room(entry)}"
    flow = max(given, key=lambda option: option.workers)
    taker, here = flow.taker.job, describe_change(job, entry.target)
    to = join_names(tuple(dict.fromkeys(option.taker.job.job_id for option in given)))
    if taker.granted == 0:
        return f"Gave {count_workers(less)} to {to}, which starts with {flow.taker.target}: {here} here."
    return f"Gave {count_workers(less)} to {to}: {describe_change(taker, flow.taker.target)} there, {here} here."


def _describe_lost_room(entry: Entry) -> str:
    """Why a job has fewer workers although no other job gets them."""
    if entry.share.room() <= 0:
        share = entry.share.tightest()
        limit = count_text(share.project.limit or 0, "worker")
        return f"project {share.project.name} may have {limit} (its limit)."
    has = f"the nodes that it may use have room for {entry.target} of its {entry.job.granted}"
    return f"{has}. The others are lost, drained or reserved by others."


def describe_preemption(entry: Entry, beneficiary: MarketJob | None) -> str:
    job = entry.job
    if beneficiary is None:
        return (
            f"The running jobs of project {entry.share.project.name} need more workers than its limit allows. "
            f"This one has the lowest priority ({job.priority}); it saves and returns to the queue."
        )
    if entry.aged:
        return (
            f"Preempted for {beneficiary.job_id}, which {_AGED} and needs {count_workers(beneficiary.min_workers)}. "
            f"It saves and returns to the queue; no step is lost."
        )
    if entry.owed is not None:
        project = entry.owed.project
        return (
            f"Preempted for {beneficiary.job_id}, which needs {count_workers(beneficiary.min_workers)} of the "
            f"{project.guaranteed} that are guaranteed to project {project.name}. It saves and returns to the queue; "
            f"no step is lost."
        )
    return (
        f"Preempted for {beneficiary.job_id} (priority {beneficiary.priority}, here {job.priority}), which needs "
        f"{count_workers(beneficiary.min_workers)}. It saves and returns to the queue; no step is lost."
    )


def describe_change(job: MarketJob, workers: int) -> str:
    """Change of the job's samples per second if it had this many workers, such as "+31 %"."""
    before = job.curve.rate(job.granted)
    return f"{100 * (job.curve.rate(workers) / before - 1):+.0f} %" if before > 0 else "new"


def count_workers(number: int) -> str:
    return count_text(number, "worker")


@lru_cache(maxsize=4096)
def _describe_first_grant(workers: int, need: str, least: int, most: int, where: str) -> str:
    """Describe what a job starts with. It is cached, because thousands of jobs may start at once."""
    elastic = f" of {range_text(least, most)}" if least != most else ""
    return f"Starting with {count_workers(workers)}{elastic} ({need} each){where}"


def _name_givers(flows: Sequence[Flow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(flow.giver.job.job_id for flow in flows))


def join_names(names: Sequence[str]) -> str:
    """List at most three names, and say how many more there are."""
    if len(names) <= 3:
        return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more"


def _inflect_gives(names: Sequence[str]) -> str:
    return "gives" if len(names) == 1 else "give"


def describe_project_limit(job: MarketJob, share: Share, missing: int) -> str:
    """Why the project has no room for `missing` more workers within its limit."""
    name, limit = share.project.name, share.project.limit or 0
    if limit < job.min_workers:
        return (
            f"elasticity.min_workers is {job.min_workers}, and project {name} may have "
            f"{count_text(limit, 'worker')} (its limit). Raise the limit, or lower min_workers."
        )
    return (
        f"Needs {count_text(missing, 'worker')}; the running jobs of project {name} need {share.used} of its limit of "
        f"{limit}. Raise the limit, or wait for one of them to end."
    )


def describe_max_running(share: Share) -> str:
    name, most = share.project.name, share.project.max_running
    runs = count_text(share.running, "job")
    return f"Project {name} runs {runs}, and its max_running is {most}. Raise it, or wait for one of them."


def describe_user_limit(user: str, runs: int, most: int) -> str:
    return (
        f"User {user} runs {count_text(runs, 'job')}, and may run {most} at a time (max_running). Wait for one "
        "of them, or raise the limit."
    )


def describe_sweep_limit(sweep: str, runs: int, most: int) -> str:
    return (
        f"Sweep {sweep} has {count_text(runs, 'job')} with workers, and its limit is {most} (sweep.limit). Waits until "
        "one of them ends."
    )


def explain_waits(plan: Plan, waiting: Sequence[tuple[Entry, Obstacle]]) -> list[Wait]:
    """A decision for each waiting job, in order. Called before the rest is divided, which counts as free here.

    Expected starts follow the present rates of running jobs; a job of unknown length promises nothing.
    """
    texts = _ExplanationCache(plan)
    decisions: list[Wait] = []
    explained: Obstacle | None = None  # thousands in a row may have the same
    for position, (entry, obstacle) in enumerate(waiting, 1):
        job = entry.job
        if obstacle.message is not None:
            if obstacle is not explained:
                explained = obstacle
                limited_by = texts.list_holders(obstacle.share, obstacle.user, obstacle.sweep)
            decisions.append(Wait(job.job_id, obstacle.message, position, limited_by, None, obstacle.is_limit))
            continue
        forecasts, reason = texts.room(entry, obstacle)
        if len(forecasts) == 1:
            at, holders = forecasts[0].place(job.min_workers)
        else:
            at, holders = _place_soonest(forecasts, job.min_workers)
        decisions.append(Wait(job.job_id, reason, position, holders, at))
    return decisions


def _place_soonest(forecasts: Sequence[_Forecast], workers: int) -> tuple[float | None, tuple[str, ...]]:
    """Place the workers in the cluster where they fit first. If that is known of none, nothing is known of those
    after them either."""
    times = [forecast.at(workers) for forecast in forecasts]
    soonest = min(times)
    if soonest < math.inf:
        return forecasts[times.index(soonest)].place(workers)
    holders = [forecast.place(workers)[1] for forecast in forecasts]
    return None, next(filter(None, holders), ())


class _ExplanationCache:
    """Holds the messages and forecasts that are equal for jobs that ask for the same, during one decision."""

    def __init__(self, plan: Plan) -> None:
        ends = cache(lambda: _Ends(plan))
        self._plan = plan
        self._forecast: Callable[[Shape], _Forecast] = cache(lambda shape: _Forecast(plan, shape, ends()))
        self.list_holders = cache(partial(_list_holders, plan))
        self._rooms: dict[tuple[Claim, str | None], tuple[list[_Forecast], str]] = {}

    def room(self, entry: Entry, obstacle: Obstacle) -> tuple[list[_Forecast], str]:
        """The forecasts of the job's start in each cluster that could hold it, and why it does not start now."""
        known = self._rooms.get((entry.claim, obstacle.behind))
        if known is None:
            shapes = [shape for shape in entry.claim.shapes if shape.ever >= entry.job.min_workers]
            forecasts = [self._forecast(shape) for shape in shapes]
            if obstacle.behind is None:
                reason = describe_missing_room(
                    self._plan, entry, [(forecast.shape, forecast.room) for forecast in forecasts]
                )
            else:
                reason = _describe_delay(entry, obstacle.behind, describe_cluster(self._plan, obstacle.cluster))
            known = self._rooms[entry.claim, obstacle.behind] = forecasts, reason
        return known


def _list_holders(plan: Plan, share: Share | None, user: str, sweep: tuple[str, str] | None) -> tuple[str, ...]:
    """Running jobs that count for the limit: of a project and those below it, of a sweep, or of a user."""
    granted = (entry for entry in (*plan.running, *plan.queued) if entry.target)
    if share is not None:
        counted = (entry for entry in granted if share in entry.share.path)
    elif sweep is not None:
        charged = (entry for entry in (*plan.leaving, *plan.running, *plan.queued) if entry.charged)
        counted = (entry for entry in charged if (entry.job.project, entry.job.sweep) == sweep)
    elif user:
        counted = (entry for entry in granted if entry.job.user == user)
    else:
        return ()
    return tuple(entry.job.job_id for entry in islice(counted, MAX_HOLDERS))


def _describe_delay(entry: Entry, behind: str, where: str) -> str:
    return (
        f"Needs {count_text(entry.job.min_workers, 'worker')} of {entry.shape.need_text} each; to start now{where} "
        f"would delay {behind}, which is before it and whose start is reserved."
    )


class _Forecast:
    """Expected starts on one shape's nodes: each waiting job takes what comes free after those before it."""

    def __init__(self, plan: Plan, shape: Shape, ends: _Ends) -> None:
        self._coming = ends.list_for(shape)
        self._seen: deque[tuple[float, int, str]] = deque()
        """The ends of jobs that `at` has taken out of `_coming` and that no waiting job has used yet."""
        self._last: tuple[str, ...] = ()
        """The job that ended last in this forecast."""
        self._at = plan.now
        self.shape = shape
        self.room = self.free = shape.free()

    def at(self, workers: int) -> float:
        """The time that `place` would return, infinite if it is not known. Changes nothing."""
        if self.free >= workers or self.free < 0:
            return self._at if self.free >= workers else math.inf
        free = self.free
        for at, freed, _ in self._seen:
            free += freed
            if free >= workers:
                return at
        for following in self._coming:
            self._seen.append(following)
            free += following[1]
            if free >= workers:
                return following[0]
        return math.inf

    def place(self, workers: int) -> tuple[float | None, tuple[str, ...]]:
        """Take workers for a waiting job. Return when they are free, or None if that is not known, and the jobs that
        free them. Workers that earlier calls have taken are not counted."""
        if self.free >= workers:
            self.free -= workers
            return self._known_at(), self._last
        if self.free < 0:
            return None, self._last
        holders: list[str] = []
        while self.free < workers:
            following = self._seen.popleft() if self._seen else next(self._coming, None)
            if following is None:
                self.free = -UNLIMITED
                return None, self._held_by(holders)
            self._at, freed, job_id = following
            self.free += freed
            holders.append(job_id)
        self.free -= workers
        return self._known_at(), self._held_by(holders)

    def _known_at(self) -> float | None:
        return self._at if self._at < math.inf else None

    def _held_by(self, holders: list[str]) -> tuple[str, ...]:
        if not holders:
            return self._last
        self._last = (holders[-1],)
        return tuple(holders[:MAX_HOLDERS])


class _Ends:
    """The ends of running jobs at their present rate, and how many workers of a shape then come free: at an infinite
    time those of jobs of unknown length, and of running ones whose rate was not measured yet."""

    def __init__(self, plan: Plan) -> None:
        now = plan.now
        ends = [(now, entry.job.job_id, entry) for entry in plan.leaving if entry.floor]
        for entry in (*plan.running, *plan.queued):
            job = entry.job
            if entry.floor:
                is_known = job.left is not None and (job.is_measured or not job.granted)
                at = now + job.seconds_to_end[1] if is_known else math.inf
                ends.append((at if job.granted else at + job.start_s, job.job_id, entry))
        ends.sort()
        self._ends = ends

    def list_for(self, shape: Shape) -> Iterator[tuple[float, int, str]]:
        """The ends by time, as (time, workers that come free, job id). Workers that differ from the shape's count as
        about as many as fit in their place."""
        factors: dict[int, float] = {}
        for at, job_id, entry in self._ends:
            factor = factors.get(id(entry.shape))
            if factor is None:
                overlaps = entry.shape.overlaps(shape)
                factor = factors[id(entry.shape)] = shape.per_worker(entry.shape)[0] if overlaps else -1.0
            if factor >= 0:
                yield at, entry.floor if factor == 1.0 else int(entry.floor * factor), job_id


def describe_cluster(plan: Plan, cluster: str) -> str:
    """Return " in the cluster west", with a space before it; empty if there is only one cluster."""
    return f" in the cluster {cluster}" if plan.has_clusters and cluster else ""


def describe_closed_clusters(plan: Plan, job: MarketJob) -> str | None:
    """Why more nodes would not help: no cluster in which the job may start takes jobs. None if one does."""
    if job.cluster:
        return _describe_named_cluster(plan, job)
    taking = {name for name in plan.known_clusters if _find_state(plan, name) is ClusterState.OPEN}
    if taking and not taking <= job.excluded_clusters:
        return None
    if taking:
        where = f"the cluster {min(taking)}" if len(taking) == 1 else f"the clusters {join_names(sorted(taking))}"
        return f"Its checkpoints (checkpoint.url) are not known to be reachable in {where}. It waits until they are."
    message = _describe_left_out(plan, job)
    return f"No cluster takes jobs now.{message}" if message else None


def _describe_named_cluster(plan: Plan, job: MarketJob) -> str | None:
    name = job.cluster
    obstacles = {
        None: "no cluster of this name has joined. Join it (shoal join), or",
        ClusterState.AWAY: "this cluster does not answer. The job starts when it answers again; to start elsewhere,",
        ClusterState.CORDONED: f"this cluster is cordoned. Uncordon it (shoal clusters uncordon {name}), or",
    }
    if name in job.excluded_clusters:
        obstacles[ClusterState.OPEN] = (
            "its checkpoints (checkpoint.url) are not known to be reachable there. It waits until they are; to start "
            "elsewhere,"
        )
    obstacle = obstacles.get(_find_state(plan, name))
    return None if obstacle is None else f"worker.cluster is {name}, and {obstacle} set worker.cluster: any."


def _find_state(plan: Plan, name: str) -> ClusterState | None:
    """Tell whether the cluster takes jobs; None if no cluster of this name has joined."""
    return plan.clusters.get(name) or (ClusterState.OPEN if name in plan.room.clusters else None)


def describe_missing_nodes(plan: Plan, entry: Entry) -> str:
    """Why the job's minimum fits into the empty nodes of no cluster."""
    job, shapes = entry.job, entry.claim.shapes
    needs = f"Needs {count_text(job.min_workers, 'worker')} of {job.need.describe()} each; the nodes that it may use"
    where = describe_cluster(plan, entry.shape.cluster)
    if where and job.cluster:
        return (
            f"{needs}{where} have room for {entry.shape.ever}. Add nodes there, lower elasticity.min_workers, or set "
            "worker.cluster: any."
        )
    room = (
        _describe_rooms([(shape, shape.ever) for shape in shapes]) if len(shapes) > 1 else f"{entry.shape.ever}{where}"
    )
    spans = describe_span(job, [shape.ever for shape in shapes])
    left_out = _describe_left_out(plan, job)
    return f"{needs} have room for {room}{spans}. Add nodes, or lower elasticity.min_workers.{left_out}"


def describe_missing_room(plan: Plan, entry: Entry, rooms: Sequence[tuple[Shape, int]]) -> str:
    """Why the job's minimum fits into no cluster now, by the room in each that could hold it."""
    job, [(first, room), *others] = entry.job, rooms
    needs = f"Needs {count_text(job.min_workers, 'worker')} of {entry.shape.need_text} each"
    helps = f"Raise the priority above {job.priority} to preempt jobs, or add nodes."
    if others:
        spans = describe_span(job, [room for _, room in rooms])
        freed = f"{_describe_rooms(rooms)} can be freed by shrinking other jobs to their minimum"
        return f"{needs}; {freed}{spans}. {helps}{_describe_left_out(plan, job)}"
    where = describe_cluster(plan, first.cluster)
    if where and job.cluster:
        helps = f"{helps} With worker.cluster: any it may start elsewhere."
    freed = f"{room} can be freed{where} by shrinking other jobs to their minimum"
    return f"{needs}; {freed}. {helps}{_describe_left_out(plan, job)}"


def _describe_rooms(rooms: Sequence[tuple[Shape, int]]) -> str:
    """ "3 in the cluster east, 2 in the cluster west": the most first."""
    if not any(room for _, room in rooms):
        return f"0 in each of the clusters {join_names([shape.cluster for shape, _ in rooms])}"
    ordered = sorted(rooms, key=lambda pair: (-pair[1], pair[0].cluster))
    named = [f"{room} in the cluster {shape.cluster}" for shape, room in ordered[:_MOST_NAMED]]
    more = len(ordered) - _MOST_NAMED
    return ", ".join([*named, f"less in {count_text(more, 'other')}"] if more > 0 else named)


def describe_span(job: MarketJob, rooms: Sequence[int]) -> str:
    """Words for the case that the clusters together would have room enough; otherwise empty."""
    is_enough = len(rooms) > 1 and sum(rooms) >= job.min_workers
    return ", and a job does not span clusters" if is_enough else ""


def _describe_left_out(plan: Plan, job: MarketJob) -> str:
    """The clusters that are left out, as further sentences."""
    if job.cluster:
        return ""
    refused = []
    for name in sorted(plan.known_clusters):
        state = _find_state(plan, name)
        if state is ClusterState.AWAY:
            refused.append(f" The cluster {name} does not answer.")
        elif state is ClusterState.CORDONED:
            refused.append(f" The cluster {name} is cordoned.")
        elif name in job.excluded_clusters:
            refused.append(f" Its checkpoints are not known to be reachable in the cluster {name}.")
    return "".join(refused)


class GrowthLimit(StrEnum):
    """What keeps a running job at its number of workers."""

    NO_FASTER = "no_faster"
    """The job trains no faster with more workers, by its throughput curve."""
    QUOTA = "quota"
    """The limit of the job's project is reached."""
    NO_ROOM = "no_room"
    """The nodes that it may use are full: with the minima of jobs, and with what others have reserved."""
    OTHERS_GAIN_MORE = "others_gain_more"
    """Other jobs hold workers above their minima, and these add more there."""
    PAUSE_COSTS_MORE = "pause_costs_more"
    """There is room, and the change would cost more time than it saves."""
    SOON = "soon"
    """There is room: the next decision may use it."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A running job with fewer workers than it may have."""

    job_id: str
    workers: int
    """Number of workers that the job is granted."""
    max_workers: int
    limit: GrowthLimit
    reason: str


def explain_held_back(state: MarketState, now: float) -> list[HeldBack]:
    """One answer for each running job with a grant below its `max_workers`; those that pause or end are left out.

    Without this a growth that is left out would be refused silently. The simulator does not ask: it has no
    readers. Takes about half as long as a decision.

    `state`: the market once the decisions are in effect (`decide.after`), so the answers are about the grants that
    people see.
    """
    plan = Plan(state, now)
    for entry in (*plan.leaving, *plan.running):
        workers = max(entry.job.granted, entry.job.held) if entry.job.is_leaving else entry.job.granted
        if workers:
            plan.keep(entry, plan.stay(entry, workers), workers)
    short = [entry for entry in plan.running if entry.job.granted < entry.job.max_workers]
    spare = [entry for entry in plan.running if entry.job.granted > entry.job.min_workers] if short else []
    answers = []
    for entry in short:
        limit, reason = _find_growth_limit(entry, spare, describe_cluster(plan, entry.shape.cluster))
        answers.append(HeldBack(entry.job.job_id, entry.job.granted, entry.job.max_workers, limit, reason))
    return answers


def _find_growth_limit(entry: Entry, spare: Sequence[Entry], where: str) -> tuple[GrowthLimit, str]:
    job, have = entry.job, entry.job.granted
    if have >= job.min_workers and not hull(job.curve, have, job.max_workers):
        message = f"By what was predicted and measured, it trains no faster with more than {count_workers(have)}."
        return GrowthLimit.NO_FASTER, message
    allowed = entry.share.room()
    if allowed <= 0:
        return GrowthLimit.QUOTA, _describe_quota(entry)
    reach = have + int(min(entry.shape.free(job.max_workers - have), allowed, job.max_workers - have))
    segments = hull(job.curve, have, reach) if reach > have else ()
    if not segments:
        return _explain_full(entry, spare, where)
    size = segments[-1][0]
    if have >= job.min_workers and not pays(job, size):
        return GrowthLimit.PAUSE_COSTS_MORE, _describe_pause(job, size)
    message = f"There is room for {count_workers(size - have)} more ({describe_change(job, size)}): it may grow soon."
    return GrowthLimit.SOON, message


def _describe_quota(entry: Entry) -> str:
    share = entry.share.tightest()
    limit = share.project.limit or 0
    return (
        f"Project {share.project.name} has {share.used} of its limit of {count_text(limit, 'worker')}. Raise the limit."
    )


def _explain_full(entry: Entry, spare: Sequence[Entry], where: str) -> tuple[GrowthLimit, str]:
    others = [room for room in spare if room is not entry and room.shape.overlaps(entry.shape)]
    if not others:
        message = (
            f"The nodes that it may use{where} have no room for another worker ({entry.shape.need_text}): other jobs "
            "need all of it for their minimum, or have reserved it. Add nodes."
        )
        return GrowthLimit.NO_ROOM, message
    above = sum(other.job.granted - other.job.min_workers for other in others)
    hold, adds = "holds" if len(others) == 1 else "hold", "adds" if above == 1 else "add"
    names = join_names(tuple(other.job.job_id for other in others))
    message = (
        f"No worker ({entry.shape.need_text}) is free{where}. {names} {hold} {above} above the minimum, which {adds} "
        f"more there than here. Raise the priority above {entry.job.priority}, or add nodes."
    )
    return GrowthLimit.OTHERS_GAIN_MORE, message


def _describe_pause(job: MarketJob, size: int) -> str:
    horizon_s = min(HORIZON_S, seconds_left(job, size))
    saved_s = horizon_s * (job.curve.rate(size) / job.curve.rate(job.granted) - 1)
    saves = f"Growing to {count_text(size, 'worker')} saves {duration_text(saved_s)}"
    costs = f"and costs a pause of {duration_text(job.switch_s)}. Raise elasticity.min_workers to force it."
    if horizon_s < HORIZON_S:
        left = duration_text(seconds_left(job, job.granted))
        return f"It ends in about {left}. {saves} of that {costs}"
    return f"{saves} in the next {duration_text(horizon_s)} {costs}"
