"""Driver: follows one attempt of one job. Starts or finds its supervisor, stores its reports, sends directives.

A supervisor that cannot be created is created again after a pause; one whose processes die before they record their
start is given up (`core/supervisor_starts.py`). One asyncio task of the control loop per attempt. It never decides what
a job should do; it passes on the store's row.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping

from shoal_service.clock import Clock
from shoal_service.cluster.errors import ClusterUnreachable, SupervisorGone, SupervisorUnavailable
from shoal_service.clusters.supervisor_calls import SupervisorHandle
from shoal_service.control.config import ControlConfig
from shoal_service.control.market.build import is_preempted
from shoal_service.control.profile_store import measured_profile
from shoal_service.control.protocols import Cluster
from shoal_service.control.supervisors.calls import SupervisorCalls
from shoal_service.control.supervisors.finishing import to_its_end
from shoal_service.control.supervisors.report_writer import ReportWriter
from shoal_service.core import supervisor_starts
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.base import JobEvent
from shoal_service.core.events.service import SupervisorMoved, SupervisorRekeyed, SupervisorStartFailed
from shoal_service.core.supervisor_starts import StartDecision
from shoal_service.reports import SupervisorReports
from shoal_service.signing.calls import CallRefused, Refusal
from shoal_service.signing.signer import Signer, new_seed
from shoal_service.store.driving import DriveRow
from shoal_service.store.store import Store
from shoal_service.supervisor.config import Directive, SupervisorConfig, checkpoint_root
from shoal_workers.contract.base import WIRE_VERSION
from shoal_workers.contract.course.settings import settings_of
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import Stacks

_PULL_WAIT_S = 1.0
_RETRY_S = 0.25
_OVERDUE_S = 1.5
"""A pull without an answer for this long, and for as long again and again: does the supervisor's host answer?"""
_UNANSWERED_S = 5.0
"""A supervisor that leaves a pull unanswered for this long may be one that dies at every start."""
_PULL_PAUSE_S = 0.1
"""Between two pulls, so that the steps of a fast job are stored in batches and not in one transaction each."""
_FINISH_S = 5.0
"""For so long a server that stops waits for the release of a supervisor whose end has arrived."""


class _HostSilent(Exception):
    """The supervisor's host does not answer."""

    def __init__(self, node_id: str) -> None:
        super().__init__(node_id)
        self.node_id = node_id


class _StartsInVain(Exception):
    """The supervisor's processes die before they record their start; with the decision."""


