"""Who runs: running jobs keep their minimum, and queued jobs start as soon as theirs can be had by shrinking others.

    1 keep      each running job keeps its minimum, as far as the nodes and its project's limit allow
    2 turns     claims in order: the job that has waited for long, guaranteed quota, then priority, then the project
                with the least, then the queue
    3 admit     a claim is met from what is not anybody's minimum, else by preempting jobs of lower priority, or those
                of equal priority that have what is guaranteed to the claim's project
    4 reserve   the first claim that is not met has a reservation; a later one starts only if it does not delay it

A job that may start in any of several clusters is admitted where that does the least harm: beside what jobs have, else
beside their minima (`_ClusterChoice`), else where those that are preempted have the least priority and workers.

What a job has above its minimum is divided later (`gains`), so admission may shrink any job to its minimum.
Jobs that ask for the same are refused together: the first refusal answers for all, until some job gets or loses places.
In a queue of thousands, priority also goes first within a project, and a decision starts MOST_STARTS jobs at most.
Called by `decide`. The ways to meet a claim stand together here, since each depends on what the others have booked or
reserved: places beside minima, the choice of a cluster, reservations, preemption.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeAlias

from shoal_service.core.scheduling.explaining import (
    describe_closed_clusters,
    describe_max_running,
    describe_missing_nodes,
    describe_project_limit,
    describe_sweep_limit,
    describe_user_limit,
)
from shoal_service.core.scheduling.market import (
    AGED_AFTER_S,
    AGED_UNTIL_S,
    MarketJob,
    WorkerNeed,
    seconds_left,
    starved_s,
)
from shoal_service.core.scheduling.plan import Claim, Entry, Obstacle, Plan, Precedence, Share
from shoal_service.core.scheduling.room import UNLIMITED, FreeNode, Shape, Sites, count

ROOM = Obstacle(None)

LONG_QUEUE = 1_000
"""If more jobs than this are queued, those of a project are admitted by priority first. Otherwise thousands of jobs
that are earlier in the queue would be admitted and then displaced, in one decision, by jobs of higher priority that are
later in it."""

MOST_STARTS = 1_000
"""Largest number of jobs that start in one decision. The remaining jobs start in later decisions, so that an urgent
job that arrives meanwhile does not wait until thousands have started."""

LATER = Obstacle(
    f"One decision starts at most {MOST_STARTS:,} jobs, and as many are before this one. The next goes on."
)

MAX_ROUNDS = 4

RECLAIM_AFTER_S = 60.0
"""A borrower of equal priority keeps its minimum until the claimant has waited this long, because meanwhile another job
may end or be shrunk."""

MANY = 100
"""If more victims than this are new, they are sorted with the others rather than inserted one by one."""

_Ranked: TypeAlias = tuple[float, float, str, Entry]


@dataclass(slots=True)
class Admission:
    """The result of an admission: jobs that wait, jobs that are preempted, number of jobs that start."""

    waiting: list[tuple[Entry, Obstacle]] = field(default_factory=list)
    """Queued jobs that do not start, each with what is in the way, in the order of their turns."""
    preempted: list[Entry] = field(default_factory=list)
    num_starts: int = 0
    is_cut_short: bool = False
    """True if some of the waiting jobs were not looked at, because MOST_STARTS jobs start."""


def keep_minima(plan: Plan) -> list[Entry]:
    """Book the minimum of every running job. Return the jobs that their project's limit no longer allows.

    Which jobs stay within the limits is decided first, by priority. Places are booked afterwards, in another order.
    """
    kept: list[Entry] = []
    above_limit: list[Entry] = []
    for entry in (*plan.leaving, *plan.running):
        floor = _find_floor(entry.job)
        if entry.share.has_limits and not entry.job.is_leaving and entry.share.room() < floor:
            above_limit.append(entry)
        elif floor:
            plan.charge(entry, floor)
            kept.append(entry)
    for entry in _order_by_known_places(kept):
        plan.keep(entry, entry.shape.stay(_find_floor(entry.job), entry.job.on_nodes), entry.charged)
    return above_limit


def _find_floor(job: MarketJob) -> int:
    """Number of workers that a job keeps whatever others need: its minimum, or all of them while it is leaving."""
    if job.is_leaving:
        return max(job.granted, job.held)
    return job.min_workers if job.min_workers < job.granted else job.granted


def _order_by_known_places(running: list[Entry]) -> list[Entry]:
    """Order the jobs: those whose places are known, then those that may be anywhere, the ones with fewest nodes first.

    In another order, a job whose workers have not started yet would be booked where others are, and its own places
    would seem free.
    """
    unknown = [entry for entry in running if not entry.job.on_nodes]
    if not unknown:
        return running
    unknown.sort(key=lambda entry: entry.shape.num_nodes)
    return [entry for entry in running if entry.job.on_nodes] + unknown


def admit(plan: Plan, above_limit: list[Entry]) -> Admission:
    """Meet the claims in order. Meet those of the waiting jobs again if others were preempted."""
    admission = Admission(preempted=list(above_limit))
    plan.aged = _find_aged(plan, above_limit)
    for _ in range(MAX_ROUNDS):
        before = len(admission.preempted)
        admission.waiting.clear()
        _meet_claims(plan, admission)
        if len(admission.preempted) == before or admission.is_cut_short:
            break
    return admission


def _find_aged(plan: Plan, above_limit: list[Entry]) -> Entry | None:
    """The job that goes first because it has waited for long; None if there is none. It is one job at a time, the one
    that was submitted first, so that a long queue of old jobs does not take the cluster from those of higher priority.
    The next one has its turn when this one has had its time."""
    old = sorted(plan.old, key=lambda entry: (entry.job.submitted_at, entry.job.job_id))
    for entry in old:
        if entry.job.granted and starved_s(entry.job, plan.now) >= AGED_UNTIL_S and entry not in above_limit:
            return entry
    for entry in old:
        least = entry.job.min_workers
        if entry.job.granted or starved_s(entry.job, plan.now) < AGED_AFTER_S or entry.claim.ever < least:
            continue
        if find_blocking_limit(plan, entry, least) is None:
            return entry
    return None


def _meet_claims(plan: Plan, admission: Admission) -> None:
    admitter, refusals = _ClaimAdmitter(plan, admission), _Refusals(plan)
    waiting = admission.waiting
    for entry in list_turns(plan, admission.preempted):
        known = refusals.find(entry)
        if known is not None:
            waiting.append((entry, known))
            continue
        if admission.num_starts >= MOST_STARTS and _is_one_of_many(plan, entry):
            waiting.extend([(later, LATER) for later in _list_left_over(plan, waiting)])
            admission.is_cut_short = True
            return
        obstacle, is_of_claim = admitter.admit(entry)
        is_queued = not entry.job.granted
        if obstacle is None:
            admission.num_starts += is_queued
            continue
        if is_of_claim:
            refusals.add(entry, obstacle)
        if is_queued:
            waiting.append((entry, obstacle))


class _Refusals:
    """Remembers what is in the way of every queued job with a claim, until some job gets or loses places."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._as_of = plan.num_changes
        self._refused: dict[tuple[Claim, bool], Obstacle] = {}
        """By claim, and whether it was that of a job that has not waited long enough to get back what is guaranteed to
        its project. Others with the same claim may have waited, and have a better right."""

    def find(self, entry: Entry) -> Obstacle | None:
        if self._as_of != self._plan.num_changes:
            self._refused.clear()
            self._as_of = self._plan.num_changes
            return None
        refusal = self._refused.get((entry.claim, False))
        if refusal is None and entry.share.has_guarantee and not has_waited(entry.job, self._plan.now):
            refusal = self._refused.get((entry.claim, True))
        return refusal if refusal is None or _is_one_of_many(self._plan, entry) else None

    def add(self, entry: Entry, obstacle: Obstacle) -> None:
        if _is_one_of_many(self._plan, entry):
            is_early = entry.share.has_guarantee and not has_waited(entry.job, self._plan.now)
            self._refused[entry.claim, is_early] = obstacle


