"""RemoteCluster: the cluster as the control plane sees it, through its Ray process.

Made by `shoal serve`, called by the control loop and its drivers, on the loop and on threads. This process imports no
Ray and unpickles nothing: every answer is JSON, validated by `calls.py`. If the Ray process ends, its calls fail as if
the cluster did not answer, and the next `reconnect` starts another one.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from shoal_service.cluster.errors import ClusterUnreachable, ConnectionStale, RayCallFailed
from shoal_service.control.market.demand import RoomKind
from shoal_service.control.protocols import ClusterSnapshot, FoundSupervisor, UnusedPackages
from shoal_service.control.ray_process import calls
from shoal_service.control.ray_process.frames import Frame, FrameError, receive
from shoal_service.core.nodes import Node
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.home import Home
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.log_settings import LogSettings

HOME = "SHOAL_HOME"
"""Variable of the Ray process's environment: JSON of a Home with the address, and without a token."""
_COMMAND = (sys.executable, "-P", "-m", "shoal_service.control.ray_process.child")
_END_S = 5.0
_RECONNECT_S = 60.0
_log = logging.getLogger(__name__)


class RemoteCluster:
    """The `protocols.Cluster` of a server. Call `connect` first."""

    def __init__(self, environment: Mapping[str, str], logs: LogSettings, command: Sequence[str] = _COMMAND) -> None:
        """
        Args:
            environment: all that the Ray process gets.
            command: starts it; it is given a descriptor and the log settings as arguments.
        """
        self.address = ""
        self._environment = dict(environment)
        self._command = (*command,)
        self._logs = logs
        self._process: RayProcess | None = None
        self._watchers: list[Callable[[], None]] = []

    def report_to(self, address: Home) -> None:
        """Before `connect`: where the supervisors reach this service."""
        self._environment[HOME] = address.model_dump_json()

    def connect(self, address: str) -> None:
        """Become a driver of the cluster, with the token that the environment names. Raises ClusterUnreachable."""
        self.address = address
        process = self._process
        if process is None or process.has_ended:
            process = self._process = RayProcess(self._command, self._environment, self._logs, self._notify)
        self._block(calls.Connect(address=address))
        process.is_connected = True

    def disconnect(self) -> None:
        """Ends the Ray process, also one that hangs."""
        if self._process is not None:
            self._process.close(farewell=calls.Disconnect())

    @property
    def connected(self) -> bool:
        return self._process is not None and self._process.is_connected

    @property
    def pid(self) -> int | None:
        """Of the Ray process."""
        return self._process.pid if self._process is not None and not self._process.has_ended else None

    def snapshot(self) -> ClusterSnapshot:
        if not self.connected:
            raise ConnectionStale("the last attempt to connect failed")
        found: ClusterSnapshot = self._running().send(calls.TakeSnapshot())[1].result()
        return found

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def reconnect(self) -> None:
        """In the same process if it answers; it takes up to some seconds, and some more in a new one."""
        process = self._process
        if process is None or process.has_ended:
            self.connect(self.address)
            return
        process.is_connected = False
        try:
            self._block(calls.Reconnect(), timeout_s=_RECONNECT_S)
        except TimeoutError:
            process.end()
            raise ClusterUnreachable(f"Ray did not connect anew within {_RECONNECT_S:g} s") from None
        process.is_connected = True

    def start_supervisor(
        self, config: SupervisorConfig, *, avoid_nodes: frozenset[str], places: Mapping[str, int]
    ) -> None:
        self._block(calls.StartSupervisor(config=config, avoid_nodes=avoid_nodes, places=dict(places)))

    def keep_ready(self, avoid_nodes: frozenset[str]) -> None:
        self._block(calls.KeepReady(avoid_nodes=avoid_nodes))

    def find_supervisor(self, job_id: str, attempt: int) -> FoundSupervisor | None:
        found: FoundSupervisor | None = self._block(calls.FindSupervisor(job_id=job_id, attempt=attempt))
        return found

    def why_gone(self, job_id: str, attempt: int) -> str:
        return str(self._block(calls.WhyGone(job_id=job_id, attempt=attempt)))

    def silent_supervisor(self, job_id: str, attempt: int) -> str:
        return str(self._block(calls.SilentSupervisor(job_id=job_id, attempt=attempt)))

    def replace_supervisor(self, job_id: str, attempt: int, silent_node: str, home: Home) -> bool:
        request = calls.ReplaceSupervisor(job_id=job_id, attempt=attempt, silent_node=silent_node, home=home)
        return bool(self._block(request))

    def unrecorded_starts(self, job_id: str, attempt: int) -> int:
        return int(self._block(calls.UnrecordedStarts(job_id=job_id, attempt=attempt)))

    def last_ends(self, job_id: str, attempt: int) -> tuple[ProcessEnd, ...]:
        found: tuple[ProcessEnd, ...] = self._block(calls.LastEnds(job_id=job_id, attempt=attempt))
        return found

    def reap(self, job_id: str, attempt: int) -> int:
        return int(self._block(calls.Reap(job_id=job_id, attempt=attempt)))

    async def fault_of_node(self, suspect: Node, partner: str | None) -> str:
        try:
            return str(await self.ask(calls.FaultOfNode(suspect=suspect, partner=partner)))
        except ConnectionStale as error:
            raise ClusterUnreachable(str(error)) from error

    async def unused_packages(self, for_s: float) -> tuple[UnusedPackages, ...]:
        try:
            found: tuple[UnusedPackages, ...] = await self.ask(calls.ListUnusedPackages(for_s=for_s))
        except ConnectionStale as error:
            raise ClusterUnreachable(str(error)) from error
        return found

    async def remove_packages(self, node_id: str, name: str, for_s: float) -> bool:
        try:
            return bool(await self.ask(calls.RemovePackages(node_id=node_id, name=name, for_s=for_s)))
        except ConnectionStale as error:
            raise ClusterUnreachable(str(error)) from error

    def request_room(self, workers: Mapping[RoomKind, int]) -> None:
        self._block(calls.RequestRoom(workers=tuple(workers.items())))

    def upload_code(self, job_id: str, attempt: int, archive: bytes) -> str:
        return str(self._block(calls.UploadCode(job_id=job_id, attempt=attempt), archive))

    async def ask(self, request: Frozen) -> Any:
        """A call whose answer is not awaited any more is cancelled in the Ray process, too."""
        process = self._running()
        number, answer = process.send(request)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            process.cancel(number)
            raise

    def _block(self, request: Frozen, body: bytes = b"", timeout_s: float | None = None) -> Any:
        """Only a snapshot raises ConnectionStale, after which the control loop connects anew."""
        try:
            return self._running().send(request, body)[1].result(timeout_s)
        except ConnectionStale as error:
            raise ClusterUnreachable(str(error)) from error

    def _running(self) -> RayProcess:
        if self._process is None or self._process.has_ended:
            raise ConnectionStale("the process with the connection to Ray has ended")
        return self._process

    def _notify(self) -> None:
        for changed in tuple(self._watchers):
            changed()


