"""FakeNodeWatch and FakeProbe: the state of nodes and ports, which a test changes."""

import asyncio
from collections.abc import Callable, Mapping

from shoal_service.cluster.node_table import NodeTable
from shoal_service.supervisor.protocols import Address, Gone


class FakeNodeWatch:
    """A `protocols.NodeWatch`."""

    def __init__(self) -> None:
        self.table = NodeTable()
        self._report: Callable[[NodeTable], None] | None = None

    @property
    def is_started(self) -> bool:
        return self._report is not None

    def start(self, report: Callable[[NodeTable], None]) -> None:
        self._report = report

    def stop(self) -> None:
        self._report = None

    def dead_nodes(self) -> frozenset[str]:
        return self.table.dead

    def show(self, table: NodeTable) -> None:
        """The head's table has changed."""
        self.table = table
        if self._report is not None:
            self._report(table)


class FakeHostWatch:
    """A `protocols.HostWatch`."""

    def __init__(self) -> None:
        self.watched: dict[str, Address] = {}
        self.head = ""
        self.silent_at_start: frozenset[str] = frozenset()
        self._report: Callable[[dict[str, str]], None] | None = None

    @property
    def is_started(self) -> bool:
        return self._report is not None

    def start(self, report: Callable[[dict[str, str]], None], silent: frozenset[str] = frozenset()) -> None:
        self._report, self.silent_at_start = report, silent

    def watch(self, nodes: Mapping[str, Address], head: str) -> None:
        self.watched, self.head = dict(nodes), head

    def stop(self) -> None:
        self._report = None

    def show(self, silent: dict[str, str]) -> None:
        """These nodes are silent now."""
        if self._report is not None:
            self._report(silent)


class FakeProbe:
    """`until_gone` of the liveness probe: returns when the test closes the port."""

    def __init__(self) -> None:
        self._watched: dict[Address, list[asyncio.Future[Gone | None]]] = {}
        self.raylets: dict[Address, Address | None] = {}
        """The raylet of each worker's node, as the caller knew it when the port closed."""
        self._raylet_of: dict[Address, Callable[[], Address | None]] = {}

    @property
    def watched(self) -> list[Address]:
        return [address for address, futures in self._watched.items() if any(not f.done() for f in futures)]

    async def until_gone(self, worker: Address, raylet: Callable[[], Address | None]) -> Gone | None:
        ending: asyncio.Future[Gone | None] = asyncio.get_running_loop().create_future()
        self._watched.setdefault(worker, []).append(ending)
        self._raylet_of[worker] = raylet
        return await ending

    def close(self, worker: Address, *, at: float, with_raylet: bool = False) -> None:
        """The port refuses connections."""
        self.raylets[worker] = self._raylet_of[worker]()
        self._end(worker, Gone(at, with_raylet))

    def give_up(self, worker: Address) -> None:
        """The port could never be reached."""
        self._end(worker, None)

    def _end(self, worker: Address, outcome: Gone | None) -> None:
        for ending in self._watched.pop(worker):
            if not ending.done():
                ending.set_result(outcome)
