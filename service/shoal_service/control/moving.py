"""Moves jobs to other clusters: at a request, or because their cluster is lost.

    spec names another cluster, it would start there ->  its attempt saves and ends; the queue starts it there
    cluster and supervisor silent for wait_s         ->  requeued, if another cluster can have it
    queued, with a checkpoint                        ->  not in clusters where that is not known to be readable

The storage of a cluster is not this server's: a directory of the same name may be another one there. So its nodes are
asked whether they can read a job's checkpoints, in the background (ReachableStorage), and a cluster that does not
answer holds up nothing. In a full cluster the job would wait, so it trains on until the market would start it there;
the room is then kept for it until it has started there, or ARRIVES_S after its attempt has ended. Part of the control
loop, on its event loop; `core/lost_clusters.py` decides about lost clusters. An obstacle is written once to the job's
status and history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias, TypeVar

from shoal_service.clock import Clock, SilenceTimer
from shoal_service.cluster.errors import ClusterError, ClusterUnreachable
from shoal_service.clusters.wire import AttemptKey
from shoal_service.control.background_calls import BackgroundCalls
from shoal_service.control.cluster_reader import ClusterReader
from shoal_service.control.market.build import (
    ClusterConstraints,
    fingerprint,
    is_preempted,
    market_nodes,
    named_cluster,
    requested,
)
from shoal_service.control.market.outlook import forecast_move
from shoal_service.control.protocols import Clusters
from shoal_service.control.supervisor_reports import SupervisorLinks
from shoal_service.core.desired import Desired
from shoal_service.core.lost_clusters import OtherCluster, SilentJob, Verdict, decide
from shoal_service.core.scheduling.market import ClusterState, MarketState, Policy, WorkerNeed
from shoal_service.core.scheduling.room import Room
from shoal_service.store import ClusterNotFound, DriveRow, JobNotFound, Lease, Store, checkpoint_rows, driving
from shoal_service.supervisor.config import checkpoint_root
from shoal_service.views import JobView
from shoal_workers.contract import ANY_CLUSTER, EndReason, JobSpec, JobState

_GOOD_S = 300.0
_BAD_S = 15.0
"""Seconds after which an answer is asked for again. The old one counts until then."""
_KEPT_S = 3600.0
_AT_ONCE = 4
"""Most questions to one cluster at a time."""
K = TypeVar("K")
_Key: TypeAlias = tuple[str, str, int, bool]
"""Cluster, job, attempt (the next one may have saved something), and whether the attempt will save."""

ARRIVES_S = 60.0
"""Seconds for which the room in the other cluster is kept after the attempt has ended: the other cluster is first asked
whether it can read the job's checkpoints."""
_PASS_S = 2.0
"""Longest time between two passes that is counted: the process may have been suspended."""


@dataclass(slots=True)
class _Claim:
    """The room that is kept in another cluster for an attempt that is directed to save and end."""

    to: str
    needs: dict[str, WorkerNeed]
    """By node id."""
    until_mono: float = inf
    """Set when the attempt has ended."""