def _is_one_of_many(plan: Plan, entry: Entry) -> bool:
    """Return whether the job asks for no more than the others with its claim: it is queued and is not the one that has
    waited for long."""
    return not entry.job.granted and entry is not plan.aged


def _displace(admission: Admission, victims: list[Entry], claimant: Entry) -> None:
    """Preempt the victims that run. Those that were admitted in this decision wait again, and hand on what they
    took."""
    for entry in victims:
        if entry.job.granted:
            admission.preempted.append(entry)
            continue
        admission.num_starts -= 1
        admission.waiting.append((entry, ROOM))
        entry.shape = entry.claim.shape
        claimant.donors = (*claimant.donors, *entry.donors)
        entry.donors = ()
        for earlier in admission.preempted:
            if earlier.beneficiary == entry.job.job_id:
                earlier.beneficiary = claimant.job.job_id


class _ClaimAdmitter:
    """Meets the claims of one round: beside the minima of others and without delay of a reserved start, else by
    preemption."""

    def __init__(self, plan: Plan, admission: Admission) -> None:
        self._plan = plan
        self._admission = admission
        self._reservations = _Reservations(plan)
        self._preemption = _Preemption(plan)
        self._choice = _ClusterChoice(plan)

    def admit(self, entry: Entry) -> tuple[Obstacle | None, bool]:
        """Book the job's minimum, or return what is in the way. The second value is whether that is in the way of every
        queued job with this claim, until some job gets or loses places."""
        job, claim, plan = entry.job, entry.claim, self._plan
        if claim.ever < job.min_workers:
            closed = describe_closed_clusters(plan, job)
            return Obstacle(closed or describe_missing_nodes(plan, entry), is_limit=closed is not None), True
        if claim.has_limits:
            obstacle = find_blocking_limit(plan, entry, job.min_workers - entry.charged)
            if obstacle is not None:
                return obstacle, True
        return self._admit_where_best(entry, job.min_workers - entry.target)

    def _admit_where_best(self, entry: Entry, missing: int) -> tuple[Obstacle | None, bool]:
        """Admit the job in that of its clusters where this does the least harm."""
        shapes = [shape for shape in entry.claim.shapes if shape.ever >= missing]
        fitting = [shape for shape in shapes if not shape.lacks(missing)]
        if not fitting and not self._preemption.may_help(entry, missing):
            self._reservations.reserve(entry, shapes)
            return ROOM, True
        ranked = self._choice.rank(entry, missing, fitting) if len(fitting) > 1 else fitting
        behind: _Reservation | None = None
        full: list[Shape] = []
        for shape in (*ranked, *(shape for shape in shapes if shape not in fitting)):
            entry.shape = shape
            taken = self._reservations.take(entry, missing)
            if taken is None:
                full.append(shape)
            elif isinstance(taken, _Reservation):
                behind = behind or taken
            else:
                self._plan.book(entry, taken)
                self._note_admitted(entry, missing)
                return None, False
        if self._preempt_where_best(entry, missing, full):
            self._note_admitted(entry, missing)
            return None, False
        entry.shape = entry.claim.shape
        if behind is not None:
            return Obstacle(None, behind=behind.entry.job.job_id, cluster=behind.shape.cluster), False
        self._reservations.reserve(entry, shapes)
        return ROOM, False

    def _note_admitted(self, entry: Entry, missing: int) -> None:
        self._preemption.add(entry)
        if self._plan.has_clusters:
            self._choice.note_booked(entry, missing)

    def _preempt_where_best(self, entry: Entry, missing: int, shapes: list[Shape]) -> bool:
        """Preempt jobs in that of these clusters where they have the least priority and workers. False: nothing has
        changed."""
        if len(shapes) > 1:
            harms = []
            for shape in shapes:
                entry.shape = shape
                harm = self._preemption.find_harm(entry, missing)
                if harm is not None:
                    harms.append((harm, shape.cluster, shape))
            shapes = [min(harms)[-1]] if harms else []
        if not shapes:
            return False
        entry.shape = shapes[0]
        return self._preempt(entry, missing)

    def _preempt(self, entry: Entry, missing: int) -> bool:
        """Make room by preemption in the cluster of the job's shape, and book it. False: that cannot be done, and
        nothing has changed."""
        victims = self._preemption.make_room(entry, missing)
        if not victims:
            return False
        _displace(self._admission, victims, entry)
        taken = entry.shape.take_all(missing)
        assert taken is not None, "preemption has made room"
        self._plan.book(entry, taken)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Reservation:
    """A reserved start, which backfill may not delay: what each node can spare until then, beside the minimum of the
    job."""

    entry: Entry
    shape: Shape
    """The cluster and the nodes where the job is to start."""
    at: float
    spare: dict[FreeNode, FreeNode]
    """What is free at that time on each node that changes until then. The other nodes have what is free now."""

    def fits(self, free: FreeNode, need: WorkerNeed) -> int:
        """The number of such workers that the node can spare at that time."""
        spare = self.spare.get(free)
        return UNLIMITED if spare is None else spare.fits(need)

    def spend(self, need: WorkerNeed, sites: Sites) -> None:
        """Take the places of these workers from what the nodes can spare."""
        for free, workers in sites:
            spare = self.spare.get(free)
            if spare is not None:
                spare.reserve(need, workers)


