"""Deletes what ended jobs leave behind once it is old enough, in small steps.

    deletions that were begun      ->  continued: the files, then the rows, then the job's row
    ended jobs, page by page       ->  core/retention.py::due             ->  one removal after the other
    archives that no job names     ->  deleted
    packages that no worker uses   ->  deleted from the nodes of all clusters

`RetentionCollector.run` is a task of the control plane: it works while this process holds the lease. A round may also
be asked for by a user, on any control plane: every step can be repeated and joins what an earlier try has done, and a
crash between two steps is made up for by the next call. Used on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from shoal_service.clock import Clock, wait_for_any
from shoal_service.cluster.errors import ClusterError, ClusterUnreachable
from shoal_service.clusters.wire import UnusedPackages
from shoal_service.control.job_storage import JobStorage, StorageAway
from shoal_service.control.protocols import Cluster, Clusters
from shoal_service.core.quantities import size_text
from shoal_service.core.retention import DEFAULT_EVERY_S, DEFAULT_RULES, Kind, Removal, RetentionRules, due
from shoal_service.fleet_views import DeletionView, GcView, RemovalView
from shoal_service.store import (
    Conflict,
    Lease,
    LeaseLost,
    NotFound,
    Store,
    StoreError,
    access,
    archives,
    checkpoint_rows,
    job_deletion,
)
from shoal_service.store.job_deletion import BEGINNING, DeletionRequest, Place
from shoal_service.supervisor.checkpoints import CheckpointCatalog
from shoal_service.telemetry.tallies import Count
from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract import CheckpointName
from shoal_workers.contract.islands import FOLDER as ISLANDS
from shoal_workers.contract.media import FOLDER as MEDIA
from shoal_workers.contract.outputs import FOLDER as OUTPUTS
from shoal_workers.contract.profiles import FOLDER as PROFILES

_log = logging.getLogger(__name__)
_PAUSE_S = 0.05
"""Pause between two removals of a round that no user waits for: the database belongs to the jobs."""
_FIRST_ROUND_S = 60.0
"""Pause after the start, when jobs are taken over and everything is busy."""
_DELETIONS_S = 30.0
"""Deletions that were begun and not completed are looked for this often."""
_DELETE_S = 120.0
_DAY_S = 86_400.0
_FILES_S = 120.0
"""Seconds that the removal of the files of one checkpoint may take."""
_FOLDERS = (PROFILES, MEDIA, OUTPUTS, ISLANDS, "tensorboard")
"""Folders of a job's directory that are deleted with its checkpoints. Nothing else is deleted, since the directory may
hold files that are not Shoal's; except of a script, whose files are its checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    rules: RetentionRules = DEFAULT_RULES
    every_s: float = DEFAULT_EVERY_S
    """Seconds between two rounds; 0: there are rounds only when a user asks."""


