"""Responder: answers the control plane's calls with those of a cluster, in the Ray process.

One frame is one call; calls run beside each other. Made by `child.py` with the real cluster, and by tests with a fake.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json

from shoal_service.control.protocols import Cluster
from shoal_service.control.ray_process import calls
from shoal_service.control.ray_process.frames import Frame, read
from shoal_workers.contract.base import Frozen

_THREADS = 32
_log = logging.getLogger(__name__)
T = TypeVar("T")


class ServedCluster(Cluster, Protocol):
    """A cluster, and how to connect to it."""

    def connect(self, address: str) -> None: ...

    def disconnect(self) -> None: ...


class Responder:
    """Serves one connection. Not thread-safe: everything but the blocking calls runs on the loop."""

    def __init__(self, cluster: ServedCluster, writer: asyncio.StreamWriter) -> None:
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="call")
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_watching = False

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the control plane closes the connection, or ends."""
        while True:
            frame = await read(reader)
            if b'"cancelled"' in frame.header[:16]:
                task = self._tasks.get(calls.CancelHeader.model_validate_json(frame.header).cancelled)
                if task is not None:
                    task.cancel()
                continue
            header = calls.RequestHeader.model_validate_json(frame.header)
            request = calls.REQUESTS[header.name].model_validate(header.arguments)
            self._tasks[header.number] = asyncio.create_task(self._respond(header.number, request, frame.body))

    async def _respond(self, number: int, request: Frozen, body: bytes) -> None:
        """The boundary of a call: whatever fails is its answer."""
        failure, answer = None, b""
        try:
            answer = _as_json(await self._answer(request, body))
        except asyncio.CancelledError:
            return
        except Exception as error:
            failure = calls.Failure.of(error)
            if failure.kind == "RayCallFailed":
                _log.exception("ray_process.call_failed", extra={"call": type(request).__name__})
        finally:
            self._tasks.pop(number, None)
        header = calls.AnswerHeader(number=number, failure=failure)
        self._send(Frame(header.model_dump_json().encode(), answer))

    def _send(self, frame: Frame) -> None:
        self._writer.write(frame.pack())

    async def _answer(self, request: Frozen, body: bytes) -> Any:
        match request:
            case calls.FaultOfNode():
                return await self._cluster.fault_of_node(request.suspect, request.partner)
            case calls.ListUnusedPackages():
                return await self._cluster.unused_packages(request.for_s)
            case calls.RemovePackages():
                return await self._cluster.remove_packages(request.node_id, request.name, request.for_s)
            case _:
                return await self._blocking(lambda: self._block(request, body))

    def _block(self, request: Frozen, body: bytes) -> Any:
        """On a thread: Ray's own calls may wait for the head."""
        cluster = self._cluster
        match request:
            case calls.Connect():
                cluster.connect(request.address)
                self._watch()
            case calls.Reconnect():
                cluster.reconnect()
                self._watch()
            case calls.Disconnect():
                cluster.disconnect()
            case calls.TakeSnapshot():
                return cluster.snapshot()
            case calls.StartSupervisor():
                return cluster.start_supervisor(request.config, avoid_nodes=request.avoid_nodes, places=request.places)
            case calls.FindSupervisor():
                return cluster.find_supervisor(request.job_id, request.attempt)
            case calls.WhyGone():
                return cluster.why_gone(request.job_id, request.attempt)[: calls.MAX_WORDS]
            case calls.SilentSupervisor():
                return cluster.silent_supervisor(request.job_id, request.attempt)
            case calls.ReplaceSupervisor():
                return cluster.replace_supervisor(request.job_id, request.attempt, request.silent_node, request.home)
            case calls.UnrecordedStarts():
                return cluster.unrecorded_starts(request.job_id, request.attempt)
            case calls.LastEnds():
                return cluster.last_ends(request.job_id, request.attempt)
            case calls.Reap():
                return cluster.reap(request.job_id, request.attempt)
            case calls.UploadCode():
                return cluster.upload_code(request.job_id, request.attempt, body)
            case calls.KeepReady():
                return cluster.keep_ready(request.avoid_nodes)
            case calls.RequestRoom():
                return cluster.request_room(dict(request.workers))
            case _:
                raise TypeError(f"no call is named {type(request).__name__}")
        return None

    def _watch(self) -> None:
        self._loop.call_soon_threadsafe(ignore_signals)  # Ray has replaced the handler of SIGTERM
        if not self._is_watching:
            self._is_watching = True
            changed = Frame(calls.AnswerHeader(number=calls.NODES_CHANGED).model_dump_json().encode())

            def notify() -> None:
                self._loop.call_soon_threadsafe(self._send, changed)

            self._cluster.watch(notify)

    async def _blocking(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _as_json(answer: Any) -> bytes:
    """Losses that are not finite stay what they are."""
    plain = answer.model_dump() if isinstance(answer, Frozen) else answer
    return to_json(plain, inf_nan_mode="constants", serialize_unknown=True)


def ignore_signals() -> None:
    """This process ends with its connection: a server that stops may still need it to save its jobs."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
