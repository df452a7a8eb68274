"""What a supervisor learns by connecting: that a worker's port is closed, and that a host is silent.

    until_gone   asyncio; one connection to each worker that breaks when the worker, or its raylet, ends
    HostProbe    thread;  connects (never blocks) -> answers -> core/reachability -> report(silent hosts)

Ray reports the death of a single worker after some tens of milliseconds. It reports the death of a worker together with
its raylet only after it has lost and retried a connection of its own, or after its health checks. A port that was open
and now refuses connections is proof: the host answers, and no process listens. A host that does not answer is judged by
HostProbe only, which never judges the processes of a host: a stopped process has a kernel that answers. Its connects go
to the port of the node's raylet; an accepted connection is reset at once, so neither side keeps anything.

Hidden here: sockets, and that this process may have had no CPU when an answer came. `until_gone` is called by the
worker clients; HostProbe is made by `supervisor/actor.py`, started and stopped by the executor.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from shoal_service.cluster.connects import open_socket
from shoal_service.core import reachability
from shoal_service.core.reachability import Reach
from shoal_service.supervisor.protocols import Address, Gone

_PAUSE_S = 0.02
_UNREACHABLE_S = 1.0
REFUSAL_S = 0.2
_RAYLET_CHECK_S = 0.3
"""A live raylet reports the worker's death, with its cause, within this time. A raylet that dies just after its workers
has ended by then."""


async def until_gone(worker: Address, raylet: Callable[[], Address | None]) -> Gone | None:
    """Returns once a port that was open refuses connections. None if the worker's port was never open to this process.

    A connection may break although the worker lives (a survivor shuts its own connections to wake up), so each broken
    connection is tried again.

    Args:
        raylet: the address of the raylet of the worker's node; None means unknown.
    """
    was_open = raylet_was_open = False
    at = 0.0
    while True:
        try:
            reader, writer = await asyncio.open_connection(*worker)
        except ConnectionRefusedError:
            if not was_open:
                return None
            await asyncio.sleep(_RAYLET_CHECK_S)
            return Gone(at, raylet_was_open and await refuses(raylet()))
        except OSError:  # the host cannot be reached, so nothing is known about the worker
            await asyncio.sleep(_UNREACHABLE_S)
            continue
        was_open = True
        try:
            raylet_was_open = raylet_was_open or await accepts(raylet())
            while await reader.read(1):
                pass  # the worker sends nothing of its own accord
        except OSError:
            pass  # a reset also ends the connection
        finally:
            writer.close()
        at = time.time()
        if raylet_was_open and await refuses(raylet()):
            return Gone(at, with_raylet=True)
        await asyncio.sleep(_PAUSE_S)


async def accepts(address: Address | None) -> bool:
    """Return whether a process listens there, and can be reached from here."""
    return address is not None and await _try(address) is None


async def refuses(address: Address | None) -> bool:
    """Return whether the host answers that no process listens there."""
    return address is not None and isinstance(await _try(address), ConnectionRefusedError)


async def _try(address: Address) -> OSError | None:
    """Connects. The host is asked again if no answer came in time, because a busy loop has not looked whether one
    came."""
    while True:
        began = time.monotonic()
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*address), REFUSAL_S)
        except TimeoutError as error:
            if time.monotonic() - began < 2 * REFUSAL_S:
                return error
        except OSError as error:
            return error
        else:
            writer.close()
            return None


_log = logging.getLogger(__name__)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with zero seconds: no TIME_WAIT, which would hold one local port per connect for a minute."""
_KEEP_S = 4.0
"""A connect without an answer is given up after this time; newer ones go on."""
_REPEAT_S = 1.0
"""The silent nodes are reported again after this time, and at once when they change."""
_TICK_S = 0.1

Report = Callable[[dict[str, str]], None]
"""Called on the probe's thread with all silent nodes: node id -> reason."""


@dataclass(slots=True)
class _Host:
    address: Address
    reach: Reach
    attempts: dict[int, tuple[socket.socket, float]] = field(default_factory=dict)
    """Connects under way by file descriptor, with the time at which each was made."""

    def drop(self) -> None:
        for connection, _ in self.attempts.values():
            connection.close()
        self.attempts.clear()