class Moving:
    """Decides which jobs go on in another cluster. Made by the control loop. Its methods raise LeaseLost."""

    def __init__(
        self,
        store: Store,
        clusters: Clusters,
        reader: ClusterReader,
        links: SupervisorLinks,
        clock: Clock,
        checkpoint_url: str,
        policy: Policy,
    ) -> None:
        self._policy = policy
        self._store = store
        self._clusters = clusters
        self._reader = reader
        self._links = links
        self._clock = clock
        self._storage = ReachableStorage(store, clusters, clock, checkpoint_url)
        self._cluster_timers: dict[str, SilenceTimer] = {}
        """How long the clusters that are away have not answered."""
        self._supervisor_timers: dict[AttemptKey, SilenceTimer] = {}
        """How long the supervisors there have not reported."""
        self._begun: dict[AttemptKey, _Claim] = {}
        """The attempts that are directed to save and end. They are not recalled if the target cluster goes away."""
        self._arriving: dict[AttemptKey, str] = {}
        """The jobs that may start now where room is kept for them, and that cluster."""
        self._ready: list[DriveRow] = []
        """Jobs that move as soon as they would start in the other cluster."""
        self._waits: dict[AttemptKey, str] = {}
        """Why they would wait there, by the last forecast."""
        self._asked_about: object = None
        """The market and the jobs of the last forecast."""
        self._asked_mono = 0.0
        self._obstacles: dict[str, str] = {}
        """The obstacle that was last written to each job's note."""

    def drop(self) -> None:
        """Forget answers and obstacles, because the lease is lost."""
        self._storage.drop()
        self._obstacles.clear()

    def find_cluster(self, row: DriveRow) -> str:
        """The cluster of the job's newest attempt; empty if it has had none."""
        return (row.cluster or self._clusters.own) if row.attempt else ""

    async def give_up_lost(self, rows: Sequence[DriveRow], lease: Lease) -> list[DriveRow]:
        """Requeue the jobs that go on elsewhere, and return the others."""
        away = [
            row for row in rows if row.state is not JobState.QUEUED and self._reader.why_away(self.find_cluster(row))
        ]
        if len(self._clusters.joined) < 2:
            away = [row for row in away if self.find_cluster(row) not in self._clusters.joined]
        self._cluster_timers = self._keep_timers(self._cluster_timers, {self.find_cluster(row) for row in away})
        self._supervisor_timers = self._keep_timers(self._supervisor_timers, {(row.id, row.attempt) for row in away})
        for timer in self._cluster_timers.values():
            timer.observe(0.0)
        for key, timer in self._supervisor_timers.items():
            link = await self._links.find_link(key)
            timer.observe(link.reported_at if link is not None else 0.0)
        gone: set[str] = set()
        for row in away:
            if await self._is_given_up(row, lease):
                gone.add(row.id)
        return [row for row in rows if row.id not in gone] if gone else [*rows]

    def _keep_timers(self, timers: Mapping[K, SilenceTimer], keys: Collection[K]) -> dict[K, SilenceTimer]:
        return {key: timers.get(key) or SilenceTimer(self._clock, _PASS_S) for key in keys}

    async def whereabouts(self, rows: Sequence[DriveRow], lease: Lease) -> ClusterConstraints:
        """Find where jobs may go, for the market, and write obstacles to the notes of jobs."""
        job_ids = {row.id for row in rows}
        self._obstacles = {job_id: text for job_id, text in self._obstacles.items() if job_id in job_ids}
        away = frozenset(
            row.id for row in rows if row.state is not JobState.QUEUED and self._reader.why_away(self.find_cluster(row))
        )
        excluded: dict[str, frozenset[str]] = {}
        if len(self._clusters.joined) > 1:
            for row in rows:
                if row.state is JobState.QUEUED and needs_storage(row):
                    unreadable = self._find_unreadable(row)
                    if unreadable:
                        excluded[row.id] = frozenset(unreadable)
                    named = named_cluster(row.spec)
                    await self._set_obstacle(row, unreadable.get(named) or "", lease, cluster=named)
        held = away | await self._find_movers(rows, lease)
        self._arriving = {
            key: claim.to for key, claim in self._begun.items() if claim.until_mono < inf and key[0] not in excluded
        }
        taken, arriving = frozenset(self._arriving.values()), {job_id for job_id, _ in self._arriving}
        for row in rows if taken else ():
            if row.state is JobState.QUEUED and row.id not in arriving:
                excluded[row.id] = excluded.get(row.id, frozenset()) | taken
        states = {name: self._find_state(name) for name in self._clusters.joined}
        return ClusterConstraints(own=self._clusters.own, clusters=states, held=held, excluded=excluded)

    def _find_state(self, cluster: str) -> ClusterState:
        if self._reader.why_away(cluster):
            return ClusterState.AWAY
        return ClusterState.OPEN if self._clusters.joined[cluster].cordon is None else ClusterState.CORDONED

    def moves(self, row: DriveRow) -> bool:
        """Return whether the job's attempt has to save and end, since the job goes on in another cluster."""
        return self._is_elsewhere(row) and (is_preempted(row) or (row.id, row.attempt) in self._begun)

    async def why_not(self, job: JobView, to: str, *, may_ask: bool) -> str:
        """Return why the job cannot move to this cluster now; empty if it can. Raises ClusterNotFound.

        Args:
            may_ask: this control plane has the lease, so it may ask the cluster whether it reads the checkpoints. If
                not, the one that has it asks before the attempt ends.
        """
        if to == ANY_CLUSTER:
            return ""
        if to not in self._clusters.joined:
            raise ClusterNotFound(to)
        if away := self._reader.why_away(to):
            return f"the cluster is away ({away}). Start its gateway (`shoal join`) or its Ray head again"
        row = _make_row(job)
        if why := self._why_no_place(row, to):
            return why
        if not may_ask or not needs_storage(row) or to == self.find_cluster(row):
            return ""
        saves = job.status.state.holds_workers
        try:
            refusal = await self._storage.look_now(to, job.id, job.spec, saves=saves)
        except ClusterError as error:
            return f"the cluster did not say if it can read the job's checkpoints: {error}. Try again"
        return _describe_unreadable(refusal)

    async def begin(self, market: MarketState, now: float) -> bool:
        """Direct a job's attempt to save and end, if the job would start now in the cluster that it names.

        Return True if it did so: the market has then changed.
        """
        waiting = [(row.id, row.attempt, named_cluster(row.spec)) for row in self._ready]
        asked_about, mono = (fingerprint(market), waiting), self._clock.monotonic()
        if not waiting or (asked_about == self._asked_about and mono - self._asked_mono < _BAD_S):
            return False
        self._asked_about, self._asked_mono = asked_about, mono
        self._waits.clear()
        for row in self._ready:
            start, kept = await asyncio.to_thread(
                forecast_move, market, row.id, named_cluster(row.spec), self._policy, now
            )
            if start.workers:
                self._begun[row.id, row.attempt] = _Claim(named_cluster(row.spec), kept)
                return True  # another one that is ready is asked about in the market that follows
            self._waits[row.id, row.attempt] = f"{start.reason}. It trains on until then"
        return False

    def kept(self) -> dict[str, WorkerNeed]:
        """Return what is kept of each node for jobs that cannot start there yet, by node id."""
        kept: dict[str, WorkerNeed] = {}
        for key, claim in self._begun.items():
            for node_id, need in claim.needs.items() if key not in self._arriving else ():
                kept[node_id] = kept.get(node_id, WorkerNeed()).plus(need)
        return kept

    async def _is_given_up(self, row: DriveRow, lease: Lease) -> bool:
        cluster = self.find_cluster(row)
        cluster_s = self._cluster_timers[cluster].silent_s
        supervisor_s = self._supervisor_timers[row.id, row.attempt].silent_s
        silent = SilentJob(
            cluster=cluster,
            named_cluster=named_cluster(row.spec),
            cluster_s=cluster_s,
            supervisor_s=supervisor_s,
            wait_s=row.spec.elasticity.wait_s,
            saved_step=row.status.checkpoint_step,
            is_leaving=row.desired is not Desired.RUN,
        )
        others: list[OtherCluster] = []
        if min(cluster_s, supervisor_s) > silent.wait_s:  # not before: each answer may need a request to a cluster
            others = [
                OtherCluster(name, self._why_not_go(row, name)) for name in self._reader.connected if name != cluster
            ]
        decision = decide(silent, others)
        if decision.verdict is Verdict.STAY and self._obstacles.get(row.id) != decision.obstacle:
            self._obstacles[row.id] = decision.obstacle
            await self._note(row, decision.reason, lease, cluster)
        if decision.verdict is not Verdict.REQUEUE:
            return False
        await asyncio.to_thread(
            self._store.writing(driving.requeue, lease.epoch),
            row.id,
            reason=EndReason.CLUSTER_LOST,
            message=f"Attempt {row.attempt} is given up: {decision.reason}",
            now=self._clock.time(),
        )
        return True

    async def _find_movers(self, rows: Sequence[DriveRow], lease: Lease) -> frozenset[str]:
        by_key, mono = {(row.id, row.attempt): row for row in rows}, self._clock.monotonic()
        for key, claim in [*self._begun.items()]:
            row = by_key.get(key)
            if row is not None and row.state is JobState.QUEUED:
                claim.until_mono = min(claim.until_mono, mono + ARRIVES_S)
            if row is None or mono >= claim.until_mono or named_cluster(row.spec) != claim.to:
                del self._begun[key]
        self._ready, moving = [], set()
        for row in rows:
            if row.state is JobState.QUEUED or row.desired is not Desired.RUN or not self._is_elsewhere(row):
                continue
            key = row.id, row.attempt
            if key not in self._begun and not is_preempted(row):
                why_not = self._why_not_go(row, named_cluster(row.spec), saves=True)
                if why_not == "":
                    self._ready.append(row)
                    why_not = self._waits.get(key)
                if why_not and not self._reader.why_away(self.find_cluster(row)):
                    message = f"moves to the cluster {named_cluster(row.spec)!r} as soon as it can: {why_not}"
                    await self._set_obstacle(row, message, lease, cluster=self.find_cluster(row))
            if key in self._begun:
                moving.add(row.id)
        return frozenset(moving)

    def _is_elsewhere(self, row: DriveRow) -> bool:
        return named_cluster(row.spec) not in ("", self.find_cluster(row))

    def _find_unreadable(self, row: DriveRow) -> dict[str, str]:
        """Return clusters in which a queued job may not start, with reasons; an empty one is not known yet."""
        named, last = named_cluster(row.spec), self.find_cluster(row)
        unreadable: dict[str, str] = {}
        for name in [named] if named else self._reader.connected:
            if name != last and not self._reader.why_away(name):
                why_not = self._storage.why_not(name, row)
                if why_not != "":
                    unreadable[name] = _describe_unreadable(why_not or "")
        return unreadable

    def _why_not_go(self, row: DriveRow, to: str, *, saves: bool = False) -> str | None:
        """Return why the job cannot go on there; empty if it can, None if that is not known yet."""
        if away := self._reader.why_away(to):
            return away
        if why := self._why_no_place(row, to):
            return why
        why_not = self._storage.why_not(to, row, saves=saves)
        return None if why_not is None else _describe_unreadable(why_not)

    def _why_no_place(self, row: DriveRow, to: str) -> str:
        joined = self._clusters.joined.get(to)
        if joined is not None and joined.cordon is not None:
            return f"the cluster is cordoned ({joined.cordon.reason}). End that with `shoal clusters uncordon {to}`"
        job = replace(requested(row), cluster=to)
        nodes = market_nodes(self._reader.nodes_of(to), [row.id], self._reader.foreign)
        shape = Room(nodes).shape(job)
        if shape.ever >= job.min_workers:
            return ""
        return (
            f"elasticity.min_workers is {job.min_workers}, and {shape.ever} of its workers ({shape.need_text} each) "
            "fit on the nodes there that it may use, if they were empty. Lower one of them, or add nodes"
        )

    async def _set_obstacle(self, row: DriveRow, obstacle: str, lease: Lease, *, cluster: str) -> None:
        """Write the obstacle to the job's note if it changed. An empty text clears the note."""
        before = self._obstacles.get(row.id, "")
        if obstacle == before:
            return
        self._obstacles[row.id] = obstacle
        if obstacle or row.status.note == before:
            await self._note(row, obstacle, lease, cluster)

    async def _note(self, row: DriveRow, message: str, lease: Lease, cluster: str) -> None:
        note = self._store.writing(driving.note_stay, lease.epoch)
        await asyncio.to_thread(note, row.id, cluster=cluster, reason=message, now=self._clock.time())


