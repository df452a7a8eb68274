"""Driver: follows one attempt of one job. Starts or finds its supervisor, writes its directives, notices its silence.
`OrphanReaper` ends what is in a cluster of attempts that have no driver, because they are over.

    store  <- reports       supervisor endpoint     <- supervisor, which dials home
    store  -> link          this driver: has it reported lately?
    store  <- directive     this driver   -> supervisor endpoint -> supervisor

A supervisor that cannot be created is created again after a pause; one whose processes die before they record their
start is given up (`core/supervisor_starts.py`). One asyncio task of the control loop per attempt. It never decides what
a job should do; it passes on the store's row.

After a restart of the control plane each job with an attempt has a driver again with the first pass. It finds the
supervisor by its name, and leaves it alone while it reports, so training goes on without noticing. If the supervisor is
gone, the job returns to the queue.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from shoal_service.clock import Clock, SilenceTimer, cancel_all, wait_for_any
from shoal_service.cluster.errors import ClusterUnreachable, OrderUnanswered, SupervisorGone, SupervisorUnavailable
from shoal_service.clusters.wire import AttemptKey
from shoal_service.control.config import ControlConfig
from shoal_service.control.market.build import is_preempted, named_cluster
from shoal_service.control.planning import measured_profile
from shoal_service.control.protocols import Cluster, Clusters
from shoal_service.control.supervisor_reports import SupervisorLinks
from shoal_service.core import supervisor_starts
from shoal_service.core.access import new_attempt_token
from shoal_service.core.attempt.state import AvoidedNode
from shoal_service.core.events import DriverFailed, JobEvent, SupervisorMoved, SupervisorRekeyed, SupervisorStartFailed
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.supervisor_starts import StartDecision
from shoal_service.home import Home
from shoal_service.store import (
    DriveRow,
    LeaseLost,
    Store,
    StoreError,
    StoreUnavailable,
    Subscription,
    Topic,
    archives,
    checkpoint_rows,
    driving,
    reporting,
    supervisor_links,
)
from shoal_service.supervisor.config import Directive, StacksRequest, SupervisorConfig, checkpoint_root, with_origin
from shoal_workers.contract import WIRE_VERSION, EndReason, JobSpec, Stacks, settings_of

_log = logging.getLogger(__name__)
_RETRY_S = 0.25
_AWAY_S = 1.0
"""Pause between two tries to start a supervisor in a cluster that does not answer."""
_LOOK_S = 0.5
"""Pause between two looks at when the supervisor has reported last; it does so at least every second."""
_OVERDUE_S = 1.5
"""Seconds of silence after which the driver checks, again and again, whether the supervisor is there and its host
answers. A gateway that has started the supervisor says at once if it could not be created."""
_UNANSWERED_S = 5.0
"""Seconds of silence after which a supervisor may be one that dies at every start."""
_ELSEWHERE_S = 3.0
"""Seconds of silence after which a supervisor is given the address of this control plane, if it was given another one.
Longer than its pauses between two calls that fail."""
_UNKNOWN_S = 15.0
"""Seconds of silence after which a supervisor that has reported before gets a new token, if it is there and its host
answers."""
_REAP_S = 5.0
"""Seconds that a server that stops waits for the end of the actors of an attempt whose end is stored."""
_STACKS_S = 35.0


class _ReportTimer(SilenceTimer):
    """Measures how long no report has come, and says when to look into it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, 2 * _LOOK_S)
        self._examined_s = 0.0

    def overdue_s(self) -> float | None:
        """Seconds of silence if it is time to look into it; otherwise None."""
        if self.silent_s < self._examined_s:
            self._examined_s = 0.0  # a report has come
        if self.silent_s - self._examined_s < _OVERDUE_S:
            return None
        self._examined_s = self.silent_s
        return self.silent_s