class _Reservations:
    """Reserved starts (EASY backfill): what a job waits for, until when, and who may start before it. Each set of nodes
    that no other reservation uses has one.

    The first job that does not fit has a reservation: the time at which the minima of enough running jobs have come
    free. Another job starts before that time only if it ends before it, or takes what its nodes can spare at that time.
    It is assumed that running jobs end as early as they can and the other job as late as it can, so backfill
    delays no reserved start.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._all: list[_Reservation] = []
        self._at_most: dict[tuple[Shape, tuple[_Reservation, ...]], tuple[int, int]] = {}
        """Most workers of a shape that can be taken beside some reservations, with `room.num_returns` when that was
        found. It holds while no workers leave their nodes."""

    def take(self, entry: Entry, workers: int) -> Sites | _Reservation | None:
        """Take places for the workers that the job lacks. Return the places; or the reservation that they would delay;
        or None: there is no room."""
        if not self._all:
            return entry.shape.take_all(workers)
        in_the_way = [reserved for reserved in self._all if self._holds_back(reserved, entry)]
        shape = entry.shape
        if not in_the_way:
            return shape.take_all(workers)
        key = (shape, tuple(in_the_way))
        at_most, as_of = self._at_most.get(key, (UNLIMITED, 0))
        room = self._plan.room
        if shape.lacks(workers) or (workers > at_most and as_of == room.num_returns):
            return in_the_way[0]
        need = shape.need
        sites = shape.take_beside(workers, lambda free: min(reserved.fits(free, need) for reserved in in_the_way))
        if count(sites) < workers:
            room.give_back(shape, sites)
            self._at_most[key] = (count(sites), room.num_returns)
            return in_the_way[0]
        for reserved in in_the_way:
            reserved.spend(need, sites)
        return sites

    def _holds_back(self, reserved: _Reservation, entry: Entry) -> bool:
        """Return whether the reservation holds the job back: if the job started now, it would still be there at the
        reserved time, and it has no higher priority."""
        job = entry.job
        if reserved.entry is entry or reserved.entry.job.priority < job.priority:
            return False
        if not reserved.shape.overlaps(entry.shape):
            return False
        return not self._plan.now + job.start_s + seconds_left(job, job.min_workers) <= reserved.at

    def reserve(self, entry: Entry, shapes: Sequence[Shape]) -> None:
        """Reserve the start of a job that fits into none of these shapes, where it is earliest, unless a job before it
        has reserved on nodes that it may use."""
        if not any(reserved.shape.overlaps(shape) for reserved in self._all for shape in shapes):
            reservations = [self._make_reservation(entry, shape) for shape in shapes]
            self._all.append(min(reservations, key=lambda reservation: reservation.at))

    def _make_reservation(self, entry: Entry, shape: Shape) -> _Reservation:
        """The reservation of a start in this shape. The workers start where others end, so that what is free now stays
        spare."""
        need = shape.need
        missing = entry.job.min_workers - entry.target
        fits = shape.free(missing)
        at = self._plan.now
        spare: dict[FreeNode, FreeNode] = {}
        for ends, other in _earliest_ends(self._plan):
            if fits >= missing:
                break
            at = ends
            for free, workers in other.sites:
                if shape.may_use(free):
                    then = spare.setdefault(free, free.copy())
                    fits -= then.fits(need)
                    then.reserve(other.shape.need, -workers)
                    fits += then.fits(need)
        for free in (*(free for free in shape.nodes if free in spare), *shape.nodes):
            if missing <= 0:
                break
            then = spare.setdefault(free, free.copy())
            workers = min(missing, then.fits(need))
            then.reserve(need, workers)
            missing -= workers
        return _Reservation(entry, shape, at if missing <= 0 else math.inf, spare)


def _earliest_ends(plan: Plan) -> Iterator[tuple[float, Entry]]:
    """The earliest ends of running jobs, by time, as if each had its best number of workers; at once where the work is
    not known."""
    now = plan.now
    ends = [(now, entry.job.job_id, entry) for entry in plan.leaving if entry.floor]
    for entry in (*plan.running, *plan.queued):
        if entry.floor:
            job = entry.job
            at = now if job.left is None else now + job.seconds_to_end[0]
            ends.append((at if job.granted or job.left is None else at + job.start_s, job.job_id, entry))
    heapq.heapify(ends)  # the first few are enough as a rule
    while ends:
        at, _, entry = heapq.heappop(ends)
        yield at, entry


class _ClusterChoice:
    """Chooses in which of several clusters a queued job starts: where its minimum does the least harm, then where it
    can grow most.

        1 harm     workers that jobs there have above their minima and would give; none where enough are free
        2 growth   what is above the minima there, divided among the jobs there that can use it, with this one
        3 name     the first

    A job that cannot grow takes no account of growth where it shrinks no job: small jobs fill one cluster and leave
    room for large ones in the next. The numbers are of workers like the job's, and rough where workers or nodes differ;
    whether the minimum fits is decided by the caller, node by node. It books nothing. Counts are kept up to date by
    `note_booked`, and made again after other changes.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._as_of = -1
        self._room: dict[Shape, tuple[float, float]] = {}
        """Workers of each shape for which there is room beside the minima, and beside all that jobs have."""

    def rank(self, entry: Entry, missing: int, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes with the best one first. The job's minimum fits into each of them beside the minima of others."""
        if self._as_of != self._plan.num_changes:
            self._room.clear()
            self._as_of = self._plan.num_changes
        can_grow = entry.job.max_workers > entry.job.min_workers

        def order(shape: Shape) -> tuple[float, float, str]:
            if shape not in self._room:
                self._room[shape] = self._count(shape)
            above, free = self._room[shape]
            harm = max(0.0, missing - max(0.0, free))
            growth = (above - missing) / (1 + self._plan.num_elastic[shape.cluster])
            return harm, -growth if can_grow or harm else 0.0, shape.cluster

        return sorted(shapes, key=order)

    def note_booked(self, entry: Entry, workers: int) -> None:
        """Notes that the job has just been given places for `workers` workers, and that nothing else has changed."""
        if self._as_of != self._plan.num_changes - 1:
            return
        self._as_of = self._plan.num_changes
        for shape, (above, free) in self._room.items():
            if shape.overlaps(entry.shape):
                taken = workers * shape.per_worker(entry.shape)[0]
                self._room[shape] = above - taken, free - taken

    def _count(self, shape: Shape) -> tuple[float, float]:
        above = shape.free()
        surplus = 0.0
        for entry in self._plan.running:
            if entry.job.granted > entry.target > 0 and entry.shape.overlaps(shape):
                surplus += (entry.job.granted - entry.target) * shape.per_worker(entry.shape)[0]
        return above, above - surplus


class _Preemption:
    """Chooses whom an urgent job displaces: running jobs of lower priority, the latest in the queue first, as few as
    necessary.

    A job that lost nodes and no longer has its minimum does not train, so it also gives way to a job of its own
    priority. The job that has waited for long (`plan.aged`) displaces others whatever their priority, and no job
    displaces it. A job that has waited RECLAIM_AFTER_S for what is guaranteed to its project also displaces jobs of its
    own priority, if their projects have more than is guaranteed to them. What it gets is not taken back in
    the same way, because neither project is then below its guarantee for the jobs of the other.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        latest_first = (*plan.queued, *reversed(plan.running))  # nearly sorted already
        self._victims = sorted([_ranked(entry) for entry in latest_first if entry.target])
        self._added: list[Entry] = []
        """Possible victims that are not in order yet: most jobs are admitted before anybody is displaced."""
        self._least_added = math.inf
        """Lowest priority of the jobs in `_added`."""
        self._failed: dict[tuple[Shape, Share, Share | None], tuple[float, int]] = {}
        """Priority and number of workers of the last claim that could not be met, by the shape, the project, and the
        project to which workers are owed. What others may lose to a claim depends on the project."""

    def add(self, entry: Entry) -> None:
        """Add a job that was admitted in this decision; a job of higher priority may still displace it."""
        self._added.append(entry)
        if entry.job.priority < self._least_added:
            self._least_added = entry.job.priority

    def may_help(self, claimant: Entry, missing: int) -> bool:
        """Return whether preemption may help: some job has a lower priority, or the same one if workers are owed to the
        claimant's project."""
        least = min(self._victims[0][0] if self._victims else math.inf, self._least_added)
        priority = self._priority(claimant)
        return least < priority or (least == priority and self._owed_to(claimant, missing) is not None)

    def _put_in_order(self) -> None:
        if len(self._added) > MANY:
            self._victims += map(_ranked, self._added)
            self._victims.sort()
        else:
            for entry in self._added:
                insort(self._victims, _ranked(entry))
        self._added.clear()
        self._least_added = math.inf

    def _priority(self, claimant: Entry) -> float:
        return math.inf if claimant is self._plan.aged else claimant.job.priority

    def _owed_to(self, claimant: Entry, missing: int) -> Share | None:
        """The project that gets back what is guaranteed to it by this claim; None if there is none, or the claimant has
        not waited long enough."""
        return claimant.share.owed(missing) if has_waited(claimant.job, self._plan.now) else None

    def find_harm(self, claimant: Entry, missing: int) -> tuple[float, int] | None:
        """The highest priority among the jobs that `make_room` would preempt, and the workers that would count less for
        their projects; None if it cannot make room. Nothing has changed afterwards."""
        cleared = self._make_room(claimant, missing)
        if not cleared:
            return None
        for victim in reversed(cleared):
            self._put_back(victim)
        return max([victim.ranked[0] for victim in cleared]), sum([victim.charged for victim in cleared])

    def make_room(self, claimant: Entry, missing: int) -> list[Entry]:
        """Preempt jobs until `missing` workers fit. Empty if that cannot be done, and then nothing has changed."""
        priority, owed = self._priority(claimant), self._owed_to(claimant, missing)
        cleared = self._make_room(claimant, missing)
        for victim in cleared:
            del self._victims[bisect_left(self._victims, victim.ranked)]
            victim.entry.beneficiary = claimant.job.job_id
            victim.entry.aged = claimant.aged = claimant is self._plan.aged
            if victim.ranked[0] == priority:
                victim.entry.owed = claimant.owed = owed
        entries = [victim.entry for victim in cleared]
        claimant.donors = (*claimant.donors, *(entry.job.job_id for entry in entries if entry.job.granted))
        return entries

    def _make_room(self, claimant: Entry, missing: int) -> list[_Victim]:
        """Take the places of as few jobs as necessary. Empty: none was taken."""
        if not self.may_help(claimant, missing):
            return []
        priority, owed = self._priority(claimant), self._owed_to(claimant, missing)
        failed = self._failed.get((claimant.shape, claimant.share, owed))
        if failed is not None and priority <= failed[0] and missing >= failed[1]:
            return []
        self._put_in_order()
        cleared = self._clear(claimant, missing, owed)
        if not cleared and claimant is not self._plan.aged:
            # The failure of a job that has waited for long says nothing of other projects, whose guarantees differ.
            self._failed[claimant.shape, claimant.share, owed] = (priority, missing)
        return cleared

    def _clear(self, claimant: Entry, missing: int, owed: Share | None) -> list[_Victim]:
        cleared: list[_Victim] = []
        shape, share, most = claimant.shape, claimant.share, self._priority(claimant)
        spare: dict[Share, float] = {}
        """What each project has beyond what is guaranteed to it, as of the last job that was cleared."""
        for ranked in self._victims:
            entry = ranked[-1]
            if ranked[0] >= most and (owed is None or ranked[0] > most):
                break
            if ranked[0] == most and owed in entry.share.path:
                continue
            beyond = spare.get(entry.share)
            if beyond is None:
                beyond = spare[entry.share] = entry.share.spare_beside(share)
            if entry.charged > beyond or entry in (claimant, self._plan.aged) or not entry.shape.overlaps(shape):
                continue
            cleared.append(_Victim(ranked, entry, entry.sites, entry.charged))
            self._plan.clear(entry)
            spare.clear()
            if not shape.lacks(missing):
                return self._spare(shape, missing, cleared)
        for victim in reversed(cleared):
            self._put_back(victim)
        return []

    def _spare(self, shape: Shape, missing: int, cleared: list[_Victim]) -> list[_Victim]:
        """Give the places back to jobs whose workers are not needed after all, those of the highest priority first.
        Return the others."""
        taken = [cleared.pop()]  # there was no room without the last one
        for victim in reversed(cleared):
            self._put_back(victim)
            if shape.lacks(missing):
                self._plan.clear(victim.entry)
                taken.append(victim)
        return taken

    def _put_back(self, victim: _Victim) -> None:
        entry = victim.entry
        for free, workers in victim.sites:
            free.reserve(entry.job.need, workers)
        self._plan.keep(entry, victim.sites, victim.charged)


class _Victim(NamedTuple):
    """A job whose places were taken away, and what it takes to give them back."""

    ranked: _Ranked
    entry: Entry
    sites: Sites
    charged: int


def has_waited(job: MarketJob, now: float) -> bool:
    """Return whether the wait of the job has lasted long enough to displace borrowers of its own priority."""
    return now - (job.submitted_at if job.moved_at is None else job.moved_at) >= RECLAIM_AFTER_S


def _ranked(entry: Entry) -> _Ranked:
    job = entry.job
    priority: float = job.priority
    if entry.target < job.granted and entry.target < job.min_workers:
        priority -= 0.5  # it lost nodes and does not train
    return priority, -entry.order[0], job.job_id, entry


def list_turns(plan: Plan, preempted: list[Entry]) -> Iterator[Entry]:
    """The jobs in the order of their turns: running jobs below their minimum, then the one that has waited for long,
    then the other queued ones. The jobs of a project are in the order of the queue; in a long queue, by priority
    first."""
    gone = set(preempted)
    below = [entry for entry in plan.running if entry.is_below_minimum and entry not in gone]
    yield from [entry for entry in below if not plan.is_unplaced(entry)]
    lines = _list_lines(plan)
    if plan.aged is not None and not plan.aged.job.granted and not plan.aged.target:
        yield plan.aged
    if len(lines) == 1:
        yield from lines[0]
        return
    heads = [(_make_turn_key(plan, line[0]), plan.num_changes, line[0], iter(line[1:])) for line in lines]
    heapq.heapify(heads)
    while heads:
        turn, as_of, entry, later = heads[0]
        if as_of != plan.num_changes:
            current = _make_turn_key(plan, entry)
            if current != turn:
                heapq.heapreplace(heads, (current, plan.num_changes, entry, later))
                continue
        yield entry
        following = next(later, None)
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (_make_turn_key(plan, following), plan.num_changes, following, later))


