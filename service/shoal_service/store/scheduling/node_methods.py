"""NodeMethods: the methods of `Store` about cordons, maintenance windows and measured drains. See `Store`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal_service.core.nodes import Cordon
from shoal_service.fleet_views import MaintenanceWindow
from shoal_service.store import lease as leases
from shoal_service.store.database import Database
from shoal_service.store.hub import Hub
from shoal_service.store.scheduling import maintenance


class NodeMethods:
    """A part of `Store`."""

    _database: Database
    _hub: Hub

    def cordon_node(self, node_id: str, *, reason: str, now: float) -> None:
        """No new worker is placed on the node. The caller checks that the node exists."""
        with self._database.write() as tx:
            maintenance.cordon(tx, node_id, reason=reason, now=now)
        self._hub.publish(f"node {node_id}", is_request=True)

    def uncordon_node(self, node_id: str) -> bool:
        """False: the node was not cordoned."""
        with self._database.write() as tx:
            undone = maintenance.uncordon(tx, node_id)
        if undone:
            self._hub.publish(f"node {node_id}", is_request=True)
        return undone

    def cordons(self) -> dict[str, Cordon]:
        """By node id."""
        with self._database.read() as tx:
            return maintenance.cordons(tx)

    def plan_window(
        self, nodes: Collection[str], *, begins_at: float, ends_at: float, reason: str, now: float
    ) -> MaintenanceWindow:
        """A new maintenance window; `nodes`: ids or addresses."""
        with self._database.write() as tx:
            window = maintenance.plan_window(tx, nodes, begins_at=begins_at, ends_at=ends_at, reason=reason, now=now)
        self._hub.publish(f"window {window.window_id}", is_request=True)
        return window

    def cancel_window(self, window_id: str) -> None:
        """Raises WindowNotFound."""
        with self._database.write() as tx:
            maintenance.cancel_window(tx, window_id)
        self._hub.publish(f"window {window_id}", is_request=True)

    def windows(self) -> list[MaintenanceWindow]:
        """The earliest first; those that have ended for a day."""
        with self._database.read() as tx:
            return maintenance.windows(tx)

    def drain_times(self) -> list[float]:
        """Seconds of the last drains."""
        with self._database.read() as tx:
            return maintenance.read_drain_times(tx)

    def add_drain_times(self, seconds: Mapping[str, float], *, epoch: int, now: float) -> None:
        """Adds the seconds that ended drains have taken, by node id."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            maintenance.add_drain_times(tx, seconds, now=now)