class Driver:
    """Cancelled when the lease is lost; the supervisor goes on without it."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        clock: Clock,
        config: ControlConfig,
        row: DriveRow,
        *,
        epoch: int,
        numbers: Iterator[int],
        writer: ReportWriter,
    ) -> None:
        """`numbers`: of signed directives; they rise over all drivers of the epoch. `writer`: shared by all drivers."""
        self._store = store
        self._cluster = cluster
        self._clock = clock
        self._config = config
        self._row = row
        self._epoch = epoch
        self._avoid: tuple[AvoidedNode, ...] = ()
        self._server_stops = False
        self._places: Mapping[str, int] = {}
        self._sent: Directive | None = None
        """The last directive that the supervisor received."""
        self._changed = asyncio.Event()
        self._pulled = row.pulled_seq
        self._has_reported = row.pulled_seq > 0
        self._num_failed = 0
        self._unrecorded: int | None = None
        """Starts that were not recorded when the supervisor last answered; None: unknown."""
        self._supervisor: SupervisorCalls | None = None
        self._numbers, self._writer = numbers, writer
        self._signer: Signer | None = None
        """None: the attempt began without a key."""
        self._is_rekeyed = False
        self._stored_code: str | None = None
        """The version of the job's code that was stored in the cluster last."""

    async def stacks(self, rank: int | None, *, native: bool) -> Stacks | None:
        """What all workers of the attempt do now, or one rank. None: it has no supervisor yet, or no more.

        Raises SupervisorUnavailable, SupervisorGone."""
        if self._supervisor is None:
            return None
        try:
            return await self._supervisor.stacks(rank, native)
        except CallRefused as error:  # soon replaced by one that knows the key
            raise SupervisorUnavailable(str(error)) from error

    def expect(self, places: Mapping[str, int]) -> None:
        """Before `run`: how many workers are expected on which node, once others have given these places back."""
        self._places = places

    def update(self, row: DriveRow, avoid: tuple[AvoidedNode, ...], *, server_stops: bool = False) -> None:
        """The newest row of the store, the nodes that must not be used, and whether the attempt has to save and end."""
        self._avoid, self._server_stops = avoid, server_stops
        if self._directive(row) != self._sent:
            self._row = row
            self._changed.set()

    async def run(self) -> None:
        """Until the attempt's end is stored, or its supervisor is dead and the job is back in the queue."""
        while True:
            try:
                await self._follow_one()
                return
            except _HostSilent as error:
                await self._replace(error.node_id)
                continue
            except CallRefused as error:
                if await self._rekey(error):
                    continue
                await self._requeue("does not obey", error)
                return
            except _StartsInVain as error:
                await self._end(error.args[0])
                return
            except SupervisorGone as error:
                if self._has_reported:
                    await self._requeue("is gone", error)
                    return
                self._num_failed += 1
                decision = supervisor_starts.after_failure(self._num_failed, str(error))
            if not decision.again:
                await self._end(decision)
                return
            await self._report_failed_start(decision)
            await asyncio.to_thread(self._cluster.reap, self._row.id, self._row.attempt)
            await self._clock.sleep(decision.after_s)

    async def _follow_one(self) -> None:
        supervisor = self._supervisor = await self._attach()
        steering = asyncio.create_task(self._steer(supervisor))
        try:
            await self._follow(supervisor)
        finally:
            steering.cancel()
            await asyncio.gather(steering, return_exceptions=True)

    async def _requeue(self, what: str, error: Exception) -> None:
        await asyncio.to_thread(self._cluster.reap, self._row.id, self._row.attempt)
        await asyncio.to_thread(
            self._store.requeue,
            self._row.id,
            reason=EndReason.SUPERVISOR_LOST,
            message=f"the supervisor of attempt {self._row.attempt} {what}: {error}",
            epoch=self._epoch,
            now=self._clock.time(),
        )

    async def _end(self, decision: StartDecision) -> None:
        """In place of the supervisor, which cannot report its end."""
        await self._report_failed_start(decision)
        await asyncio.to_thread(self._cluster.reap, self._row.id, self._row.attempt)
        status = (await asyncio.to_thread(self._store.get_job, self._row.id)).status
        end = AttemptEnd(reason=decision.end, message=decision.reason, step=status.step)
        reports = SupervisorReports(attempt=self._row.attempt, seq=0, status=status, end=end)
        await self._writer.store(self._row.id, reports, epoch=self._epoch, now=self._clock.time())

    async def _report_failed_start(self, decision: StartDecision) -> None:
        event = SupervisorStartFailed(
            number=max(1, self._num_failed),
            after_s=decision.after_s if decision.again else None,
            message=decision.reason,
        )
        await self._record(event)

    async def _attach(self) -> SupervisorCalls:
        """Find the supervisor; start it if nothing was ever pulled from one."""
        seed = await asyncio.to_thread(self._store.signing_key, self._row.id, self._row.attempt)
        self._signer = self._signer_of(seed) if seed is not None else None
        handle = await self._find_or_start()
        return SupervisorCalls(handle, self._signer, self._epoch, self._numbers)

    async def _find_or_start(self) -> SupervisorHandle:
        row = self._row
        found = await asyncio.to_thread(self._cluster.find_supervisor, row.id, row.attempt)
        if found is not None:
            return found
        if self._pulled > 0:
            raise SupervisorGone("no actor of that name is in the cluster")
        if self._signer is None:
            await self._make_key()
        config = await asyncio.to_thread(self._supervisor_config)
        avoid = frozenset(node.node_id for node in self._avoid)
        places, self._places = self._places, {}
        return await asyncio.to_thread(self._cluster.start_supervisor, config, avoid_nodes=avoid, places=places)

    async def _make_key(self) -> None:
        """Stored before a supervisor has it: another control plane may have to go on from here."""
        seed = new_seed()
        await asyncio.to_thread(self._store.keep_signing_key, self._row.id, self._row.attempt, seed, epoch=self._epoch)
        self._signer = self._signer_of(seed)

    def _signer_of(self, seed: str) -> Signer:
        return Signer(seed, self._row.id, self._row.attempt, self._epoch)

    async def _follow(self, supervisor: SupervisorCalls) -> None:
        while True:
            try:
                reports = await self._pull(supervisor, self._pulled)
            except SupervisorUnavailable:
                await self._clock.sleep(_RETRY_S)
                continue
            self._has_reported, self._unrecorded = True, None
            if reports.end is not None:
                await to_its_end(self._finish(supervisor, reports), self._clock, _FINISH_S)
                return
            await self._apply(reports)
            await self._clock.sleep(_PULL_PAUSE_S)

    async def _apply(self, reports: SupervisorReports) -> None:
        await self._writer.store(self._row.id, reports, epoch=self._epoch, now=self._clock.time())
        self._pulled = reports.seq

    async def _finish(self, supervisor: SupervisorCalls, reports: SupervisorReports) -> None:
        await self._apply(reports)
        await supervisor.release()
        await asyncio.to_thread(self._cluster.reap, self._row.id, self._row.attempt)

    async def _pull(self, supervisor: SupervisorCalls, after: int) -> SupervisorReports:
        """Ray keeps a call until a process of the supervisor answers it, however many have died before."""
        pull = asyncio.ensure_future(supervisor.pull(after, _PULL_WAIT_S))
        checked_mono = self._clock.monotonic()
        try:
            while True:
                try:
                    return await self._clock.wait_for(asyncio.shield(pull), _OVERDUE_S)
                except TimeoutError:
                    await self._check_host()
                if self._clock.monotonic() - checked_mono >= _UNANSWERED_S:
                    checked_mono = self._clock.monotonic()
                    await self._check_starts()
        finally:
            pull.cancel()

    async def _check_host(self) -> None:
        try:
            node_id = await asyncio.to_thread(self._cluster.silent_supervisor, self._row.id, self._row.attempt)
        except ClusterUnreachable:
            return
        if node_id:
            raise _HostSilent(node_id)

    async def _replace(self, node_id: str) -> None:
        """Ray would do so too, but only after its verdict (decision 0018). Nothing is lost if the host was only slow to
        answer: the new supervisor claims the next life, and the workers refuse the old one."""
        if await self._start_another(node_id):
            await self._record(SupervisorMoved(node_id=node_id))

    async def _rekey(self, error: CallRefused) -> bool:
        """The key of this attempt is not the supervisor's: the database was restored, or the row was lost. Another
        supervisor gets a new one, and the workers train on. False: that was done before, or cannot be done."""
        if self._is_rekeyed:
            return False
        self._is_rekeyed = True
        await self._make_key()
        if not await self._start_another(""):
            return False
        await self._record(SupervisorRekeyed(message=str(error)))
        return True

    async def _start_another(self, silent_node: str) -> bool:
        key = self._signer.public_key if self._signer is not None else ""
        while True:
            try:
                return await asyncio.to_thread(
                    self._cluster.replace_supervisor, self._row.id, self._row.attempt, silent_node, key
                )
            except ClusterUnreachable:
                await self._clock.sleep(_RETRY_S)

    async def _record(self, event: JobEvent) -> None:
        now = self._clock.time()
        await asyncio.to_thread(self._store.record_event, self._row.id, event, epoch=self._epoch, now=now)

    async def _check_starts(self) -> None:
        try:
            found = await asyncio.to_thread(self._cluster.unrecorded_starts, self._row.id, self._row.attempt)
        except ClusterUnreachable:
            return
        if self._unrecorded is None:
            self._unrecorded = found if self._has_reported else 0
        if not supervisor_starts.while_unanswered(found, self._unrecorded).again:
            ends = await asyncio.to_thread(self._cluster.last_ends, self._row.id, self._row.attempt)
            raise _StartsInVain(supervisor_starts.while_unanswered(found, self._unrecorded, ends))

    async def _steer(self, supervisor: SupervisorCalls) -> None:
        """Send a directive each time that one of its values changes."""
        while True:
            directive = self._directive(self._row)
            if directive != self._sent:
                try:
                    await asyncio.to_thread(self._store_code, self._row)  # before the supervisor starts workers with it
                    await supervisor.direct(directive)
                except SupervisorGone:
                    return  # the next `pull` of `_follow` raises the same error
                except CallRefused as error:
                    if error.refusal is not Refusal.REPLAYED:
                        return  # `_follow` gets the same answer
                    await self._clock.sleep(_RETRY_S)
                    continue
                except (SupervisorUnavailable, ClusterUnreachable):
                    await self._clock.sleep(_RETRY_S)
                    continue
                self._sent = directive
            await self._changed.wait()
            self._changed.clear()

    def _directive(self, row: DriveRow) -> Directive:
        return Directive(
            epoch=self._epoch,
            version=WIRE_VERSION,
            granted=row.granted_workers or self._last_grant,
            is_preempted=is_preempted(row),
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
        )

    @property
    def _last_grant(self) -> int:
        """While the attempt is preempted: its grant stays as it was, so that it does not shrink before it saves."""
        return self._sent.granted if self._sent is not None else 1

    def _supervisor_config(self) -> SupervisorConfig:
        row = self._row
        code_uri = self._store_code(row)
        return SupervisorConfig(
            job_id=row.id,
            attempt=row.attempt,
            version=WIRE_VERSION,
            spec=row.spec,
            checkpoint_root=checkpoint_root(row.spec, self._config.checkpoint_url, row.id),
            granted=row.granted_workers or self._last_grant,
            epoch=self._epoch,
            spec_version=row.spec_version,
            code_uri=code_uri,
            goodput=row.status.goodput,
            lost=row.status.lost,
            standing=row.status.best,
            public_key=self._signer.public_key if self._signer is not None else "",
            snapshot_key=secrets.token_hex(16),
            profile=measured_profile(self._config.profiles, has_gpu=row.spec.worker.gpus > 0),
            fork_workers=self._config.fork_workers,
            agents_from=self._config.agents_from,
            snapshot_scope=self._config.snapshot_scope,
            rack_label=self._config.rack_label,
            logs=self._config.logs,
            avoid=self._avoid,
            pinned=row.pins,
        )

    def _store_code(self, row: DriveRow) -> str | None:
        """In the cluster, where the workers get it from; its URI. None: the job has none, or it is there already."""
        version = row.spec.code.archive
        if version is None or version == self._stored_code:
            return None
        if not self._store.has_code(version):
            raise LookupError(f"code archive {version} of job {row.id} is not in the store")
        uri = self._cluster.upload_code(row.id, row.attempt, version)
        self._stored_code = version
        return uri