class HostProbe:
    """Watches whether hosts answer connects. The real `protocols.HostWatch`."""

    def __init__(self, own_node: str, *, silent: frozenset[str] = frozenset()) -> None:
        """`silent`: nodes that were silent when this process was started."""
        self._own = own_node
        self._head = ""
        self._watched: Mapping[str, Address] = {}
        self._silent_at_start = silent
        self._hosts: dict[str, _Host] = {}
        self._stop = threading.Event()

    def start(self, report: Report, silent: frozenset[str] = frozenset()) -> None:
        self._silent_at_start |= silent
        threading.Thread(target=self._run, args=(report,), name="host-probe", daemon=True).start()

    def watch(self, nodes: Mapping[str, Address], head: str) -> None:
        self._head = head
        self._watched = {node_id: address for node_id, address in nodes.items() if node_id != self._own}

    def stop(self) -> None:
        self._stop.set()

    def _run(self, report: Report) -> None:
        reported: dict[str, str] = {}
        reported_at = time.monotonic()
        while not self._stop.is_set():
            self._follow_watched()
            self._connect_where_due()
            self._collect_answers()
            silent = self._judge()
            now = time.monotonic()
            if silent.keys() != reported.keys() or (silent and now - reported_at >= _REPEAT_S):
                reported, reported_at = silent, now
                report(silent)
        for host in self._hosts.values():
            host.drop()

    def _follow_watched(self) -> None:
        watched = self._watched
        for node_id in [n for n, host in self._hosts.items() if watched.get(n) != host.address]:
            self._hosts.pop(node_id).drop()
        for node_id, address in watched.items():
            if node_id not in self._hosts:
                was_silent = node_id in self._silent_at_start
                because = "it was silent before the supervisor was restarted" if was_silent else ""
                self._hosts[node_id] = _Host(address, Reach(has_answered=was_silent, silent_because=because))

    def _connect_where_due(self) -> None:
        now = time.monotonic()
        for host in self._hosts.values():
            if reachability.next_probe_at(host.reach, now) > now:
                continue
            for number in [n for n, (_, made_at) in host.attempts.items() if now - made_at > _KEEP_S]:
                host.attempts.pop(number)[0].close()
            host.reach = reachability.probed(host.reach, now)
            connection = open_socket(host.address[0])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            code = connection.connect_ex(host.address)
            if code == errno.EINPROGRESS:
                host.attempts[connection.fileno()] = (connection, now)
            else:
                connection.close()
                self._note(host, code, now)

    def _collect_answers(self) -> None:
        """Collects answers until the next connect is due. Answers that came while this thread had no CPU are seen here
        first."""
        now = time.monotonic()
        due_s = min((reachability.next_probe_at(host.reach, now) - now for host in self._hosts.values()), default=1.0)
        poll = select.poll()
        by_number = {number: host for host in self._hosts.values() for number in host.attempts}
        for number in by_number:
            poll.register(number, select.POLLOUT)
        for number, _ in poll.poll(min(_TICK_S, max(0.0, due_s)) * 1e3):
            host = by_number[number]
            connection, made_at = host.attempts.pop(number)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            connection.close()
            self._note(host, code, made_at)

    def _note(self, host: _Host, code: int, made_at: float) -> None:
        """Notes an answer. An accepted and a refused connect both say that the host's kernel has answered."""
        if code in (0, errno.ECONNREFUSED):
            host.reach = reachability.answered(host.reach, made_at, time.monotonic())

    def _judge(self) -> dict[str, str]:
        reaches = {node_id: host.reach for node_id, host in self._hosts.items()}
        silent = reachability.silent_nodes(reaches, time.monotonic(), own=self._own, head=self._head)
        for node_id, reason in silent.items():
            host = self._hosts[node_id]
            if not host.reach.silent_because:
                _log.warning("host.silent", extra={"node": node_id, "reason": reason})
                host.reach = replace(host.reach, silent_because=reason)
        return silent
