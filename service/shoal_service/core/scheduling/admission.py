"""Who runs: running jobs keep their minimum, and queued jobs start as soon as theirs can be had by shrinking others.

    1 keep      each running job keeps its minimum, as far as the nodes and its project's limit allow
    2 turns     claims in order: the job that has waited for long, guaranteed quota, then priority, then the project
                with the least, then the queue
    3 admit     a claim is met from what is not anybody's minimum, else by preempting jobs of lower priority, or those
                of equal priority that have what is guaranteed to the claim's project
    4 reserve   the first claim that is not met has a reservation; a later one starts only if it does not delay it

A job that may start in any of several clusters is admitted where that does the least harm: beside what jobs have, else
beside their minima (`cluster_choice`), else where those that are preempted have the least priority and workers.

What a job has above its minimum is divided later (`gains`). So admission shrinks without saying so.
Jobs that ask for the same are refused together: the first refusal answers for all, until some job gets or loses places.
In a queue of thousands, priority also goes first within a project, and a decision starts MOST_STARTS jobs at most.
Called by `decide`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter

from shoal_service.core.quantities import count_text
from shoal_service.core.scheduling.cluster_choice import ClusterChoice
from shoal_service.core.scheduling.estimates import AGED_AFTER_S, AGED_UNTIL_S, starved_s
from shoal_service.core.scheduling.explaining.clusters import closed_words, never_words
from shoal_service.core.scheduling.market import MarketJob
from shoal_service.core.scheduling.plan import Claim, Entry, Plan, Precedence
from shoal_service.core.scheduling.preemption import Preemption, has_waited
from shoal_service.core.scheduling.reservations import Reservation, Reservations
from shoal_service.core.scheduling.room import Shape
from shoal_service.core.scheduling.shares import Share


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a queued job does not start."""

    words: str | None
    """None: it waits for room."""
    share: Share | None = None
    """The project whose quota is in the way."""
    user: str = ""
    """The user whose limit is in the way."""
    sweep: tuple[str, str] | None = None
    """The sweep whose limit is in the way, by project and name."""
    is_limit: bool = False
    """More nodes would not help."""
    behind: str | None = None
    """The job with the reserved start that it would delay."""
    cluster: str = ""
    """The cluster in which it would delay that job."""


ROOM = Obstacle(None)

LONG_QUEUE = 1_000
"""In a queue of more jobs, those of a project are admitted by priority first. Else thousands that are earlier in the
queue would be admitted and then displaced, in one decision, by jobs of higher priority that are later in it."""

MOST_STARTS = 1_000
"""Jobs that start in one decision, at most; the next decision goes on. Each start is carried out by itself, and an
urgent job that comes meanwhile must not wait until thousands have started."""

LATER = Obstacle(
    f"One decision starts at most {MOST_STARTS:,} jobs, and as many are before this one. The next goes on."
)

MAX_ROUNDS = 4


@dataclass(slots=True)
class Admission:
    """What became of the claims."""

    waiting: list[tuple[Entry, Obstacle]] = field(default_factory=list)
    """Queued jobs that do not start, in order."""
    preempted: list[Entry] = field(default_factory=list)
    num_starts: int = 0
    is_cut_short: bool = False
    """Some of those that wait have not been looked at: MOST_STARTS jobs start."""


def keep_minima(plan: Plan) -> list[Entry]:
    """Book the minimum of every running job. Returns the jobs that their project's limit no longer allows.

    Who stays within the limits is decided first, by priority: the order in which places are booked says nothing of it.
    """
    kept: list[Entry] = []
    above_limit: list[Entry] = []
    for entry in (*plan.leaving, *plan.running):
        floor = _floor(entry.job)
        if entry.share.has_limits and not entry.job.is_leaving and entry.share.room() < floor:
            above_limit.append(entry)
        elif floor:
            plan.charge(entry, floor)
            kept.append(entry)
    for entry in _known_places_first(kept):
        plan.keep(entry, entry.shape.stay(_floor(entry.job), entry.job.on_nodes), entry.charged)
    return above_limit


def _floor(job: MarketJob) -> int:
    """Workers that it keeps whatever others need: all of them while it is leaving."""
    if job.is_leaving:
        return max(job.granted, job.held)
    return job.min_workers if job.min_workers < job.granted else job.granted


