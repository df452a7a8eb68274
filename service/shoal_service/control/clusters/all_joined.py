"""JoinedClusters: a JoinedCluster for each row of the store's table of clusters, made when the row appears and closed
when it is removed.

The one of this service's own name is there from the start, whether it has joined or not. Made by `shoal serve`; the
control loop calls `refresh` in each pass. It decides nothing about a cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from shoal_service.clock import Clock
from shoal_service.control.clusters.joined import JoinedCluster
from shoal_service.control.protocols import JoinedAs
from shoal_service.store import cluster_links
from shoal_service.store.lease import Lease
from shoal_service.store.store import Store


class JoinedClusters:
    """A `protocols.Clusters`. Call `close` at the end. Everything but `refresh` may be called from any thread."""

    def __init__(self, store: Store, own: str, clock: Clock, lease: Callable[[], Lease | None]) -> None:
        """`lease`: the one of this process, None while it has none. From any thread."""
        self._store = store
        self._own = own
        self._clock = clock
        self._lease = lease
        self._lock = threading.Lock()
        self._started: dict[str, JoinedCluster] = {}
        self._absent: dict[str, JoinedCluster] = {}
        """Those that were asked for and have not joined."""
        self._watchers: list[Callable[[str], None]] = []
        self._joined: Mapping[str, JoinedAs] = {}
        self._is_closed = False
        self._adopt({own: JoinedAs(cluster=self._made(own))})

    @property
    def own(self) -> str:
        return self._own

    @property
    def joined(self) -> Mapping[str, JoinedAs]:
        return self._joined

    def refresh(self) -> None:
        with self._store.read() as tx:
            known = {one.name: one for one in cluster_links.entries(tx)}
        names = [self._own, *(name for name in known if name != self._own)]
        with self._lock:
            if self._is_closed:
                return
        found = {}
        for name in names:
            entry = known.get(name)
            made = self._made(name)
            found[name] = (
                JoinedAs(cluster=made, labels=entry.labels, cordon=entry.cordon) if entry else JoinedAs(cluster=made)
            )
        self._adopt(found)

    def of(self, name: str) -> JoinedCluster:
        name = name or self._own
        with self._lock:
            if (started := self._started.get(name)) is not None:
                return started
            if name not in self._absent:
                self._absent[name] = JoinedCluster(self._store, name, self._clock, self._lease)
            return self._absent[name]

    def watch(self, changed: Callable[[str], None]) -> Callable[[], None]:
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def close(self) -> None:
        """Calls that wait fail."""
        with self._lock:
            self._is_closed = True
            started, self._started = [*self._started.values()], {}
        for cluster in started:
            cluster.close()

    def _made(self, name: str) -> JoinedCluster:
        with self._lock:
            if name not in self._started:
                cluster = JoinedCluster(self._store, name, self._clock, self._lease)
                cluster.watch(lambda: self._changed(name))
                self._started[name] = cluster.start()
                self._absent.pop(name, None)
            return self._started[name]

    def _adopt(self, found: Mapping[str, JoinedAs]) -> None:
        with self._lock:
            gone = [self._started.pop(name) for name in [*self._started] if name not in found]
            self._joined = found
        for cluster in gone:
            cluster.close()

    def _changed(self, name: str) -> None:
        for changed in tuple(self._watchers):
            changed(name)
