"""ProfileMethods: the methods of `Store` about profiles of running jobs. See `Store` for what they share."""

from __future__ import annotations

from sqlalchemy import select

from shoal_service.store.database import Database
from shoal_service.store.errors import ProfileNotFound
from shoal_service.store.hub import Hub
from shoal_service.store.profiles import requests
from shoal_service.store.records import load
from shoal_service.store.tables import profiles
from shoal_service.views import ProfileBody, ProfileView


class ProfileMethods:
    """A part of `Store`."""

    _database: Database
    _hub: Hub

    def request_profile(self, job_id: str, body: ProfileBody, *, now: float) -> ProfileView:
        """Raises JobNotFound; RequestConflict (JobEnded): the job has no workers; ProfileOpen: the one before is not
        ended."""
        with self._database.write() as tx:
            view = requests.create(tx, job_id, body, now=now)
        self._hub.publish(job_id)
        return view

    def profiles(self, job_id: str) -> list[ProfileView]:
        """Oldest first. Raises JobNotFound."""
        with self._database.read() as tx:
            job = load(tx, job_id)
            query = select(profiles.c.document).where(profiles.c.job_num == job.num).order_by(profiles.c.number)
            return [ProfileView.model_validate_json(document) for document in tx.execute(query).scalars()]

    def profile(self, job_id: str, number: int) -> ProfileView:
        """Raises JobNotFound, ProfileNotFound."""
        for view in self.profiles(job_id):
            if view.number == number:
                return view
        raise ProfileNotFound(job_id, number)