def _known_places_first(running: list[Entry]) -> list[Entry]:
    """Those whose places are known, then the others, which may be anywhere: those with the fewest nodes to be on first.

    In another order, a job whose workers have not started yet is booked where others are, and seems to leave its own
    places free.
    """
    unknown = [entry for entry in running if not entry.job.on_nodes]
    if not unknown:
        return running
    unknown.sort(key=lambda entry: entry.shape.num_nodes)
    return [entry for entry in running if entry.job.on_nodes] + unknown


def admit(plan: Plan, above_limit: list[Entry]) -> Admission:
    """Meet the claims in order; again for those that wait if others were preempted."""
    admission = Admission(preempted=list(above_limit))
    plan.aged = _aged(plan, above_limit)
    for _ in range(MAX_ROUNDS):
        before = len(admission.preempted)
        admission.waiting.clear()
        _meet_claims(plan, admission)
        if len(admission.preempted) == before or admission.is_cut_short:
            break
    return admission


def _aged(plan: Plan, above_limit: list[Entry]) -> Entry | None:
    """One job at a time, the one that was submitted first, so that a long queue of old jobs does not take the cluster
    from those of higher priority. The next one has its turn when this one has had its time."""
    old = sorted(plan.old, key=lambda entry: (entry.job.submitted_at, entry.job.job_id))
    for entry in old:
        if entry.job.granted and starved_s(entry.job, plan.now) >= AGED_UNTIL_S and entry not in above_limit:
            return entry
    for entry in old:
        least = entry.job.min_workers
        if entry.job.granted or starved_s(entry.job, plan.now) < AGED_AFTER_S or entry.claim.ever < least:
            continue
        if limit_in_the_way(plan, entry, least) is None:
            return entry
    return None


def _meet_claims(plan: Plan, admission: Admission) -> None:
    ways, refusals = _Ways(plan, admission), _Refusals(plan)
    waiting = admission.waiting
    for entry in turns(plan, admission.preempted):
        known = refusals.of(entry)
        if known is not None:
            waiting.append((entry, known))
            continue
        if admission.num_starts >= MOST_STARTS and _is_one_of_many(plan, entry):
            waiting.extend([(later, LATER) for later in _left_over(plan, waiting)])
            admission.is_cut_short = True
            return
        obstacle, is_of_claim = ways.admit(entry)
        is_queued = not entry.job.granted
        if obstacle is None:
            admission.num_starts += is_queued
            continue
        if is_of_claim:
            refusals.add(entry, obstacle)
        if is_queued:
            waiting.append((entry, obstacle))