class Driver:
    """Follows one attempt. It is cancelled when the lease is lost; the supervisor goes on without it."""

    def __init__(
        self,
        store: Store,
        clusters: Clusters,
        clock: Clock,
        config: ControlConfig,
        row: DriveRow,
        *,
        epoch: int,
        links: SupervisorLinks,
    ) -> None:
        """`links`: shared by all drivers."""
        self._store = store
        self._clusters = clusters
        self._clock = clock
        self._config = config
        self._row = row
        self._key = (row.id, row.attempt)
        self._epoch = epoch
        self._links = links
        self._avoid: tuple[AvoidedNode, ...] = ()
        self._server_stops = self._moves = False
        self._places: Mapping[str, int] = {}
        self._written: Directive | None = None
        """The last directive that this driver has written; None if it has written none."""
        self._changed = asyncio.Event()
        self._requested = asyncio.Event()
        """Set when a report has ended the attempt, or answered a request of a user."""
        self._has_reported = False
        self._num_failed = self._num_errors = 0
        self._reported_at = 0.0
        """When the supervisor had reported last at the newest unexpected error."""
        self._unrecorded: int | None = None
        """Number of starts that were not recorded when the supervisor last reported; None means unknown."""
        self._is_rekeyed = self._is_over = False
        self._timer = _ReportTimer(clock)
        self._stacks: StacksRequest | None = None
        self._stacks_turn = asyncio.Lock()
        """A directive has one request: the next one waits for its answer."""
        self._stored_code: str | None = None
        """The version of the job's code that was stored in the cluster last; None if there is none yet."""

    async def stacks(self, rank: int | None, *, native: bool) -> Stacks | None:
        """Finds what all workers of the attempt do now, or one rank. None if the attempt begins, or is over. Raises
        SupervisorUnavailable: there is no answer in time."""
        async with self._stacks_turn:
            return await self._ask_for_stacks(rank, native=native)

    async def _ask_for_stacks(self, rank: int | None, *, native: bool) -> Stacks | None:
        request = self._stacks = StacksRequest(number=secrets.randbelow(1 << 53) + 1, rank=rank, native=native)
        self._changed.set()
        answered = asyncio.Event()
        until_mono = self._clock.monotonic() + _STACKS_S
        try:
            with self._subscribe_to_requests(answered):
                while (left_s := until_mono - self._clock.monotonic()) > 0:
                    answered.clear()
                    answer = await asyncio.to_thread(
                        self._store.reading(supervisor_links.read_stacks_answer), *self._key, request.number
                    )
                    if answer is not None:
                        return answer.stacks
                    # not for longer, because another control plane may have taken the report
                    await wait_for_any(self._clock, answered, timeout_s=min(left_s, _LOOK_S))
        finally:
            if self._stacks is request:
                self._stacks = None
                self._changed.set()
        raise SupervisorUnavailable(f"it has not answered for {_STACKS_S:g} s")

    def _subscribe_to_requests(self, event: asyncio.Event) -> Subscription:
        """Sets the event when a report has ended the attempt, or answered a request of a user."""
        loop = asyncio.get_running_loop()

        topic = Topic.REQUESTS.narrow_to(self._row.id)
        return self._store.subscribe(lambda _: loop.call_soon_threadsafe(event.set), topic)

    def expect(self, places: Mapping[str, int]) -> None:
        """Call it before `run`: how many workers are expected on which node, once others have given these places
        back."""
        self._places = places

    @property
    def _cluster(self) -> Cluster:
        """The cluster in which the attempt has begun. It is looked up each time, because it may be removed and join
        again."""
        return self._clusters.of(self._row.cluster)

    def update(
        self, row: DriveRow, avoid: tuple[AvoidedNode, ...], *, server_stops: bool = False, moves: bool = False
    ) -> None:
        """Take the newest row of the store, the nodes that must not be used, and whether the attempt has to save and
        end because the server stops or the job moves to another cluster."""
        self._avoid, self._server_stops, self._moves = avoid, server_stops, moves
        if self._directive(row) != self._written:
            self._row = row
            self._changed.set()

    async def run(self) -> None:
        """Follows the attempt until its end is stored, or its supervisor is dead and the job is back in the queue.

        Raises LeaseLost, StoreUnavailable. Every other error is counted, and the attempt ends after some in a row. A
        cluster that is away is waited for: `control/moving.py` says so. Orders that a gateway which reports leaves
        without an answer count until the supervisor has reported, since its workers then train on without them.
        """
        with self._subscribe_to_requests(self._requested):
            while not self._is_over:
                try:
                    await self._attend()
                except (LeaseLost, StoreUnavailable):
                    raise
                except Exception as error:
                    if isinstance(error, ClusterUnreachable) and (
                        self._has_reported or not isinstance(error, OrderUnanswered)
                    ):
                        await self._clock.sleep(_AWAY_S)
                    else:
                        await self._count_error(error)

    async def _attend(self) -> None:
        """Follow the attempt until it is over, or its supervisor could not be started and another start is due."""
        try:
            with self._watch_creation():
                await self._follow()
            return
        except SupervisorGone as error:
            if self._has_reported:
                await self._requeue(f"is gone: {error}")
                return
            self._num_failed += 1
            decision = supervisor_starts.after_failure(self._num_failed, str(error))
        await self._record_failed_start(decision)
        if decision.again:
            await self._reap()
            await self._clock.sleep(decision.after_s)
        else:
            await self._end(decision)

    async def _count_error(self, error: Exception) -> None:
        """Count an unexpected error, and pause. End the attempt after too many since its supervisor has reported."""
        self._log_error(error)
        self._num_errors += 1
        try:
            await self._note_error(error)
        except (LeaseLost, StoreUnavailable):
            raise
        except Exception as another:  # noted with the next one
            self._log_error(another)
        if not self._is_over:
            await self._clock.sleep(supervisor_starts.pause_s(self._num_errors))

    async def _note_error(self, error: Exception) -> None:
        link = await self._links.find_link(self._key, newest=True)
        if link is None:
            self._is_over = True
            return
        if link.reported_at != self._reported_at:
            self._num_errors, self._reported_at = 1, link.reported_at
        decision = supervisor_starts.after_error(self._num_errors, f"{type(error).__name__}: {error}")
        after_s = decision.after_s if decision.again else None
        event = DriverFailed(number=self._num_errors, after_s=after_s, message=decision.reason)
        note = self._store.writing(driving.note_driver_failure, self._epoch)
        await asyncio.to_thread(note, self._row.id, event, now=self._clock.time())
        if not decision.again:
            await self._end(decision)

    def _log_error(self, error: Exception) -> None:
        _log.error("driver.failed", exc_info=error, extra={"job": self._row.id, "attempt": self._row.attempt})

    async def _follow(self) -> None:
        """Follow the attempt until it is over. Raises SupervisorGone."""
        self._timer = _ReportTimer(self._clock)
        link = await self._links.find_link(self._key, newest=True)
        if link is not None:
            self._has_reported = link.life > 0
            self._timer.observe(link.reported_at)
            try:
                await self._find_or_start(has_token=link.has_token)
            except ClusterUnreachable:
                if not self._has_reported:
                    raise  # there may be none yet
        steering = asyncio.create_task(self._steer())
        try:
            while not self._is_over and await self._goes_on():
                if steering.done():
                    steering.result()
                overdue_s = self._timer.overdue_s()
                if overdue_s is not None or self._could_not_be_created():
                    await self._check_silent_supervisor(overdue_s or 0.0)
                await wait_for_any(self._clock, self._requested, timeout_s=_LOOK_S)
        finally:
            await cancel_all([steering])
        if not self._is_over:
            await self._reap_at_last()
            self._is_over = True

    async def _reap_at_last(self) -> None:
        try:
            await to_its_end(self._reap(), self._clock, _REAP_S)
        except Exception as error:  # `OrphanReaper` ends what is left there once the cluster is back
            fields = {"job": self._row.id, "attempt": self._row.attempt, "error": str(error)}
            _log.warning("attempt.not_reaped", extra=fields)

    @contextmanager
    def _watch_creation(self) -> Iterator[None]:
        """Wakes `_follow` when the cluster says that the supervisor could not be created."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            if self._could_not_be_created():
                loop.call_soon_threadsafe(self._requested.set)

        unwatch = self._cluster.watch(changed)
        try:
            yield
        finally:
            unwatch()

    def _could_not_be_created(self) -> bool:
        if self._has_reported:
            return False
        try:
            return self._key in self._cluster.snapshot().failed
        except ClusterUnreachable:
            return False

    async def _reap(self) -> None:
        await self._cluster.reap(*self._key)

    async def _goes_on(self) -> bool:
        newest = self._requested.is_set()
        self._requested.clear()  # before the store is read: what is reported meanwhile sets it again
        try:
            link = await self._links.find_link(self._key, newest=newest)
        except StoreUnavailable:
            return True  # no supervisor can report now
        if link is None:
            return False
        if self._timer.observe(link.reported_at):
            self._has_reported, self._unrecorded, self._is_rekeyed = True, None, False
        return True

    async def _check_silent_supervisor(self, silent_s: float) -> None:
        """Find out why the supervisor has not reported for `silent_s` seconds, and act on it. Raises SupervisorGone."""
        try:
            supervisor = await self._cluster.find_supervisor(*self._key)
            if supervisor is None:
                why = await self._cluster.why_gone(*self._key)
                raise SupervisorGone(why or "no actor of that name is in the cluster")
            node_id = await self._cluster.silent_supervisor(*self._key)
            if not node_id and silent_s >= _UNANSWERED_S and await self._give_up_starts():
                return
        except ClusterUnreachable:
            if not self._has_reported:
                raise  # `run` counts it, or waits
            return
        if node_id:
            # Ray would start another one too, but only after its verdict (decision 0018). Nothing is lost if the host
            # was only slow: the new supervisor claims the next incarnation, and the workers refuse the old one.
            if await self._start_another(node_id):
                await self._record(SupervisorMoved(node_id=node_id))
        elif self._has_reported and not self._is_rekeyed:
            if not supervisor.dials_here and silent_s >= _ELSEWHERE_S:
                await self._rekey("it reports to another address than this service has now")
            elif silent_s >= _UNKNOWN_S:
                await self._rekey(f"it has not reported for {_UNKNOWN_S:g} s, and its host answers")

    async def _give_up_starts(self) -> bool:
        """End the attempt if processes of its supervisor die before they record their start. False: they do not."""
        starts = await self._cluster.unrecorded_starts(*self._key)
        if self._unrecorded is None:
            self._unrecorded = starts if self._has_reported else 0
        if supervisor_starts.while_unanswered(starts, self._unrecorded).again:
            return False
        ends = await self._cluster.last_ends(*self._key)
        decision = supervisor_starts.while_unanswered(starts, self._unrecorded, ends)
        await self._record_failed_start(decision)
        await self._end(decision)
        return True

    async def _requeue(self, problem: str) -> None:
        await self._reap()
        await asyncio.to_thread(
            self._store.writing(driving.requeue, self._epoch),
            self._row.id,
            reason=EndReason.SUPERVISOR_LOST,
            message=f"the supervisor of attempt {self._row.attempt} {problem}",
            now=self._clock.time(),
        )
        self._is_over = True

    async def _end(self, decision: StartDecision) -> None:
        """Ends the attempt in place of its supervisor, which cannot report the end."""
        end = self._store.writing(reporting.end_attempt, self._epoch)
        await asyncio.to_thread(end, self._row.id, decision.end, decision.reason, now=self._clock.time())
        await self._reap_at_last()
        self._is_over = True

    async def _record_failed_start(self, decision: StartDecision) -> None:
        after_s, number = decision.after_s if decision.again else None, max(1, self._num_failed)
        await self._record(SupervisorStartFailed(number=number, after_s=after_s, message=decision.reason))

    async def _find_or_start(self, *, has_token: bool) -> None:
        """Find the supervisor; start it if none has ever reported. Raises SupervisorGone."""
        if await self._cluster.find_supervisor(*self._key) is not None:
            if not has_token:
                await self._rekey("the token of the attempt is not in the database")
            return
        if self._has_reported:
            raise SupervisorGone("no actor of that name is in the cluster")
        home = await self._make_home()
        code_uri = await self._store_code(self._row)
        config = await asyncio.to_thread(self._supervisor_config, home, code_uri)
        avoid = frozenset(node.node_id for node in self._avoid)
        places, self._places = self._places, {}
        await self._cluster.start_supervisor(config, avoid_nodes=avoid, places=places)

    async def _make_home(self) -> Home:
        """Make the home of a new supervisor. Its token is valid before the supervisor has it, and that of another
        supervisor of the attempt is not valid any more."""
        token = new_attempt_token()
        await asyncio.to_thread(self._store.writing(supervisor_links.keep_token, self._epoch), *self._key, token)
        return Home(token=token)

    async def _rekey(self, reason: str) -> None:
        """Start another supervisor with a new token, in place of one that does not report with the token in the
        database, or not to this service. The workers train on. If this was done before and has not helped, or cannot be
        done, the job returns to the queue."""
        was_rekeyed, self._is_rekeyed = self._is_rekeyed, True
        if not was_rekeyed and await self._start_another(""):
            await self._record(SupervisorRekeyed(message=reason))
        else:
            await self._requeue(f"cannot report to this service: {reason}")

    async def _start_another(self, silent_node: str) -> bool:
        home = await self._make_home()
        while True:
            try:
                is_started = await self._cluster.replace_supervisor(*self._key, silent_node, home)
            except ClusterUnreachable:
                await self._clock.sleep(_RETRY_S)
            else:
                self._timer = _ReportTimer(self._clock)  # the other supervisor has its own time to report
                return is_started

    async def _record(self, event: JobEvent) -> None:
        now = self._clock.time()
        await asyncio.to_thread(self._store.writing(driving.record_event, self._epoch), self._row.id, event, now=now)

    async def _steer(self) -> None:
        """Write a directive each time that one of its values changes."""
        while True:
            directive = self._directive(self._row)
            if directive != self._written:
                try:
                    await self._store_code(self._row)  # before the supervisor starts workers with it
                except ClusterUnreachable:
                    await self._clock.sleep(_RETRY_S)
                    continue
                body = directive.model_dump_json()
                await asyncio.to_thread(
                    self._store.writing(supervisor_links.put_directive, self._epoch), *self._key, body
                )
                self._written = directive
            await self._changed.wait()
            self._changed.clear()

    def _directive(self, row: DriveRow) -> Directive:
        return Directive(
            epoch=self._epoch,
            version=WIRE_VERSION,
            granted=row.granted_workers or self._last_grant,
            is_preempted=self._moves or is_preempted(row),
            moves_to=named_cluster(row.spec) if self._moves else "",
            desired=row.desired,
            elasticity=row.spec.elasticity,
            parallelism=row.spec.parallelism,
            spec_version=row.spec_version,
            avoid=self._avoid,
            server_stops=self._server_stops,
            pinned=row.pins,
            settings=settings_of(row.spec),
            code=row.spec.code.archive or "",
            profile=row.profile,
            stacks=self._stacks,
        )

    @property
    def _last_grant(self) -> int:
        """The grant to direct while the attempt is preempted: it stays as it was, so that the attempt does not shrink
        before it saves."""
        return self._written.granted if self._written is not None else 1

    def _supervisor_config(self, home: Home, code_uri: str | None) -> SupervisorConfig:
        row = self._row
        newest = self._store.reading(checkpoint_rows.newest)(row.id)
        return SupervisorConfig(
            job_id=row.id,
            attempt=row.attempt,
            version=WIRE_VERSION,
            spec=self._make_node_spec(row),
            checkpoint_root=checkpoint_root(row.spec, self._config.checkpoint_url, row.id),
            granted=row.granted_workers or self._last_grant,
            epoch=self._epoch,
            spec_version=row.spec_version,
            code_uri=code_uri,
            goodput=row.status.goodput,
            lost=row.status.lost,
            standing=row.status.best,
            home=home,
            snapshot_key=secrets.token_hex(16),
            profile=measured_profile(self._config.profiles, has_gpu=row.spec.worker.gpus > 0),
            fork_workers=self._config.fork_workers,
            agents_from=self._config.agents_from,
            snapshot_scope=self._config.snapshot_scope,
            rack_label=self._config.rack_label,
            logs=self._config.logs,
            avoid=self._avoid,
            pinned=row.pins,
            newest=str(newest) if newest is not None else None,
        )

    def _make_node_spec(self, row: DriveRow) -> JobSpec:
        """Removes the labels of the cluster from the selector: the scheduler has followed them, and nodes do not have
        them in Ray."""
        joined = self._clusters.joined.get(row.cluster or self._clusters.own)
        labels = joined.labels if joined is not None else {}
        own = {name: value for name, value in row.spec.worker.selector.items() if labels.get(name) != value}
        spec = with_origin(row.spec, self._config.checkpoint_url)
        if own == spec.worker.selector:
            return spec
        return spec.model_copy(update={"worker": spec.worker.model_copy(update={"selector": own})})

    async def _store_code(self, row: DriveRow) -> str | None:
        """Uploads the code to the cluster, where the workers get it from, and returns its URI. None if the job has
        none, or it is there already."""
        version = row.spec.code.archive
        if version is None or version == self._stored_code:
            return None
        if not await asyncio.to_thread(self._store.reading(archives.exists), version):
            raise LookupError(f"code archive {version} of job {row.id} is not in the store")
        uri = await self._cluster.upload_code(row.id, row.attempt, version)
        self._stored_code = version
        return uri


async def to_its_end(work: Coroutine[Any, Any, None], clock: Clock, within_s: float) -> None:
    """Wait for `work`, and raise what it raises. If the caller is cancelled, the rest of the work still gets `within_s`
    seconds at most.

    A server that stops cancels its drivers. No later control plane knows of an attempt whose end is stored, so without
    this its supervisor would stay in a cluster that outlives the server.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):  # nothing is left that would act on an error
            await clock.wait_for(task, within_s)
        raise