def _list_lines(plan: Plan) -> list[list[Entry]]:
    """The queued jobs, without the one that has waited for long, as lists in which each job's turn follows that of the
    one before."""
    lines: dict[tuple[Share, int], list[Entry]] = {}
    line_of: dict[Claim, list[Entry]] = {}
    is_long = len(plan.queued) > LONG_QUEUE
    for entry in plan.queued:
        if entry.target or entry is plan.aged:
            continue
        claim = entry.claim
        line = line_of.get(claim)
        if line is None:
            key = claim.share, claim.priority if is_long else 0
            line = line_of[claim] = lines.setdefault(key, [])
        line.append(entry)
    return list(lines.values())


def _list_left_over(plan: Plan, waiting: list[tuple[Entry, Obstacle]]) -> list[Entry]:
    """The queued jobs of a long queue that neither start nor wait, in the order of their turns if nothing changes."""
    known = {entry for entry, _ in waiting}
    lines: dict[Precedence, list[list[Entry]]] = {}
    for line in _list_lines(plan):
        lines.setdefault(line[0].claim.precedence(plan.num_changes), []).append(line)
    merged = [heapq.merge(*equal, key=attrgetter("order")) for _, equal in sorted(lines.items(), key=itemgetter(0))]
    return [entry for entry in chain.from_iterable(merged) if entry not in known]


