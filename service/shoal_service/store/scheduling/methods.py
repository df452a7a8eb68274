"""SchedulingMethods: the methods of `Store` about projects, users and the queue. See `Store` for what they share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shoal_service.core.scheduling.explaining import HeldBack
from shoal_service.core.scheduling.market import Project, User, Wait
from shoal_service.fleet_views import ProjectRules, ProjectView, QueueView, UserRules, UserView
from shoal_service.store import lease as leases
from shoal_service.store.database import Database
from shoal_service.store.hub import Hub
from shoal_service.store.scheduling import growth, projects, queue, users
from shoal_service.store.scheduling.queue import MOST_PLACED


class SchedulingMethods:
    """A part of `Store`."""

    _database: Database
    _hub: Hub

    # --- REST

    def queue(self, *, limit: int = 1000, visible: Collection[str] | None = None) -> QueueView:
        """The queue in its order, and the projects; `visible`: of these projects alone."""
        with self._database.read() as tx:
            return queue.read(tx, limit=limit, visible=visible)

    def list_projects(self, visible: Collection[str] | None = None) -> list[ProjectView]:
        """The defined projects and those that have jobs, by name; `visible`: of these alone."""
        with self._database.read() as tx:
            return [one for one in projects.views(tx) if visible is None or one.name in visible]

    def get_project(self, name: str) -> ProjectView:
        """Raises ProjectNotFound."""
        with self._database.read() as tx:
            return projects.view(tx, name)

    def put_project(self, name: str, rules: ProjectRules) -> tuple[ProjectView, bool]:
        """Replaces all rules of a project. Returns it, and whether it is new. Raises ProjectConflict."""
        with self._database.write() as tx:
            is_new = projects.put(tx, name, rules)
            view = projects.view(tx, name)
        self._hub.publish(f"project {name}", is_request=True)
        return view, is_new

    def delete_project(self, name: str) -> None:
        """Raises ProjectNotFound, ProjectConflict."""
        with self._database.write() as tx:
            projects.remove(tx, name)
        self._hub.publish(f"project {name}", is_request=True)

    def list_users(self) -> list[UserView]:
        """The defined users and those who have jobs, by name."""
        with self._database.read() as tx:
            return users.views(tx)

    def get_user(self, name: str) -> UserView:
        """Raises UserNotFound."""
        with self._database.read() as tx:
            return users.view(tx, name)

    def put_user(self, name: str, rules: UserRules) -> tuple[UserView, bool]:
        """Replaces the limits of a user. Returns the user, and whether the user is new."""
        with self._database.write() as tx:
            is_new = users.put(tx, name, rules)
            view = users.view(tx, name)
        self._hub.publish(f"user {name}", is_request=True)
        return view, is_new

    def delete_user(self, name: str) -> None:
        """Raises UserNotFound."""
        with self._database.write() as tx:
            users.remove(tx, name)
        self._hub.publish(f"user {name}", is_request=True)

    # --- control loop

    def projects(self) -> dict[str, Project]:
        """The defined projects, by name."""
        with self._database.read() as tx:
            return projects.defined(tx)

    def users(self) -> dict[str, User]:
        """The defined users, by name."""
        with self._database.read() as tx:
            return users.defined(tx)

    def set_queue(self, waits: Sequence[Wait], *, epoch: int, now: float, most: int = MOST_PLACED) -> bool:
        """Replaces the order of the queue and its reasons by the `Wait` decisions of a pass, which may be none. Only
        what differs is written, and no watcher is notified, because the order may change with every pass.

        The comparison comes before the write transaction, so other writers wait only for the rows. Nobody else
        writes places during the same epoch.

        Returns:
            False if more than `most` places differ. Then the rest is written by the next call.
        """
        with self._database.read() as tx:
            changes = queue.differing(tx, waits, now=now, most=most)
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            if changes.placed or changes.gone:
                queue.save(tx, changes)
        return not changes.num_left

    def set_growth(self, answers: Sequence[HeldBack], versions: Mapping[str, int], *, epoch: int, now: float) -> None:
        """Why running jobs are held back, as a pass explained it. `versions`: of the spec that the pass has considered,
        of each running job. A job whose spec has changed since the last answer gets an event if it is held back."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            answered, _ = growth.save(tx, answers, versions, now=now)
        for job_id in answered:
            self._hub.publish(job_id)