class RetentionCollector:
    """Deletes what is old, round after round. `run` returns after `stop` is set."""

    def __init__(
        self,
        store: Store,
        storage: JobStorage,
        clock: Clock,
        config: RetentionConfig,
        tallies: Count,
        clusters: Clusters | None = None,
    ) -> None:
        """`clusters`: None if this process has no connection to a cluster."""
        self._store = store
        self._storage = storage
        self._clock = clock
        self._config = config
        self._tallies = tallies
        self._clusters = clusters
        self._cluster_of_node: dict[str, str] = {}
        """The cluster of each node on which unused packages were found, by node id."""
        self._packages_mono = float("-inf")
        """When packages were last looked for."""

    async def run(self, stop: asyncio.Event, lease: Callable[[], Lease | None]) -> None:
        """`lease`: that of this process, None if it has none; called on the loop."""
        round_mono = self._clock.monotonic() - self._config.every_s + _FIRST_ROUND_S
        while not stop.is_set():
            try:
                if lease() is not None:
                    await self._continue_deletions()
                    if self._config.every_s and self._clock.monotonic() - round_mono >= self._config.every_s:
                        round_mono = self._clock.monotonic()
                        await self._round(stop, lease)
            except (StoreError, LeaseLost) as error:
                _log.warning("retention.round_failed", extra={"error": str(error)})
            except Exception:
                _log.exception("retention.round_failed")
            await wait_for_any(self._clock, stop, timeout_s=_DELETIONS_S)

    async def collect(self, *, dry_run: bool, within_s: float, limit: int) -> GcView:
        """Do one round for a user: up to that time, and that number of removals."""
        end_mono = self._clock.monotonic() + within_s
        removals: list[RemovalView] = []
        if not dry_run:
            await self._continue_deletions()
        self._packages_mono = float("-inf")
        async for removal in self._list_due():
            if len(removals) >= limit or self._clock.monotonic() > end_mono:
                return GcView(dry_run=dry_run, removals=tuple(removals), is_complete=False)
            removals.append(_make_view(removal) if dry_run else await self._remove(removal))
        return GcView(dry_run=dry_run, removals=tuple(removals))

    async def _round(self, stop: asyncio.Event, lease: Callable[[], Lease | None]) -> None:
        async for removal in self._list_due():
            if stop.is_set() or lease() is None:
                return
            await self._remove(removal)
            await asyncio.sleep(_PAUSE_S)

    async def _continue_deletions(self) -> None:
        for view in await asyncio.to_thread(self._store.reading(job_deletion.read_unfinished)):
            await self.finish_deletion(view)

    async def _list_due(self) -> AsyncIterator[Removal]:
        now, rules = self._clock.time(), self._config.rules
        place: Place | None = BEGINNING
        while rules.first_days > 0 and place is not None:
            before = now - rules.first_days * _DAY_S
            read = self._store.reading(job_deletion.find_ended_jobs)
            jobs, place = await asyncio.to_thread(read, before=before, after=place)
            for removal in due(jobs, rules, now):
                yield removal
        if rules.archives_days > 0:
            before = now - rules.archives_days * _DAY_S
            reason = f"no job names it, and retain_archives_days is {rules.archives_days:g}"
            for sha256 in await asyncio.to_thread(self._store.reading(archives.find_unused), before=before):
                yield Removal(kind=Kind.ARCHIVE, name=sha256, reason=reason)
        for removal in await self._list_due_packages():
            yield removal
        if rules.audit_days > 0:
            before = now - rules.audit_days * _DAY_S
            old = await asyncio.to_thread(self._store.reading(access.count_before), before - _DAY_S)
            if old:  # once a day, not with each record that becomes too old
                reason = f"older than retain_audit_days, {rules.audit_days:g}"
                yield Removal(kind=Kind.AUDIT, name="audit", reason=reason)

    async def _list_due_packages(self) -> list[Removal]:
        """The packages to delete. They are looked for once a day, since a process has to start on each node, and
        whenever a user asks."""
        days, mono = self._config.rules.packages_days, self._clock.monotonic()
        if self._clusters is None or days <= 0 or mono - self._packages_mono < _DAY_S:
            return []
        joined = self._clusters.joined.items()
        answers = await asyncio.gather(*(self._list_unused_packages(name, member.cluster) for name, member in joined))
        return [_make_package_removal(package, days) for unused in answers for package in unused]

    async def _list_unused_packages(self, name: str, cluster: Cluster) -> tuple[UnusedPackages, ...]:
        """Find the unused packages on the nodes of a cluster; none if it does not answer."""
        try:
            unused = await cluster.unused_packages(self._config.rules.packages_days * _DAY_S)
        except ClusterError as error:
            _log.warning("retention.packages_unknown", extra={"cluster": name, "error": str(error)})
            return ()
        self._packages_mono = self._clock.monotonic()
        self._cluster_of_node |= {package.node_id: name for package in unused}
        return unused

    async def _remove(self, removal: Removal) -> RemovalView:
        view = _make_view(removal)
        try:
            rows = await self._carry_out(removal)
        except (StorageAway, FileNotFoundError, ClusterUnreachable) as error:
            view = view.model_copy(update={"error": str(error)})
        except (NotFound, Conflict):
            pass  # a user has deleted it meanwhile, pinned it, or let the job go on
        else:
            view = view.model_copy(update={"rows": rows})
        fields = {"kind": view.kind.value, "job": view.job_id, "removed": view.name, "reason": view.reason}
        _log.info("retention.removed", extra=fields | {"rows": view.rows, "error": view.error})
        return view

    async def _carry_out(self, removal: Removal) -> int:
        """Carry out a removal. Return the number of rows that it removed. Raises StorageAway, NotFound,
        ClusterUnreachable."""
        now, store = self._clock.time(), self._store
        match removal.kind:
            case Kind.JOB:
                job = await asyncio.to_thread(store.get_job, removal.job_id)
                request = DeletionRequest(root=self._storage.root(job), by="retention", reason=removal.reason)
                begun = await asyncio.to_thread(store.writing(job_deletion.begin), job.id, request, now=now)
                done = await self.finish_deletion(begun)
                if done.error:
                    raise StorageAway(done.error)
                return done.rows
            case Kind.CHECKPOINT:
                await self._remove_checkpoint(removal, now)
                return 0
            case Kind.ARCHIVE:
                before = now - self._config.rules.archives_days * _DAY_S
                gone = await asyncio.to_thread(store.writing(archives.remove), removal.name, before=before)
                self._tallies.add(Kind.ARCHIVE, amount=int(gone))
                return int(gone)
            case Kind.AUDIT:
                before = now - self._config.rules.audit_days * _DAY_S
                remove_before = store.writing(access.remove_before)
                return await self._remove_rows(
                    Kind.AUDIT, lambda _: remove_before(before=before, reason=removal.reason, now=now)
                )
            case Kind.PACKAGES:
                assert self._clusters is not None
                node_id, _, name = removal.name.partition("/")
                cluster = self._clusters.of(self._cluster_of_node.get(node_id, ""))
                gone = await cluster.remove_packages(node_id, name, self._config.rules.packages_days * _DAY_S)
                self._tallies.add(Kind.PACKAGES, amount=int(gone))
                return 0
            case Kind.LOGS | Kind.SERIES | Kind.EVENTS:
                remove_part = partial(store.writing(job_deletion.remove_part), removal.job_id, removal.kind)
                return await self._remove_rows(
                    removal.kind, lambda total: remove_part(before=total, reason=removal.reason, now=now)
                )

    async def _remove_checkpoint(self, removal: Removal, now: float) -> None:
        job = await asyncio.to_thread(self._store.get_job, removal.job_id)
        name = CheckpointName.parse(removal.name)
        assert name is not None
        catalog = self._storage.catalog(job)
        # again: a user may have pinned it meanwhile
        await asyncio.to_thread(self._store.reading(checkpoint_rows.check_deletion), job.id, name)
        await self._storage.run(partial(catalog.delete, name), within_s=_DELETE_S)
        note = self._store.writing(checkpoint_rows.note_deletion)
        await asyncio.to_thread(note, job.id, name, now=now, reason=removal.reason)
        self._tallies.add(Kind.CHECKPOINT)

    async def _remove_rows(self, kind: Kind, remove: Callable[[int], int]) -> int:
        """Remove rows batch by batch, so that other writes come in between. `remove`: is given the number of rows that
        are removed so far, and returns that of the next batch; 0: there are none left."""
        total = 0
        while removed := await asyncio.to_thread(remove, total):
            total += removed
            self._tallies.add(kind, amount=removed)
            await asyncio.sleep(0)
        return total

    async def finish_deletion(self, view: DeletionView) -> DeletionView:
        """Complete a deletion that this or another process has begun; two may work on one job.

        One whose storage does not answer stays unfinished, with the error.
        """
        if view.finished_at is not None:
            return view
        if view.with_checkpoints:
            try:
                await self._delete_files(view)
            except StorageAway as error:
                return await asyncio.to_thread(self._store.writing(job_deletion.note_error), view.job_id, str(error))
        while await asyncio.to_thread(self._store.writing(job_deletion.remove_rows), view.job_id):
            pass
        done = await asyncio.to_thread(self._store.writing(job_deletion.finish), view.job_id, now=self._clock.time())
        self._tallies.add(Kind.JOB)
        return done

    async def _delete_files(self, view: DeletionView) -> None:
        if not view.root:
            raise StorageAway("the job's directory is not known: it has no checkpoint.url, and the server no default")
        kept = {url.rpartition("/")[2] for url in view.kept}
        catalog, root = CheckpointCatalog(view.root), open_job_directory(view.root)
        for name in await self._storage.run(root.directories, within_s=_FILES_S):
            parsed = CheckpointName.parse(name)
            if parsed is not None and name not in kept:
                await self._storage.run(partial(catalog.delete, parsed), within_s=_FILES_S)
                self._tallies.add(Kind.CHECKPOINT)
        await self._storage.run(catalog.forget_beginnings, within_s=_FILES_S)
        for folder in _FOLDERS:
            await self._storage.run(root.child(folder).remove_tree, within_s=_FILES_S)
        remove = root.remove_tree if view.with_files else partial(_remove_if_empty, view.root)
        await self._storage.run(remove, within_s=_FILES_S)


def _make_view(removal: Removal) -> RemovalView:
    return RemovalView(kind=removal.kind, job_id=removal.job_id, name=removal.name, reason=removal.reason)


def _make_package_removal(unused: UnusedPackages, days: float) -> Removal:
    reason = (
        f"{size_text(unused.num_bytes)} on {unused.node_ip}, last used {unused.unused_s / _DAY_S:.0f} days ago, and "
        f"retain_packages_days is {days:g}"
    )
    return Removal(kind=Kind.PACKAGES, name=f"{unused.node_id}/{unused.name}", reason=reason)


def _remove_if_empty(url: str) -> None:
    root = open_job_directory(url)
    try:
        if not root.directories() and not root.files():
            root.remove_tree()
    except FileNotFoundError:
        pass