class _Refusals:
    """What is in the way of every queued job with a claim, until some job gets or loses places."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._as_of = plan.num_changes
        self._refused: dict[Claim, Obstacle] = {}
        self._refused_early: dict[Claim, Obstacle] = {}
        """Those that have not waited for what is guaranteed to their project; others may have a better right."""

    def of(self, entry: Entry) -> Obstacle | None:
        if self._as_of != self._plan.num_changes:
            self._refused.clear()
            self._refused_early.clear()
            self._as_of = self._plan.num_changes
            return None
        found = self._refused.get(entry.claim)
        if found is None and self._refused_early and not has_waited(entry.job, self._plan.now):
            found = self._refused_early.get(entry.claim)
        return found if found is None or _is_one_of_many(self._plan, entry) else None

    def add(self, entry: Entry, obstacle: Obstacle) -> None:
        if _is_one_of_many(self._plan, entry):
            is_early = entry.share.has_guarantee and not has_waited(entry.job, self._plan.now)
            refused = self._refused_early if is_early else self._refused
            refused[entry.claim] = obstacle


def _is_one_of_many(plan: Plan, entry: Entry) -> bool:
    """The job asks for what others with its claim ask for: it neither runs nor has it waited for long."""
    return not entry.job.granted and entry is not plan.aged


def _displace(admission: Admission, victims: list[Entry], claimant: Entry) -> None:
    """Running jobs are preempted; jobs that were admitted in this decision wait again, and hand on what they took."""
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


class _Ways:
    """How the claims of one round are met: beside the minima of others and without delay of a reserved start, else by
    preemption."""

    def __init__(self, plan: Plan, admission: Admission) -> None:
        self._plan = plan
        self._admission = admission
        self._reservations = Reservations(plan)
        self._preemption = Preemption(plan)
        self._choice = ClusterChoice(plan)

    def admit(self, entry: Entry) -> tuple[Obstacle | None, bool]:
        """Book the job's minimum, or say what is in the way; and whether that is in the way of every queued job with
        this claim, until some job gets or loses places."""
        job, claim, plan = entry.job, entry.claim, self._plan
        if claim.ever < job.min_workers:
            closed = closed_words(plan, job)
            return Obstacle(closed or never_words(plan, entry), is_limit=closed is not None), True
        if claim.has_limits:
            obstacle = limit_in_the_way(plan, entry, job.min_workers - entry.charged)
            if obstacle is not None:
                return obstacle, True
        missing = job.min_workers - entry.target
        if len(claim.shapes) > 1:
            return self._in_any(entry, missing)
        shape = entry.shape
        found = self._reservations.take(entry, missing)
        if found is None or isinstance(found, Reservation):
            if shape.lacks(missing) and not self._preemption.may_help(entry, missing):
                self._reservations.reserve(entry, (shape,))
                return ROOM, True
            if found is not None:
                return _behind(found), False
            if not self._preempt(entry, missing):
                self._reservations.reserve(entry, (shape,))
                return ROOM, False
        else:
            plan.book(entry, found)
        self._admitted(entry, missing)
        return None, False

    def _admitted(self, entry: Entry, missing: int) -> None:
        self._preemption.add(entry)
        if self._plan.has_clusters:
            self._choice.booked(entry, missing)

    def _in_any(self, entry: Entry, missing: int) -> tuple[Obstacle | None, bool]:
        """In the cluster where it does the least harm."""
        shapes = [shape for shape in entry.claim.shapes if shape.ever >= missing]
        fitting = [shape for shape in shapes if not shape.lacks(missing)]
        if not fitting and not self._preemption.may_help(entry, missing):
            self._reservations.reserve(entry, shapes)
            return ROOM, True
        ranked = self._choice.ranked(entry, missing, fitting) if len(fitting) > 1 else fitting
        behind: Reservation | None = None
        full: list[Shape] = []
        for shape in (*ranked, *(shape for shape in shapes if shape not in fitting)):
            entry.shape = shape
            found = self._reservations.take(entry, missing)
            if found is None:
                full.append(shape)
            elif isinstance(found, Reservation):
                behind = behind or found
            else:
                self._plan.book(entry, found)
                self._admitted(entry, missing)
                return None, False
        if self._preempt_in_any(entry, missing, full):
            self._admitted(entry, missing)
            return None, False
        entry.shape = entry.claim.shape
        if behind is not None:
            return _behind(behind), False
        self._reservations.reserve(entry, shapes)
        return ROOM, False

    def _preempt_in_any(self, entry: Entry, missing: int, shapes: list[Shape]) -> bool:
        if len(shapes) > 1:
            harms = []
            for shape in shapes:
                entry.shape = shape
                harm = self._preemption.harm(entry, missing)
                if harm is not None:
                    harms.append((harm, shape.cluster, shape))
            shapes = [min(harms)[-1]] if harms else []
        if not shapes:
            return False
        entry.shape = shapes[0]
        return self._preempt(entry, missing)

    def _preempt(self, entry: Entry, missing: int) -> bool:
        """In the cluster of its shape; False: that cannot be done, and then nothing has changed."""
        victims = self._preemption.make_room(entry, missing)
        if not victims:
            return False
        _displace(self._admission, victims, entry)
        found = entry.shape.take_all(missing)
        assert found is not None, "preemption has made room"
        self._plan.book(entry, found)
        return True


def _behind(reserved: Reservation) -> Obstacle:
    return Obstacle(None, behind=reserved.entry.job.job_id, cluster=reserved.shape.cluster)


def turns(plan: Plan, preempted: list[Entry]) -> Iterator[Entry]:
    """Running jobs below their minimum, then the one that has waited for long, then the other queued ones; each
    project's in the order of the queue. In a long queue, also those of a project are by priority first."""
    gone = {id(entry) for entry in preempted}
    below = [entry for entry in plan.running if entry.is_below_minimum and id(entry) not in gone]
    yield from [entry for entry in below if not plan.is_unplaced(entry)]
    lines = _lines(plan)
    if plan.aged is not None and not plan.aged.job.granted and not plan.aged.target:
        yield plan.aged
    if len(lines) == 1:
        yield from lines[0]
        return
    heads = [(_turn(plan, line[0]), plan.num_changes, line[0], iter(line[1:])) for line in lines]
    heapq.heapify(heads)
    while heads:
        turn, as_of, entry, later = heads[0]
        if as_of != plan.num_changes:
            current = _turn(plan, entry)
            if current != turn:
                heapq.heapreplace(heads, (current, plan.num_changes, entry, later))
                continue
        yield entry
        following = next(later, None)
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (_turn(plan, following), plan.num_changes, following, later))