def _make_turn_key(plan: Plan, entry: Entry) -> tuple[Precedence, tuple[float, str]]:
    """Sort key of a queued job's turn; less is earlier. No two jobs have the same."""
    return entry.claim.precedence(plan.num_changes), entry.order


def find_blocking_limit(plan: Plan, entry: Entry, missing: int) -> Obstacle | None:
    """Return the limit that forbids the job `missing` more workers; None if no limit does.

    It is that of the job's project or of one above it, of its user, or of its sweep.
    """
    job, share = entry.job, entry.share
    if share.has_limits and share.room() < missing:
        tightest = share.tightest()
        # With a limit below its minimum it waits for ever, so no running job holds what it waits for.
        holder = tightest if (tightest.project.limit or 0) >= job.min_workers else None
        return Obstacle(describe_project_limit(job, tightest, missing), holder, is_limit=True)
    if entry.charged:
        return None
    full = share.full_of_jobs() if share.has_limits else None
    if full is not None:
        return Obstacle(describe_max_running(full), full, is_limit=True)
    most = plan.max_running_of(job.user)
    if most is not None and (runs := plan.running_of_user[job.user]) >= most:
        return Obstacle(describe_user_limit(job.user, runs, most), user=job.user, is_limit=True)
    key = job.project, job.sweep
    if job.sweep_limit is not None and (runs := plan.running_of_sweep[key]) >= job.sweep_limit:
        return Obstacle(describe_sweep_limit(job.sweep, runs, job.sweep_limit), sweep=key, is_limit=True)
    return None
