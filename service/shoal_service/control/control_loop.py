"""ControlLoop: the acting half of the control plane. Holds the lease, starts queued jobs, runs one driver per attempt.

    lease (renewed)  ->  one pass: the store's jobs + the nodes of all clusters  ->  the policy  ->  store, drivers
                         one driver task per attempt: starts its supervisor, writes its directives

Run by `shoal serve`. Training never depends on it: supervisors and workers go on without a control plane. After a
restart the first pass starts a driver for each job that has an attempt, which finds its supervisor by name and only
writes directives to it; `OrphanReaper` ends the supervisors of attempts whose end was stored. Every write is guarded by
the lease's epoch.

A pass begins when a job or a node has changed, and at the latest after a second. The policy is asked only if something
changed that it depends on besides progress, or after some seconds. A cluster that does not answer holds up nothing: its
jobs keep what they have, and the others are scheduled as usual.

`DecisionWriter` writes the policy's decisions into the store, from which drivers pass them on to supervisors. Workers
are given back before others get them, and all of it happens in one pass: the newcomer's supervisor starts while the
other group still switches to fewer workers, and Ray creates its workers as the resources come free.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, assert_never

from shoal_service.clock import Clock, cancel_all, wait_for_any
from shoal_service.cluster.errors import ClusterUnreachable
from shoal_service.clusters.wire import RoomKind
from shoal_service.collector import SparedJobs, paused_collector
from shoal_service.control.background_calls import BackgroundCalls, Threads
from shoal_service.control.cluster_reader import READ_S, ClusterReader
from shoal_service.control.config import ControlConfig
from shoal_service.control.driver import Driver, OrphanReaper
from shoal_service.control.islands import find_runs, look_at
from shoal_service.control.market.build import (
    ClusterConstraints,
    MarketBuilder,
    fingerprint,
    market_nodes,
    named_cluster,
)
from shoal_service.control.market.outlook import find_cramped_jobs, find_demand, forecast_start, predict_freed_nodes
from shoal_service.control.moving import Moving
from shoal_service.control.ownership import LeaseWatch, acquired
from shoal_service.control.probation import run_due_test
from shoal_service.control.protocols import Clusters
from shoal_service.control.submission import Pruner
from shoal_service.control.supervisor_reports import SupervisorLinks
from shoal_service.core import nodes as node_rules
from shoal_service.core.attempt.state import AvoidedNode
from shoal_service.core.desired import Desired
from shoal_service.core.scheduling.decide import after, decide
from shoal_service.core.scheduling.explaining import HeldBack, explain_held_back
from shoal_service.core.scheduling.market import (
    Decision,
    MarketState,
    Policy,
    Preempt,
    Resize,
    Start,
    Wait,
    WorkerNeed,
)
from shoal_service.fleet_views import ClusterView, StartForecast
from shoal_service.store import DriveRow, Lease, LeaseLost, RequestConflict, Store, Topic, driving, queueing, reporting
from shoal_service.telemetry.tallies import PassTimes
from shoal_service.views import JobView
from shoal_workers.contract import EndReason, JobSpec, JobState, Stacks

_log = logging.getLogger(__name__)
_REVIEW_S = 2.0
"""Most seconds between two calls of the policy while jobs wait or run: progress changes what a worker adds where."""
_REQUEST_S = 60.0
_CANCEL_S = 30.0
"""A supervisor has this long to end a cancelled attempt. One that has never reported has no time."""
_ISLAND_THREADS = 4
"""They look at the storage of islands: one that hangs holds up its own runs only."""
_MAX_QUEUED = 100_000
"""Most jobs of the queue that are considered, by priority and age. Those beyond wait."""
_MIN_PAUSE_S = 0.2
"""Least pause between two passes, so that a burst of changes causes one pass, not one pass each."""
_MAX_PAUSE_S = 1.0
"""Longest pause between two passes: an urgent job must not wait longer for its decision, even if passes are slow
because the machine is busy."""
_IDLE_SHARE = 9.0
"""A pause is at least this many times as long as the pass before it: a long queue must not take the time of the HTTP
edge."""
_REQUEST_SHARE = 1.0
"""Used in place of _IDLE_SHARE if a user has asked for something, or workers are free. Training jobs report all the
time, and an urgent job must not wait for the end of a pause that protects from those reports."""


class ControlLoop:
    """Runs the passes of the control plane. `run` returns after `stop` is set, or after `save_and_end`. `snapshot` may
    be called from any thread."""

    def __init__(
        self,
        store: Store,
        clusters: Clusters,
        clock: Clock,
        config: ControlConfig,
        *,
        policy: Policy = decide,
        times: PassTimes | None = None,
    ) -> None:
        """`times` gets the durations of the passes."""
        self._store = store
        self._known = driving.KnownJobs()
        self._clusters = clusters
        self._clock = clock
        self._config = config
        self._lease: Lease | None = None
        self._lease_watch, self._renewed_mono = LeaseWatch(), 0.0
        self._drivers: dict[tuple[str, int], tuple[Driver, asyncio.Task[None]]] = {}
        self._quarantined: frozenset[str] = frozenset()
        self._calls = BackgroundCalls()
        self._times = times or PassTimes()
        self._reader = ClusterReader(store, clusters, clock, config.max_probation)
        self._policy = policy
        self._market, self._spared = MarketBuilder(config.profiles), SparedJobs()
        self._writer, self._links = DecisionWriter(store, clusters.own), SupervisorLinks(store, clock)
        self._pruner = Pruner(store)
        self._island_threads = Threads(_ISLAND_THREADS, "islands")
        self._orphan_reaper = OrphanReaper(store, clusters)
        self._moving = Moving(store, clusters, self._reader, self._links, clock, config.checkpoint_url, policy)
        self._last_market: MarketState | None = None
        self._decided_for: object = None
        """The state for which the policy was asked last; None if its decisions have changed something, so it is asked
        again."""
        self._decided_mono = 0.0
        self._requested: dict[str, tuple[dict[RoomKind, int], float]] = {}
        """The last request to each cluster's autoscaler, and the monotonic time of that request."""
        self._sizes: dict[str, tuple[str, JobState, int]] = {}
        """Cluster, state and workers of each job with an attempt, in the last pass."""
        self._cancelled: dict[str, float] = {}
        """When each attempt that is to be cancelled was first seen so, monotonic time, by job id."""
        self._woken = asyncio.Event()
        self._is_requested = asyncio.Event()
        self._show_saving: Callable[[Sequence[DriveRow]], None] | None = None
        """Shows the jobs that still save. Set while the server stops and every attempt saves and ends; otherwise
        None."""
        self._is_saved = False
        self.given_up: tuple[tuple[str, int], ...] = ()
        """Job and number of each attempt that was not saved when the server ended the cluster."""

    def snapshot(self) -> ClusterView:
        """The clusters at the time of the last pass."""
        return self._reader.view

    def expected_start(self, spec: JobSpec) -> StartForecast | None:
        """The expected start of a job that is not submitted; None if this process does not schedule. On any thread; it
        blocks."""
        if (market := self._last_market) is None:
            return None
        return forecast_start(market, spec, self._config.profiles, self._policy, self._clock.time())

    @property
    def lease(self) -> Lease | None:
        """The lease of this process as it was last renewed; None if it has none. On the loop's thread."""
        return self._lease

    async def stacks(self, job_id: str, *, rank: int | None = None, native: bool = False) -> Stacks | None:
        """Finds what all workers of a job do now, or one rank; None if no attempt of the job is driven here. On the
        loop's thread.

        Raises:
            SupervisorUnavailable: its supervisor does not answer.
        """
        attempts = [key for key in self._drivers if key[0] == job_id]
        if not attempts:
            return None
        return await self._drivers[max(attempts)][0].stacks(rank, native=native)

    async def why_not_in(self, job: JobView, cluster: str) -> str:
        """Why the job cannot run in that cluster, with the way out and no full stop; empty if it can. On the loop's
        thread. Raises ClusterNotFound."""
        return await self._moving.why_not(job, cluster, may_ask=self._lease is not None)

    def save_and_end(self, show: Callable[[Sequence[DriveRow]], None]) -> None:
        """The server stops, and its own cluster with it: no attempt begins any more, each one there saves and ends, and
        its job returns to the queue. `run` returns once none is left. From the loop's thread. Jobs in other clusters
        train on.

        Args:
            show: called after each pass with the jobs that still have an attempt there.
        """
        self._show_saving = show
        self._woken.set()

    async def run(self, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()

        def node_changed(cluster: str) -> None:
            loop.call_soon_threadsafe(self._node_changed, cluster)

        unwatch = self._clusters.watch(node_changed)

        with (  # an event that is set already is cleared before the next pass reads: nothing is missed
            self._store.subscribe(lambda _: self._woken.is_set() or loop.call_soon_threadsafe(self._woken.set)),
            self._store.subscribe(lambda _: loop.call_soon_threadsafe(self._is_requested.set), Topic.REQUESTS),
        ):
            while not stop.is_set() and not self._is_saved:
                began_mono = self._clock.monotonic()
                try:
                    await self._pass()
                except LeaseLost as error:
                    self._times.failures.add()
                    _log.warning("lease.lost", extra={"error": str(error)})
                    await self._stop_driving()
                except ClusterUnreachable as error:
                    self._times.failures.add()
                    _log.warning("cluster.unreachable", extra={"error": str(error)})
                except Exception:
                    self._times.failures.add()
                    _log.exception("control.pass_failed")  # the next pass starts afresh
                finally:
                    self._times.passes.observe(self._clock.monotonic() - began_mono)
                pass_s = self._clock.monotonic() - began_mono
                least_s, pause_s = pauses_after(pass_s)
                await wait_for_any(self._clock, stop, timeout_s=least_s)
                if pause_s > least_s:
                    await wait_for_any(self._clock, stop, self._is_requested, timeout_s=pause_s - least_s)
                await wait_for_any(self._clock, stop, self._woken, timeout_s=READ_S)
                self._woken.clear()
                self._is_requested.clear()
        unwatch()
        lease = self._lease
        await self._stop_driving()
        if self._show_saving is not None and not self._is_saved and lease is not None:
            await asyncio.to_thread(self._give_up, lease)
        await asyncio.to_thread(self._store.release_lease, self._config.owner)  # nothing happens without the lease

    async def _pass(self) -> None:
        mono = self._clock.monotonic()  # not the wall clock, which may have been set back
        if self._lease is None or mono - self._renewed_mono > self._config.lease_ttl_s / 3:
            self._lease = await asyncio.to_thread(
                acquired, self._store, self._config, self._lease, self._lease_watch, now=self._clock.time(), mono=mono
            )
            self._renewed_mono = mono
        if self._lease is None:
            await self._read_clusters(())
            await self._stop_driving()
            self._is_saved = self._show_saving is not None  # by the control plane that holds the lease
            return
        rows = await self._without_cancelled(await self._list_readable_jobs(self._lease), self._lease)
        self._expire_if_resized(rows)
        reachable = await self._read_clusters(rows)
        rows = await self._moving.give_up_lost(rows, self._lease)
        self._close_rounds(rows, self._lease)  # also while no cluster answers: islands need the storage only
        if self._show_saving is not None:
            self._drive_all(rows, self._lease)
            in_own = [row for row in rows if self._cluster_of(row) == self._clusters.own]
            self._show_saving(in_own)
            self._forget_ended()
            known = {(row.id, row.attempt) for row in rows if row.state is not JobState.QUEUED}
            elsewhere = known - {(row.id, row.attempt) for row in in_own}
            self._is_saved = not in_own and not self._drivers.keys() - elsewhere
        elif reachable:
            await self._schedule(rows, self._lease)
            await asyncio.to_thread(self._pruner.prune, rows, mono, epoch=self._lease.epoch, now=self._clock.time())
            for cluster in self._reader.connected:
                self._look_after(cluster, self._lease)
        else:
            self._drive_all(rows, self._lease)  # supervisors go on, and can be directed to pause or to cancel
        self._forget_ended()

    async def _without_cancelled(self, rows: list[DriveRow], lease: Lease) -> list[DriveRow]:
        """Ends the attempts that were cancelled and have no supervisor that does so in time; returns the other rows.

        It needs nothing but the store. What is left in a cluster is ended by their drivers, or as leftovers."""
        mono = self._clock.monotonic()
        cancelled = [row for row in rows if row.desired is Desired.CANCEL and row.state is not JobState.QUEUED]
        self._cancelled = {row.id: self._cancelled.get(row.id, mono) for row in cancelled}
        ended = set()
        for row in cancelled:
            link = await self._links.find_link((row.id, row.attempt))
            grace_s = row.spec.script.grace_s if row.spec.script is not None else 0.0
            if link is not None and (not link.life or mono - self._cancelled[row.id] > _CANCEL_S + grace_s):
                end = self._store.writing(reporting.end_attempt, lease.epoch)
                message = "cancelled on request" + (", while its supervisor did not report" if link.life else "")
                await asyncio.to_thread(end, row.id, EndReason.CANCELLED, message, now=self._clock.time())
                ended.add(row.id)
        return [row for row in rows if row.id not in ended]

    def _look_after(self, cluster: str, lease: Lease) -> None:
        """Begin what a cluster needs besides its jobs: the end of leftovers, and tests of suspected nodes."""
        if keys := self._orphan_reaper.find(self._reader.attempts(cluster), self._drivers):
            self._calls.begin(cluster, "end leftovers", lambda: self._orphan_reaper.end(cluster, keys))
        nodes = self._reader.nodes_of(cluster)
        if any(node.suspected for node in nodes):
            tester = self._clusters.of(cluster)
            test = partial(run_due_test, self._store, tester, nodes, self._clock, epoch=lease.epoch)
            self._calls.begin(cluster, "test a suspected node", test)

    def _node_changed(self, cluster: str) -> None:
        self._reader.expire(cluster)
        self._woken.set()
        self._is_requested.set()

    def _expire_if_resized(self, rows: Sequence[DriveRow]) -> None:
        """Expires the readings of clusters whose resources have changed: a group has formed with other workers, or an
        attempt has begun or ended."""
        sizes: dict[str, tuple[str, JobState, int]] = {
            row.id: (self._cluster_of(row), row.state, row.status.workers)
            for row in rows
            if row.state is not JobState.QUEUED
        }
        if sizes != self._sizes:
            changed = {*sizes.items()} ^ {*self._sizes.items()}
            self._sizes = sizes
            for cluster in {cluster for _, (cluster, *_) in changed}:
                self._reader.expire(cluster)

    def _cluster_of(self, row: DriveRow) -> str:
        """The cluster of the job's attempt; empty if the job has none."""
        return "" if row.state is JobState.QUEUED else row.cluster or self._clusters.own

    async def _read_clusters(self, rows: Sequence[DriveRow]) -> bool:
        """Reads all clusters. False: none answers."""
        with_attempt = {row.id: self._cluster_of(row) for row in rows if row.state is not JobState.QUEUED}
        return await self._reader.read(self._lease, with_attempt)

    async def _schedule(self, rows: list[DriveRow], lease: Lease) -> None:
        now, mono = self._clock.time(), self._clock.monotonic()
        where = await self._moving.whereabouts(rows, lease)
        state = await asyncio.to_thread(self._make_market_state, rows, now, where)
        while await self._moving.begin(state, now):
            where = await self._moving.whereabouts(rows, lease)
            state = await asyncio.to_thread(self._make_market_state, rows, now, where)
        self._last_market = state
        standing = fingerprint(state)
        if standing == self._decided_for and mono - self._decided_mono < _REVIEW_S:
            self._drive_all(rows, lease)
            return
        decisions = await asyncio.to_thread(paused_collector()(self._policy), state, now)
        self._times.decisions.observe(self._clock.monotonic() - mono)
        by_id = {row.id: row for row in rows}
        changes = select_changes(decisions)
        await self._writer.write(changes, by_id, epoch=lease.epoch, now=now)
        self._decided_for, self._decided_mono = (None if changes else standing), mono
        places = self._predict_freed_nodes(changes, by_id) if changes else {}
        self._drive_all(await self._with_changes(rows) if changes else rows, lease, places)
        # after the drivers have the changes: supervisors must not wait for explanations
        await self._writer.explain(state, decisions, by_id, epoch=lease.epoch, now=now)
        self._scale_out(state, decisions, mono)
        for name in self._reader.connected:
            nodes = self._reader.nodes_of(name)
            avoided = frozenset(node.node_id for node in nodes if node.drain or node.suspected)
            keep_ready = self._clusters.of(name).keep_ready
            self._calls.begin(name, "keep a process ready", partial(keep_ready, avoided))

    def _predict_freed_nodes(
        self, changes: Sequence[Start | Resize | Preempt], rows: Mapping[str, DriveRow]
    ) -> Mapping[str, Mapping[str, int]]:
        """Return the nodes that other jobs give up for jobs that start in the same cluster, by job."""

        def find_cluster(change: Start | Resize | Preempt) -> str:
            cluster = change.cluster if isinstance(change, Start) else self._cluster_of(rows[change.job_id])
            return cluster or self._clusters.own

        grants = {row.id: row.granted_workers for row in rows.values()}
        return predict_freed_nodes(changes, grants, self._reader.reservations, find_cluster)

    def _scale_out(self, state: MarketState, decisions: Sequence[Decision], mono: float) -> None:
        """Asks the autoscalers for nodes. Asks again after a while, since a head that was restarted has forgotten the
        request."""
        if not self._config.scale_out:
            return
        demand = find_demand(state, decisions)
        for name in self._reader.connected:
            wanted = _remove_cluster_labels(demand.get(name, {}), self._clusters.joined[name].labels)
            before, requested_mono = self._requested.get(name, ({}, 0.0))
            if wanted != before or mono - requested_mono >= _REQUEST_S:
                request = partial(self._clusters.of(name).request_room, tuple(wanted.items()))
                if self._calls.begin(name, "ask for room", request):
                    self._requested[name] = wanted, mono

    def _make_market_state(self, rows: list[DriveRow], now: float, where: ClusterConstraints) -> MarketState:
        reader = self._reader
        with self._store.read() as tx:
            projects, users = queueing.defined_projects(tx), queueing.defined_users(tx)
        foreign = dict(reader.foreign)
        for node_id, need in self._moving.kept().items():
            foreign[node_id] = foreign.get(node_id, WorkerNeed()).plus(need)
        state = self._market.build(rows, reader.connected_nodes, foreign, reader.workers, projects, users, now, where)
        self._spared.note(self._market.num_new, len(rows))
        return state

    def _drive_all(
        self, rows: list[DriveRow], lease: Lease, places: Mapping[str, Mapping[str, int]] | None = None
    ) -> None:
        """Drives all attempts. `places`: where workers of jobs that start are expected, by job and node."""
        by_cluster: dict[str, list[DriveRow]] = {}
        for row in rows:
            if row.state is not JobState.QUEUED:
                by_cluster.setdefault(self._cluster_of(row), []).append(row)
        for cluster, there in by_cluster.items():
            nodes = self._reader.nodes_of(cluster)
            cramped = frozenset[str]()
            if any(node.drain or node.suspected for node in nodes):
                capacity = market_nodes(nodes, [row.id for row in rows], self._reader.foreign)
                cramped = find_cramped_jobs(there, capacity, self._reader.workers)
            common, wary = node_rules.avoided(nodes), node_rules.suspecting(nodes)
            for row in there:
                avoid = node_rules.avoided(nodes, row.id) if row.id in wary else common
                if row.id in cramped:
                    avoid = tuple(node.model_copy(update={"is_replaceable": False}) for node in avoid)
                self._drive(row, lease, avoid, (places or {}).get(row.id, {}))

    def _drive(self, row: DriveRow, lease: Lease, avoid: tuple[AvoidedNode, ...], places: Mapping[str, int]) -> None:
        """Starts one driver per attempt; an existing one gets the newest row."""
        key = (row.id, row.attempt)
        moves = self._moving.moves(row)
        server_stops = self._show_saving is not None and self._cluster_of(row) == self._clusters.own
        if key not in self._drivers:
            driver = Driver(
                self._store,
                self._clusters,
                self._clock,
                self._config,
                row,
                epoch=lease.epoch,
                links=self._links,
            )
            driver.expect(places)
            task = asyncio.get_running_loop().create_task(driver.run(), name=f"drive {row.id}")
            self._drivers[key] = (driver, task)
        self._drivers[key][0].update(row, avoid, server_stops=server_stops, moves=moves)

    def _close_rounds(self, rows: Sequence[DriveRow], lease: Lease) -> None:
        """Look at the rounds of islands, without waiting for the storage."""
        for run in find_runs(rows, self._config.checkpoint_url):
            look = partial(self._island_threads, look_at, self._store, run, epoch=lease.epoch, now=self._clock.time())
            self._calls.begin(run.run, "close the round of islands", look)

    def _forget_ended(self) -> None:
        for key, (_, task) in list(self._drivers.items()):
            if task.done():
                del self._drivers[key]
                error = None if task.cancelled() else task.exception()
                if isinstance(error, LeaseLost):
                    raise error
                if error is not None:
                    fields = {"job": key[0], "attempt": key[1]}
                    _log.error("driver.failed", exc_info=error, extra=fields)  # the next pass starts another

    def _give_up(self, lease: Lease) -> None:
        """Returns jobs to the queue whose attempts were not saved before the cluster ends, with what they have lost."""
        for row in self._store.reading(driving.to_drive)(self._known, max_queued=0):
            if self._cluster_of(row) != self._clusters.own:
                continue
            try:
                self._store.writing(driving.requeue, lease.epoch)(
                    row.id,
                    reason=EndReason.CLUSTER_LOST,
                    message=f"the server ended the Ray cluster before attempt {row.attempt} was saved",
                    now=self._clock.time(),
                )
            except LeaseLost as error:
                _log.warning("lease.lost", extra={"error": str(error)})
                return
            self.given_up = (*self.given_up, (row.id, row.attempt))

    async def _list_readable_jobs(self, lease: Lease) -> list[DriveRow]:
        """Puts jobs that cannot be read into quarantine, and returns the others."""
        unreadable: dict[str, str] = {}
        rows = await asyncio.to_thread(
            self._store.reading(driving.to_drive), self._known, max_queued=_MAX_QUEUED, unreadable=unreadable
        )
        if unreadable.keys() - self._quarantined:
            for job_id in sorted(unreadable.keys() - self._quarantined):
                _log.error("control.job_unreadable", extra={"job": job_id, "reason": unreadable[job_id]})
            await asyncio.to_thread(
                self._store.writing(driving.quarantine, lease.epoch), unreadable, now=self._clock.time()
            )
        self._quarantined = frozenset(unreadable)
        return rows

    async def _with_changes(self, rows: Sequence[DriveRow]) -> list[DriveRow]:
        """The rows once decisions are in effect. Decisions change only jobs that have an attempt then."""
        held = await asyncio.to_thread(self._store.reading(driving.to_drive), self._known, max_queued=0)
        held_ids = {row.id for row in held}
        return [*held, *(row for row in rows if row.state is JobState.QUEUED and row.id not in held_ids)]

    async def _stop_driving(self) -> None:
        """Ends all drivers. Nothing is driven without the lease, and supervisors go on alone."""
        self._lease = self._last_market = None
        self._calls.drop()
        self._reader.drop()
        self._moving.drop()
        tasks = [task for _, task in self._drivers.values()]
        self._drivers.clear()
        await cancel_all(tasks)


def _remove_cluster_labels(wanted: Mapping[RoomKind, int], labels: Mapping[str, str]) -> dict[RoomKind, int]:
    """Removes the cluster's labels from the selector, because its nodes do not have them in Ray."""
    rooms = Counter[RoomKind]()
    for kind, workers in wanted.items():
        own = tuple((name, value) for name, value in kind.labels if labels.get(name) != value)
        rooms[kind._replace(labels=own)] += workers
    return dict(rooms)


def pauses_after(pass_s: float) -> tuple[float, float]:
    """Seconds until the next pass: if a user has asked for something or workers are free, and if only jobs reported."""
    return _within(_REQUEST_SHARE * pass_s), _within(_IDLE_SHARE * pass_s)


def _within(wanted_s: float) -> float:
    return min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, wanted_s))


