"""JobDeleter: carries a deletion of a job out, whoever has begun it: the files, then the rows, then the job's row.

Every step can be repeated and joins what an earlier try has done, so two processes may delete one job at a time, and a
crash between two steps is made up for by the next call. Used on the event loop.
"""

from __future__ import annotations

import asyncio
from functools import partial

from shoal_service.clock import Clock
from shoal_service.control.storage.job_storage import JobStorage, StorageAway
from shoal_service.core.retention import Kind
from shoal_service.fleet_views import DeletionView
from shoal_service.store.store import Store
from shoal_service.supervisor.checkpoints.catalog import CheckpointCatalog
from shoal_service.telemetry.removal_tallies import RemovalTallies
from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.profiles import FOLDER as PROFILES

_FILES_S = 120.0
"""Time for the files of one checkpoint."""
_FOLDERS = (PROFILES, "tensorboard")
"""Folders of a job's directory that are deleted with its checkpoints. Nothing else is deleted: the directory may hold
files that are not Shoal's."""


class JobDeleter:
    def __init__(self, store: Store, storage: JobStorage, clock: Clock, tallies: RemovalTallies) -> None:
        self._store = store
        self._storage = storage
        self._clock = clock
        self._tallies = tallies

    async def advance(self, view: DeletionView) -> DeletionView:
        """Completes a deletion that was begun; one whose storage does not answer stays unfinished, with the error."""
        if view.finished_at is not None:
            return view
        if view.with_checkpoints:
            try:
                await self._delete_files(view)
            except StorageAway as error:
                return await asyncio.to_thread(self._store.note_deletion_error, view.job_id, str(error))
        while await asyncio.to_thread(self._store.remove_job_rows, view.job_id):
            pass
        done = await asyncio.to_thread(self._store.finish_deletion, view.job_id, now=self._clock.time())
        self._tallies.removed(Kind.JOB)
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
                self._tallies.removed(Kind.CHECKPOINT)
        await self._storage.run(catalog.forget_beginnings, within_s=_FILES_S)
        for folder in _FOLDERS:
            await self._storage.run(root.child(folder).remove_tree, within_s=_FILES_S)
        await self._storage.run(partial(_remove_if_empty, view.root), within_s=_FILES_S)


def _remove_if_empty(url: str) -> None:
    root = open_job_directory(url)
    try:
        if not root.directories() and not root.files():
            root.remove_tree()
    except FileNotFoundError:
        pass