def _describe_unreadable(why_not: str) -> str:
    if not why_not:
        return ""
    return (
        f"its checkpoints cannot be read there: {why_not}. Set checkpoint.url to a place that both clusters reach "
        "under the same URL"
    )


def _make_row(job: JobView) -> DriveRow:
    status = job.status
    return DriveRow(
        id=job.id,
        spec=job.spec,
        spec_version=job.spec_version,
        state=status.state,
        desired=Desired.RUN,
        attempt=status.attempt,
        granted_workers=0,
        pulled_seq=0,
        created_at=job.created_at,
        priority=job.spec.priority,
        status=status,
        cluster=status.cluster,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    why_not: str
    mono: float

    def is_old(self, mono: float) -> bool:
        return mono - self.mono >= (_BAD_S if self.why_not else _GOOD_S)


class ReachableStorage:
    """Knows in which clusters the checkpoints of a job can be read. `why_not` returns the last answer, and asks again
    in the background if that is old."""

    def __init__(self, store: Store, clusters: Clusters, clock: Clock, default_url: str) -> None:
        """`default_url`: the checkpoint directory of jobs without a `checkpoint.url`."""
        self._store = store
        self._clusters = clusters
        self._clock = clock
        self._default_url = default_url
        self._calls = BackgroundCalls()
        self._answers: dict[_Key, _Answer] = {}

    def why_not(self, cluster: str, row: DriveRow, *, saves: bool = False) -> str | None:
        """Return why the job cannot go on there from its checkpoint; empty if it can, None if not known yet.

        Args:
            saves: its attempt saves before, so its directory must be there also if it has no checkpoint yet.
        """
        if not needs_storage(row):
            return ""
        key, mono = (cluster, row.id, row.attempt, saves), self._clock.monotonic()
        known = self._answers.get(key)
        if (known is None or known.is_old(mono)) and self._calls.count_pending(cluster) < _AT_ONCE:
            self._calls.begin(cluster, f"storage of {row.id} {saves}", lambda: self._ask(key, row.spec))
        return None if known is None else known.why_not

    async def look_now(self, cluster: str, job_id: str, spec: JobSpec, *, saves: bool) -> str:
        """Ask now why the job cannot go on there. Raises ClusterUnreachable, JobNotFound."""
        root, name = await asyncio.to_thread(self._find_saved, job_id, spec)
        return await self._clusters.of(cluster).sees_storage(root, name) if name or saves else ""

    def drop(self) -> None:
        """Stop asking, because the lease is lost."""
        self._calls.drop()

    async def _ask(self, key: _Key, spec: JobSpec) -> None:
        cluster, job_id, _, saves = key
        try:
            why_not = await self.look_now(cluster, job_id, spec, saves=saves)
        except (JobNotFound, ClusterUnreachable):
            return
        except ClusterError as error:  # a gateway of a release that does not know the question
            why_not = str(error)
        mono = self._clock.monotonic()
        self._answers = {k: answer for k, answer in self._answers.items() if mono - answer.mono < _KEPT_S}
        self._answers[key] = _Answer(why_not, mono)

    def _find_saved(self, job_id: str, spec: JobSpec) -> tuple[str, str]:
        """URL of the job's directory, and name of the checkpoint from which it would go on; empty if it has none."""
        newest = self._store.reading(checkpoint_rows.newest)(job_id)
        if newest is not None:
            return checkpoint_root(spec, self._default_url, job_id), str(newest)
        origin = spec.continue_from
        if origin is not None and origin.checkpoint:
            root, _, name = origin.checkpoint.rstrip("/").rpartition("/")
            return root, name
        return checkpoint_root(spec, self._default_url, job_id), ""


def needs_storage(row: DriveRow) -> bool:
    """Return whether the job may go on from a checkpoint."""
    return row.attempt > 0 or row.spec.continue_from is not None
