"""Answering: carries out one order with Ray, and says what became of it. Orders run beside each other.

Made and called by `gateway.py`, on its loop. Whatever fails is the answer to that order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from pydantic_core import to_json

from shoal_service.cluster.errors import ClusterUnreachable, ConnectionStale
from shoal_service.clusters import calls
from shoal_service.clusters.wire import Answer, Order
from shoal_service.gateway.protocols import RayAccess
from shoal_service.gateway.storage import why_unreachable
from shoal_workers.contract.base import Frozen

_THREADS = 32
_STORAGE_THREADS = 4
"""A storage that hangs keeps these, and no others."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Answering:
    """Not thread-safe: everything but the blocking calls runs on the loop."""

    def __init__(
        self,
        ray: RayAccess,
        *,
        look: Callable[[], Awaitable[None]],
        archive: Callable[[str], Awaitable[bytes]],
    ) -> None:
        """`look`: takes a snapshot that the next report has. `archive`: reads a code archive from the service."""
        self._ray = ray
        self._look = look
        self._archive = archive
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="order")
        self._storage_threads = ThreadPoolExecutor(_STORAGE_THREADS, thread_name_prefix="storage")

    async def answer(self, order: Order) -> Answer:
        try:
            kind = calls.REQUESTS.get(order.kind)
            if kind is None:
                raise TypeError(f"this release knows no order {order.kind!r}: install that of the service")
            value = await self._carry_out(kind.model_validate_json(order.arguments))
            return Answer(number=order.number, value=_as_json(value))
        except Exception as error:
            if isinstance(error, ConnectionStale):
                error = ClusterUnreachable(str(error))
            failure = calls.Failure.of(error)
            if failure.kind == "RayCallFailed":
                _log.exception("gateway.order_failed", extra={"order": order.number, "kind": order.kind})
            return Answer(number=order.number, failure=failure)

    async def _carry_out(self, request: Frozen) -> Any:
        ray = self._ray
        match request:
            case calls.LookNow():
                return await self._look()
            case calls.FaultOfNode():
                return await ray.fault_of_node(request.suspect, request.partner)
            case calls.ListUnusedPackages():
                return await ray.unused_packages(request.for_s)
            case calls.RemovePackages():
                return await ray.remove_packages(request.node_id, request.name, request.for_s)
            case calls.SeesStorage():
                look = partial(why_unreachable, request.url, request.name)
                return await asyncio.get_running_loop().run_in_executor(self._storage_threads, look)
            case calls.UploadCode():
                archive = await self._archive(request.sha256)
                return await self._blocking(lambda: ray.upload_code(request.job_id, request.attempt, archive))
            case _:
                return await self._blocking(lambda: self._block(request))

    def _block(self, request: Frozen) -> Any:
        """On a thread: Ray's own calls may wait for the head."""
        ray = self._ray
        match request:
            case calls.StartSupervisor():
                return ray.start_supervisor(request.config, avoid_nodes=request.avoid_nodes, places=request.places)
            case calls.FindSupervisor():
                return ray.find_supervisor(request.job_id, request.attempt)
            case calls.WhyGone():
                return ray.why_gone(request.job_id, request.attempt)[: calls.MAX_WORDS]
            case calls.SilentSupervisor():
                return ray.silent_supervisor(request.job_id, request.attempt)
            case calls.ReplaceSupervisor():
                return ray.replace_supervisor(request.job_id, request.attempt, request.silent_node, request.home)
            case calls.UnrecordedStarts():
                return ray.unrecorded_starts(request.job_id, request.attempt)
            case calls.LastEnds():
                return ray.last_ends(request.job_id, request.attempt)
            case calls.Reap():
                return ray.reap(request.job_id, request.attempt)
            case calls.KeepReady():
                return ray.keep_ready(request.avoid_nodes)
            case calls.RequestRoom():
                return ray.request_room(dict(request.workers))
            case _:
                raise TypeError(f"no order is named {type(request).__name__}")

    async def _blocking(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _as_json(answer: Any) -> str:
    return to_json(answer, inf_nan_mode="constants", serialize_unknown=True).decode()