class OrphanReaper:
    """Ends actors of attempts that are over. Called by the control loop with each reading of a cluster; idempotent.

    A server that is killed between the store of an attempt's end and the release of its supervisor leaves that
    supervisor in the cluster. No driver follows an attempt that is over, so nothing else would end it. A cluster that
    was lost and returns still has the attempts that were given up. The cluster may also have actors of other control
    planes: their jobs are not in this store.
    """

    def __init__(self, store: Store, clusters: Clusters) -> None:
        self._store = store
        self._clusters = clusters
        self._kept: set[AttemptKey] = set()
        """Attempts of jobs that this store does not have, or cannot read."""

    def find(self, present: Collection[AttemptKey], driven: Collection[AttemptKey]) -> list[AttemptKey]:
        """Return the attempts that may be over.

        Args:
            present: attempts with actors in a cluster.
            driven: attempts with a driver, which ends their actors itself.
        """
        return sorted({*present} - {*driven} - self._kept)

    async def end(self, cluster: str, keys: Sequence[AttemptKey]) -> None:
        """Ends the attempts that are over, in this cluster. Raises ClusterUnreachable."""
        for key in keys:
            job_id, attempt = key
            try:
                status = (await asyncio.to_thread(self._store.get_job, job_id)).status
            except StoreError:
                self._kept.add(key)
                continue
            if attempt < status.attempt or (attempt == status.attempt and status.state not in ATTEMPT_STATES):
                number = await self._clusters.of(cluster).reap(job_id, attempt)
                fields = {"cluster": cluster, "job": job_id, "attempt": attempt, "actors": number}
                _log.warning("attempt.leftover_ended", extra=fields)