def _lines(plan: Plan) -> list[list[Entry]]:
    """Queued jobs whose turns follow each other, without the one that has waited for long."""
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


def _left_over(plan: Plan, waiting: list[tuple[Entry, Obstacle]]) -> list[Entry]:
    """The queued jobs of a long queue that neither start nor wait, in the order of their turns if nothing changes."""
    known = {id(entry) for entry, _ in waiting}
    lines: dict[Precedence, list[list[Entry]]] = {}
    for line in _lines(plan):
        lines.setdefault(line[0].claim.precedence(plan.num_changes), []).append(line)
    merged = [heapq.merge(*equal, key=attrgetter("order")) for _, equal in sorted(lines.items(), key=itemgetter(0))]
    return [entry for entry in chain.from_iterable(merged) if id(entry) not in known]


def _turn(plan: Plan, entry: Entry) -> tuple[Precedence, tuple[float, str]]:
    """Less is earlier. No two jobs have the same."""
    return entry.claim.precedence(plan.num_changes), entry.order


def limit_in_the_way(plan: Plan, entry: Entry, missing: int) -> Obstacle | None:
    """The limit of its project and of those above it, of its user or of its sweep, with which the job cannot have so
    many workers more."""
    job, share = entry.job, entry.share
    if share.has_limits and share.room() < missing:
        return _limit_obstacle(entry, missing)
    if entry.charged:
        return None
    full = share.full_of_jobs() if share.has_limits else None
    if full is not None:
        words = (
            f"Project {full.project.name} runs {count_text(full.running, 'job')}, and its max_running "
            f"is {full.project.max_running}. "
            f"Raise it, or wait for one of them."
        )
        return Obstacle(words, full, is_limit=True)
    most = plan.max_running_of(job.user)
    if most is not None and (runs := plan.running_of_user[job.user]) >= most:
        words = (
            f"User {job.user} runs {count_text(runs, 'job')}, and may run {most} at a time (max_running). Wait for one "
            f"of them, or raise the limit."
        )
        return Obstacle(words, user=job.user, is_limit=True)
    return _sweep_obstacle(plan, job)


def _sweep_obstacle(plan: Plan, job: MarketJob) -> Obstacle | None:
    key = job.project, job.sweep
    if job.sweep_limit is None or (runs := plan.running_of_sweep[key]) < job.sweep_limit:
        return None
    words = (
        f"Sweep {job.sweep} has {count_text(runs, 'job')} with workers, and its limit is {job.sweep_limit} "
        f"(sweep.limit). Waits until one of them ends."
    )
    return Obstacle(words, sweep=key, is_limit=True)


def _limit_obstacle(entry: Entry, missing: int) -> Obstacle:
    job = entry.job
    limited = [(one.project.limit, one) for one in entry.share.path if one.project.limit is not None]
    limit, share = min(limited, key=lambda pair: pair[0] - pair[1].used)
    name = share.project.name
    if limit < job.min_workers:
        words = (
            f"elasticity.min_workers is {job.min_workers}, and project {name} may have "
            f"{count_text(limit, 'worker')} (its limit). "
            f"Raise the limit, or lower min_workers."
        )
        return Obstacle(words, is_limit=True)
    words = (
        f"Needs {count_text(missing, 'worker')}; the minima of the running jobs of project {name} "
        f"take {share.used} of the {limit} "
        f"that it may have (its limit). Raise the limit, or wait for one of them."
    )
    return Obstacle(words, share, is_limit=True)
