"""CheckpointMethods: the methods of `Store` for what people do with checkpoints. See `Store` for what they share."""

from __future__ import annotations

from shoal_service.store.checkpoints import requests
from shoal_service.store.database import Database
from shoal_service.store.hub import Hub
from shoal_service.views import CheckpointView
from shoal_workers.contract.marker import CheckpointName


class CheckpointMethods:
    """A part of `Store`."""

    _database: Database
    _hub: Hub

    def pin_checkpoint(self, job_id: str, name: CheckpointName, *, is_pinned: bool, now: float) -> CheckpointView:
        """Retention does not delete the checkpoint while it is pinned. Raises JobNotFound, CheckpointNotFound,
        CheckpointConflict."""
        with self._database.write() as tx:
            view = requests.pin(tx, job_id, name, is_pinned=is_pinned, now=now)
        self._hub.publish(job_id)
        return view

    def check_deletion(self, job_id: str, name: CheckpointName) -> CheckpointView:
        """The checkpoint, which may be deleted now. Raises JobNotFound, CheckpointNotFound; CheckpointConflict: it is
        not in the storage; CheckpointKept: it is pinned, or a job that has not ended needs it."""
        with self._database.read() as tx:
            return requests.check_deletion(tx, job_id, name)

    def note_deletion(self, job_id: str, name: CheckpointName, *, now: float, reason: str = "") -> CheckpointView:
        """The checkpoint was deleted in the storage; `reason`: why, if no user asked. Raises JobNotFound,
        CheckpointNotFound."""
        with self._database.write() as tx:
            view = requests.note_deletion(tx, job_id, name, now=now, reason=reason)
        self._hub.publish(job_id)
        return view

    def note_damage(self, job_id: str, name: CheckpointName, *, message: str, now: float) -> CheckpointView:
        """A verification has found damage: the state becomes `damaged`. Raises JobNotFound, CheckpointNotFound."""
        with self._database.write() as tx:
            view = requests.note_damage(tx, job_id, name, message=message, now=now)
        self._hub.publish(job_id)
        return view