class RayProcess:
    """The child, its socket, and the requests that it has not answered. Thread-safe."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], logs: LogSettings, changed: Callable[[], None]
    ) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[TypeAdapter[Any], Future[Any]]] = {}
        self._last = calls.NODES_CHANGED
        self._outgoing: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.has_ended = False
        self.is_connected = False
        self._socket, other = socket.socketpair()
        with other:
            self._child = subprocess.Popen(
                [*command, str(other.fileno()), logs.model_dump_json()],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                process_group=0,  # a terminal sends its Ctrl-C to the server only, which may still need this process
            )
        self.pid = self._child.pid
        for target in (self._receive, self._send_all):
            threading.Thread(target=target, name="ray-process", daemon=True).start()

    def send(self, request: Frozen, body: bytes = b"") -> tuple[int, Future[Any]]:
        """The request's number, and its validated answer."""
        answer: Future[Any] = Future()
        with self._lock:
            if self.has_ended:
                raise ConnectionStale("the process with the connection to Ray has ended")
            self._last += 1
            number = self._last
            self._pending[number] = (calls.ANSWERS[type(request)], answer)
        header = {"number": number, "name": type(request).__name__, "arguments": request.model_dump()}
        self._outgoing.put(Frame(to_json(header), body))
        return number, answer

    def cancel(self, number: int) -> None:
        with self._lock:
            self._pending.pop(number, None)
        self._outgoing.put(Frame(calls.CancelHeader(cancelled=number).model_dump_json().encode()))

    def close(self, farewell: Frozen) -> None:
        """Returns when the process has ended."""
        with suppress(Exception):  # whatever Ray says: the process is ended in any case
            self.send(farewell)[1].result(timeout=_END_S)
        self.end()

    def end(self) -> None:
        self.is_connected = False
        self._outgoing.put(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._child.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _send_all(self) -> None:
        """On a thread of its own: a child that is stopped must not hold up the event loop."""
        while (frame := self._outgoing.get()) is not None:
            try:
                self._socket.sendall(frame.pack())
            except OSError:
                return  # `_receive` sees it, too

    def _receive(self) -> None:
        try:
            while True:
                self._take(receive(self._socket))
        except (OSError, ValidationError) as error:
            if not isinstance(error, FrameError):
                _log.warning("ray_process.connection_failed", extra={"error": str(error)[: calls.MAX_WORDS]})
        finally:
            self._end()

    def _take(self, frame: Frame) -> None:
        header = calls.AnswerHeader.model_validate_json(frame.header)
        if header.number == calls.NODES_CHANGED:
            self._changed()
            return
        with self._lock:
            adapter, answer = self._pending.pop(header.number, (None, None))
        if adapter is None or answer is None:
            return  # it was cancelled
        try:
            if header.failure is not None:
                _settle(answer, error=header.failure.error())
            else:
                _settle(answer, value=adapter.validate_json(frame.body))
        except ValidationError as error:
            words = str(error.errors(include_url=False, include_input=False)[0])[: calls.MAX_WORDS]
            _log.warning("ray_process.answer_refused", extra={"error": words})
            _settle(answer, error=RayCallFailed(f"the answer of the Ray process is not valid: {words}"))

    def _end(self) -> None:
        with self._lock:
            self.has_ended, self.is_connected = True, False
            pending, self._pending = self._pending, {}
        self._outgoing.put(None)
        self._socket.close()
        if self._child.poll() is None:
            self._child.kill()  # one that has sent something else than answers
        self._child.wait()
        for _, answer in pending.values():
            _settle(answer, error=ConnectionStale("the process with the connection to Ray has ended"))
        self._changed()


def _settle(answer: Future[Any], *, value: Any = None, error: Exception | None = None) -> None:
    """A future that was cancelled by its waiter stays so."""
    if answer.set_running_or_notify_cancel():
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)
