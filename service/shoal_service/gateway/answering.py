"""Carries out one order with Ray, and says what became of it. Orders run beside each other.

`clusters/verbs.py` has the table of orders. Those of RayVerbs are calls of the method with the same name of RayAccess;
the few of GatewayVerbs are methods here. Called by `gateway.py`, on its loop. Whatever fails is the answer to that
order.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json

from shoal_service.cluster.errors import ClusterUnreachable, ConnectionStale
from shoal_service.clusters.verbs import VERBS, Verb
from shoal_service.clusters.wire import MAX_WORDS, Answer, ClusterSnapshot, Failure, Order
from shoal_workers.contract import Frozen

_THREADS = 32
_KEPT_S = 30.0
"""An archive that was read is kept this long for orders that come again."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class RayAccess(Protocol):
    """A connection to one Ray cluster, with a method for each verb of RayVerbs. Those that are no coroutines block.

    The real one is `ray_cluster.py`, the fake is in `tests/doubles`.
    """

    address: str
    """Empty until it is connected."""

    ray_cluster: str
    """Id of the Ray cluster, in hexadecimal digits; empty until it is connected."""

    def connect(self, address: str) -> None:
        """Become a driver of the cluster."""

    def reconnect(self) -> None:
        """Makes a new connection."""

    def disconnect(self) -> None: ...

    def snapshot(self) -> ClusterSnapshot:
        """The cluster as it is now. Raises ConnectionStale: call `reconnect`."""

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]: ...

    def hold_code(self, job_id: str, attempt: int, sha256: str) -> str:
        """Keeps code that the cluster has for this attempt too. Returns its URI; empty if the cluster does not have
        it."""

    def upload_code(self, job_id: str, attempt: int, archive: bytes) -> str:
        """Stores a zip archive in the cluster. Returns its URI, which is the same for equal bytes."""


class Downloads:
    """Reads code archives from the service: each once, however many orders name it, and one after the other, so that a
    slow link still carries reports. A reading goes on without its order, whose successor has what was read."""

    def __init__(self, read: Callable[[str], Awaitable[bytes]]) -> None:
        self._read = read
        self._turn = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[bytes]] = {}
        """By SHA-256, until some time after the end."""

    async def archive(self, sha256: str) -> bytes:
        """Raises what the reading raises; the next call then begins another one."""
        if sha256 not in self._tasks:
            self._tasks[sha256] = asyncio.create_task(self._in_turn(sha256))
            self._tasks[sha256].add_done_callback(lambda task: self._done(sha256, task))
        return await asyncio.shield(self._tasks[sha256])

    async def _in_turn(self, sha256: str) -> bytes:
        async with self._turn:
            return await self._read(sha256)

    def _done(self, sha256: str, task: asyncio.Task[bytes]) -> None:
        kept_s = 0.0 if task.cancelled() or task.exception() else _KEPT_S
        task.get_loop().call_later(kept_s, self._tasks.pop, sha256, None)


class Answering:
    """Carries out orders. Not thread-safe: everything but the blocking calls runs on the loop."""

    def __init__(
        self,
        ray: RayAccess,
        *,
        look: Callable[[], Awaitable[None]],
        archive: Callable[[str], Awaitable[bytes]],
    ) -> None:
        """`look`: takes a snapshot that the next report has. `archive`: reads a code archive from the service."""
        self._ray = ray
        self._downloads = Downloads(archive)
        self._own: Mapping[str, Callable[..., Awaitable[Any]]] = {
            "look_now": look,
            "upload_code": self._upload_code,
        }
        """Methods of GatewayVerbs by name."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="order")

    async def answer(self, order: Order) -> Answer:
        try:
            verb = VERBS.get(order.kind)
            if verb is None:
                raise TypeError(f"this release knows no order {order.kind!r}: install that of the service")
            value = await self._carry_out(verb, verb.request.model_validate_json(order.arguments))
            return Answer(number=order.number, value=_as_json(value))
        except Exception as error:
            if isinstance(error, ClusterUnreachable | ConnectionStale):
                error = ClusterUnreachable(str(error))
            failure = Failure.of(error)
            if failure.kind == "RayCallFailed":
                _log.exception("gateway.order_failed", extra={"order": order.number, "kind": order.kind})
            return Answer(number=order.number, failure=failure)

    async def _carry_out(self, verb: Verb, request: Frozen) -> Any:
        arguments = {name: getattr(request, name) for name in verb.parameters}
        if (own := self._own.get(verb.method)) is not None:
            return await own(**arguments)
        method = getattr(self._ray, verb.method)
        call = partial(method, **arguments)
        # Ray's own calls may wait for the head, so what is no coroutine runs on a thread.
        value = await (call() if inspect.iscoroutinefunction(method) else self._blocking(call))
        return value[:MAX_WORDS] if isinstance(value, str) else value

    async def _upload_code(self, job_id: str, attempt: int, sha256: str) -> str:
        if uri := await self._blocking(lambda: self._ray.hold_code(job_id, attempt, sha256)):
            return uri
        archive = await self._downloads.archive(sha256)
        return await self._blocking(lambda: self._ray.upload_code(job_id, attempt, archive))

    async def _blocking(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _as_json(answer: Any) -> str:
    return to_json(answer, inf_nan_mode="constants", serialize_unknown=True).decode()