Change: TypeAlias = Start | Resize | Preempt
_REFRESH_S = 10.0
"""Seconds after which expected starts are stored again if nothing else has changed: they change with every decision."""


class DecisionWriter:
    """Writes decisions to the store. Made by the control loop. Every method raises LeaseLost."""

    def __init__(self, store: Store, own: str = "") -> None:
        """`own`: the cluster in which a job starts if the policy names none."""
        self._store = store
        self._own = own
        self._written: object = None
        self._written_at = 0.0
        self._explained: object = None
        """The grants and the versions of the specs for which growth was explained last."""
        self._explained_at = 0.0
        """When growth was explained last."""

    async def write(self, changes: Sequence[Change], rows: Mapping[str, DriveRow], *, epoch: int, now: float) -> None:
        """Write the decisions, those that give workers back first."""
        for change in sorted(changes, key=lambda decision: _turn(decision, rows[decision.job_id])):
            try:
                await asyncio.to_thread(self._change, change, rows[change.job_id], epoch, now)
            except RequestConflict:
                pass  # paused or cancelled since the decision

    async def explain(
        self, state: MarketState, decisions: Sequence[Decision], rows: Mapping[str, DriveRow], *, epoch: int, now: float
    ) -> None:
        """Store why jobs wait, and why running ones get no more. Called after `write`, and after supervisors were
        informed: they must not wait for explanations."""
        await self._explain_waits([decision for decision in decisions if isinstance(decision, Wait)], epoch, now)
        await self._explain_growth(state, select_changes(decisions), rows, epoch, now)

    def _change(self, change: Change, row: DriveRow, epoch: int, now: float) -> None:
        with self._store.write(epoch) as tx:
            match change:
                case Start(job_id, workers, reason, cluster, flows):
                    where = cluster or named_cluster(row.spec) or self._own
                    driving.begin_attempt(
                        tx, job_id, workers=workers, cluster=where, reason=reason, flows=flows, now=now
                    )
                case Resize(job_id, workers, reason, flows):
                    driving.set_grant(tx, job_id, workers=workers, reason=reason, flows=flows, now=now)
                case Preempt(job_id, reason, beneficiary, flows):
                    driving.preempt(tx, job_id, reason=reason, beneficiary=beneficiary, flows=flows, now=now)
                case _:
                    assert_never(change)

    async def _explain_growth(
        self, state: MarketState, changes: Sequence[Change], rows: Mapping[str, DriveRow], epoch: int, now: float
    ) -> None:
        """Explains growth at once if the policy was asked about something new, otherwise now and then: the numbers in
        the words change with the progress of the jobs."""
        standing = {job.job_id: (job.granted, rows[job.job_id].spec_version) for job in state.jobs}
        if not changes and standing == self._explained and 0 <= now - self._explained_at < _REFRESH_S:
            return
        answers = await asyncio.to_thread(_list_held_back, state, changes, now)
        versions = {job.job_id: rows[job.job_id].spec_version for job in state.jobs}
        await asyncio.to_thread(self._store.writing(queueing.save_growth, epoch), answers, versions, now=now)
        self._explained, self._explained_at = standing, now

    async def _explain_waits(self, waits: Sequence[Wait], epoch: int, now: float) -> None:
        """Store the order of the queue, and why each job waits."""
        message = [(wait.job_id, wait.position, wait.reason, wait.holders) for wait in waits]
        if message != self._written or (waits and not 0 <= now - self._written_at < _REFRESH_S):
            is_whole = await asyncio.to_thread(self._write_places, waits, epoch, now)
            self._written, self._written_at = message if is_whole else None, now

    def _write_places(self, waits: Sequence[Wait], epoch: int, now: float) -> bool:
        """Write places in the queue. False: there are too many for one transaction, and the next call writes the
        rest."""
        changes = self._store.reading(queueing.differing)(waits, now=now)
        self._store.writing(queueing.save_places, epoch)(changes)
        return not changes.num_left


def select_changes(decisions: Sequence[Decision]) -> list[Change]:
    """The decisions that change something, without the jobs that wait."""
    return [decision for decision in decisions if not isinstance(decision, Wait)]


def _turn(change: Change, row: DriveRow) -> int:
    match change:
        case Preempt():
            return 0
        case Resize(_, workers, _):
            return 0 if workers < row.granted_workers else 2
        case Start():
            return 1
        case _:
            assert_never(change)


@paused_collector()
def _list_held_back(state: MarketState, changes: Sequence[Change], now: float) -> list[HeldBack]:
    return explain_held_back(after(state, changes, now), now)
