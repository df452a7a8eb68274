"""Gateway: reports its cluster, and carries out the orders to it. Three loops on one asyncio loop.

    looking     a snapshot of the cluster once a second, and at once when a node has come or gone
    reporting   what was seen, and answers: once a second, and at once when there is something new
    ordering    a long poll for orders; each one is a task

It dials out only. While the service does not answer, reports wait here and training goes on. A gateway speaks for its
cluster in a *life*: the service refuses reports of a life that another gateway has followed, and this one then stands
by in a new life. Within a life an order is carried out once, however often it arrives; its answer is sent until the
service has acknowledged it, and the service stores the first one. Decides nothing about a job.

`Link` makes each request to the service once, and fails as `home.py` has it; the loops repeat. `OrderExecutor` carries
out an order: `clusters/verbs.py` has the table of them. Those of RayVerbs are calls of the method with the same name of
RayAccess; the few of GatewayVerbs are methods here. Whatever fails is the answer to that order.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import logging
import random
import secrets
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import httpx
from pydantic_core import to_json

from shoal_service.clock import cancel_all
from shoal_service.cluster.errors import ClusterUnreachable, ConnectionStale
from shoal_service.clusters.verbs import VERBS, Verb
from shoal_service.clusters.wire import (
    MAX_ANSWERS,
    MAX_WORDS,
    Answer,
    ClusterReport,
    ClusterSnapshot,
    Failure,
    Order,
    OrderPage,
    ReportReceipt,
)
from shoal_service.home import DialError, Superseded, Unavailable, make_error
from shoal_workers.contract import Frozen, backoff_s
from shoal_workers.recently_used import RecentlyUsed

_REPORT_S = 1.0
_FIRST_REPORT_S = 5.0
"""The first report comes after this time at the latest, also if Ray has not answered until then."""
_LOOK_S = 1.0
_SNAPSHOT_S = 5.0
_RECONNECT_S = 60.0
_WAIT_S = 20.0
"""Longest time for which the service may hold a long poll."""
_PACE_S = 0.02
"""Pause between two requests of a loop. Under load each request has more in it, and there are not more of them."""
_STAND_BY_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0
_KEPT_ANSWERS = 1_000
_MAX_ANSWER_CHARS = 16 << 20
"""Characters of the answers in one report, at most."""
_FAREWELL_S = 2.0
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class RayHangs(Exception):
    """Ray's client hangs, and the process has to be started again."""


@dataclass(slots=True)
class _Life:
    """What a gateway has done since it speaks for its cluster."""

    takes_over: bool
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    reports: int = 0
    epoch: int = 0
    """The highest lease epoch of an order so far."""
    sent: ClusterSnapshot | None = None
    """The snapshot in the newest report that was stored."""
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    outbox: dict[int, Answer] = field(default_factory=dict)
    """Answers that are not acknowledged."""
    done: RecentlyUsed[int, Answer] = field(default_factory=lambda: RecentlyUsed(_KEPT_ANSWERS))
    """The newest answers, by number of the order, for an order that comes again."""
    is_admitted: bool = False


class Gateway:
    """The three loops of one gateway. `process.py` makes and runs it."""

    def __init__(
        self,
        ray: RayAccess,
        link: Link,
        *,
        address: str,
        say: Callable[[str], None],
        connected: Callable[[], None] = lambda: None,
        replaces: bool = False,
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            address: of the Ray cluster.
            say: called with lines for people.
            connected: called on the loop after each connection to Ray.
            replaces: it may take the name over from another Ray cluster, once that one is silent.
            labels: that the cluster gets with the first report.
        """
        self._ray = ray
        self._link = link
        self._address = address
        self._say = say
        self._after_connect = connected
        self._replaces = replaces
        self._labels = dict(labels)
        self._executor = OrderExecutor(ray, look=self._look_now, archive=self._archive)
        self._life = _Life(takes_over=True)
        self._seen: ClusterSnapshot | None = None
        self._error = f"the gateway connects to Ray at {address}"
        self._has_tried = asyncio.Event()
        """Set once Ray has answered, or failed to do so."""
        self._is_connected = asyncio.Event()
        self._is_admitted = asyncio.Event()
        self._look_soon = asyncio.Event()
        self._report_soon = asyncio.Event()
        self._looks = asyncio.Condition()
        self._num_begun = self._num_looks = 0
        self._looking_task: asyncio.Task[ClusterSnapshot] | None = None
        self._is_away = False
        self._failures = Counter[str]()
        """Failed requests in a row, by what is asked."""
        self._stands_by = False

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set. Raises Rejected: the service will not have this gateway; RayHangs."""
        loops = [
            asyncio.create_task(routine, name=name)
            for name, routine in (
                ("looking", self._looking()),
                ("reporting", self._reporting()),
                ("ordering", self._ordering()),
            )
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *loops], return_when=asyncio.FIRST_COMPLETED)
            for loop in loops:
                if loop.done():
                    loop.result()
        finally:
            await cancel_all([stopping, *loops])
            await self._send_last_report()

    # --- what it sees

    async def _looking(self) -> None:
        await self._connect()
        loop = asyncio.get_running_loop()

        def changed() -> None:
            loop.call_soon_threadsafe(self._look_soon.set)

        self._ray.watch(changed)
        while True:
            self._look_soon.clear()
            await self._look()
            await _wait_for_event(self._look_soon, _LOOK_S)

    async def _connect(self) -> None:
        for failures in itertools.count(1):
            try:
                await asyncio.to_thread(self._ray.connect, self._address)
                break
            except ClusterUnreachable as error:
                self._error = str(error)[:MAX_WORDS]
                self._has_tried.set()
                if failures == 1:
                    self._say(f"gateway: {error}. Trying again.")
                await asyncio.sleep(_pause_s(failures))
        self._after_connect()
        self._error = ""
        self._has_tried.set()
        self._is_connected.set()

    async def _look(self) -> None:
        self._num_begun += 1
        seen, self._error = await self._take_snapshot()
        if seen is not None and seen != self._seen:
            self._seen = seen
            self._report_soon.set()
        async with self._looks:
            self._num_looks += 1
            self._looks.notify_all()

    async def _take_snapshot(self) -> tuple[ClusterSnapshot | None, str]:
        """A new snapshot, or why there is none. One call at a time: one that hangs in Ray is waited for again."""
        if self._looking_task is None or self._looking_task.done():
            self._looking_task = asyncio.create_task(asyncio.to_thread(self._ray.snapshot))
        try:
            async with asyncio.timeout(_SNAPSHOT_S):
                return await asyncio.shield(self._looking_task), ""
        except TimeoutError:
            return None, f"no answer from the Ray head within {_SNAPSHOT_S:g} s"
        except ConnectionStale as error:
            _log.warning("gateway.reconnect", extra={"error": str(error)})
            return None, await self._reconnect(str(error))
        except ClusterUnreachable as error:
            return None, str(error)[:MAX_WORDS]

    async def _reconnect(self, reason: str) -> str:
        self._error = reason[:MAX_WORDS]
        self._is_connected.clear()
        try:
            async with asyncio.timeout(_RECONNECT_S):
                await asyncio.to_thread(self._ray.reconnect)
        except TimeoutError:
            raise RayHangs(f"Ray did not connect anew within {_RECONNECT_S:g} s") from None
        except ClusterUnreachable as error:
            return str(error)[:MAX_WORDS]
        self._after_connect()
        self._is_connected.set()
        self._look_soon.set()
        return "connected to Ray anew"

    async def _look_now(self) -> None:
        """Waits for a look that begins from now on."""
        wanted = self._num_begun + 1
        self._look_soon.set()
        async with self._looks:
            await self._looks.wait_for(lambda: self._num_looks >= wanted)

    # --- what it says

    async def _reporting(self) -> None:
        await _wait_for_event(
            self._has_tried, _FIRST_REPORT_S
        )  # it takes a place at once only if it says of which Ray cluster
        while True:
            await _wait_for_event(self._report_soon, _REPORT_S)
            self._report_soon.clear()
            life, report = self._life, self._make_report()
            receipt = await self._answer("reports", life, self._link.report(report))
            if receipt is not None:
                self._handle_receipt(life, report, receipt)
                await asyncio.sleep(_PACE_S)

    async def _answer(self, what: str, life: _Life, request: Coroutine[Any, Any, _T]) -> _T | None:
        """What the service answers. None if it does not now, or has another gateway for the cluster; then after a
        pause."""
        try:
            answer = await request
        except Unavailable as error:
            self._failures[what] += 1
            self._note_away(error)
            self._report_soon.set()
            await asyncio.sleep(max(error.after_s, _pause_s(self._failures[what])))
            return None
        except Superseded as error:
            await self._stand_by(life, str(error))
            return None
        self._failures[what] = 0
        return answer

    def _make_report(self, *, is_last: bool = False) -> ClusterReport:
        life = self._life
        life.reports += 1
        answers, num_chars = list[Answer](), 0
        for answer in life.outbox.values():
            # the first one is sent whatever its length, or it would never be
            if answers and (len(answers) == MAX_ANSWERS or num_chars + len(answer.value) > _MAX_ANSWER_CHARS):
                self._report_soon.set()
                break
            answers.append(answer)
            num_chars += len(answer.value)
        return ClusterReport(
            life=life.name,
            number=life.reports,
            takes_over=life.takes_over and not life.is_admitted,  # else it would take a place back that it has lost
            is_last=is_last,
            ray_cluster=self._ray.ray_cluster,
            replaces=self._replaces,
            address=self._ray.address or self._address,
            snapshot=self._seen if self._seen != life.sent else None,
            error=self._error,
            labels={} if life.is_admitted else self._labels,
            answers=tuple(answers),
            running=tuple(sorted(life.running)),
        )

    def _handle_receipt(self, life: _Life, report: ClusterReport, receipt: ReportReceipt) -> None:
        if self._is_away:
            self._is_away = False
            self._say("gateway: the service answers again")
        if life is not self._life:
            return
        if not life.is_admitted:
            life.is_admitted, self._stands_by = True, False
            self._is_admitted.set()
            if report.snapshot is None and life.sent is None:
                self._say(f"gateway: the service has this cluster; jobs can use it once Ray answers. {self._error}")
        if report.snapshot is not None:
            if life.sent is None:
                self._say("gateway: joined; jobs can use this cluster")
            life.sent = report.snapshot
        for answer in report.answers:
            life.outbox.pop(answer.number, None)
        for number in receipt.cancelled:
            if (task := life.running.get(number)) is not None:
                task.cancel()

    def _note_away(self, error: Unavailable) -> None:
        if not self._is_away:
            self._is_away = True
            self._say(f"gateway: {error.reason}. Trying again; what runs in this cluster goes on.")

    async def _stand_by(self, life: _Life, reason: str) -> None:
        """Waits while another gateway speaks for the cluster."""
        if life is self._life:
            self._begin_life(takes_over=False)
        if not self._stands_by:
            self._stands_by = True
            self._say(f"gateway: {reason}")
        await asyncio.sleep(_STAND_BY_S)

    def _begin_life(self, *, takes_over: bool) -> None:
        """Begins a new life. Orders of the last one are not answered any more."""
        for task in self._life.running.values():
            task.cancel()
        self._is_admitted.clear()
        self._life = _Life(takes_over=takes_over)

    async def _send_last_report(self) -> None:
        """Sends a last report, so that the next gateway need not wait."""
        if self._life.is_admitted:
            with suppress(DialError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._link.report(self._make_report(is_last=True))

    # --- what is ordered

    async def _ordering(self) -> None:
        life, after = self._life, 0
        while True:
            await self._is_admitted.wait()
            await self._is_connected.wait()
            if life is not self._life:
                life, after = self._life, 0
            page = await self._answer("orders", life, self._link.orders(life.name, after, _WAIT_S))
            if page is None:
                continue
            if page.newest < after:  # the database was restored, and numbers begin there again
                _log.warning("gateway.numbers_restart", extra={"known": after, "newest": page.newest})
                self._begin_life(takes_over=True)
                continue
            for order in page.items:
                after = max(after, order.number)
                self.take(order)
            await asyncio.sleep(_PACE_S)

    def take(self, order: Order) -> None:
        """Carries out an order, unless that was done or begun before. On the loop."""
        life = self._life
        if order.number in life.running or order.number in life.outbox:
            return
        if (known := life.done.get(order.number)) is not None:
            self._handle_answer(life, known)
        elif order.epoch < life.epoch:
            message = f"the order is of lease epoch {order.epoch}, and there was one of epoch {life.epoch}"
            self._handle_answer(life, Answer(number=order.number, failure=Failure.of(ClusterUnreachable(message))))
        else:
            life.epoch = order.epoch
            life.running[order.number] = asyncio.create_task(self._carry_out(life, order))

    async def _carry_out(self, life: _Life, order: Order) -> None:
        try:
            answer = await self._executor.answer(order)
        finally:
            life.running.pop(order.number, None)
        self._handle_answer(life, answer)

    def _handle_answer(self, life: _Life, answer: Answer) -> None:
        life.outbox[answer.number] = answer
        life.done.put(answer.number, answer)
        if life is self._life:
            self._report_soon.set()

    async def _archive(self, sha256: str) -> bytes:
        try:
            return await self._link.archive(sha256)
        except DialError as error:
            raise ClusterUnreachable(f"the gateway did not get the code archive {sha256}: {error}") from error


async def _wait_for_event(event: asyncio.Event, at_most_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await event.wait()


def _pause_s(failures: int) -> float:
    """Pause after this many failures in a row. A random part keeps gateways apart."""
    return backoff_s(failures, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S, spread=random.random())


_CONNECT_S = 5.0
_ANSWER_S = 10.0
_ARCHIVE_S = 120.0
_MARGIN_S = 10.0
_WHOLE = 200
_NOT_VERIFIED = "CERTIFICATE_VERIFY_FAILED"


class Link:
    """Requests to one service, for one cluster. Used on one event loop; close it after use."""

    def __init__(self, url: str, token: str, cluster: str, verify: ssl.SSLContext | bool = True) -> None:
        self._base = f"/v1/clusters/{cluster}"
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {token}"},
            follow_redirects=False,
            trust_env=False,
            verify=verify,
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=8),
        )

    async def report(self, report: ClusterReport) -> ReportReceipt:
        """Sends a report. Raises DialError."""
        headers = {"Content-Type": "application/json"}
        answer = await self._ask("POST", "/reports", content=report.model_dump_json().encode(), headers=headers)
        return ReportReceipt.model_validate_json(answer.content)

    async def orders(self, life: str, after: int, wait_s: float) -> OrderPage:
        """Waits up to `wait_s` for an order above `after`. Raises DialError."""
        query: dict[str, str | int | float] = {"life": life, "after": after, "wait_s": wait_s}
        timeout = httpx.Timeout(wait_s + _MARGIN_S, connect=_CONNECT_S)
        answer = await self._ask("GET", "/orders", params=query, timeout=timeout)
        return OrderPage.model_validate_json(answer.content)

    async def archive(self, sha256: str) -> bytes:
        """Reads a code archive from the service; goes on where a connection broke. Raises DialError."""
        timeout, data, begun = httpx.Timeout(_ARCHIVE_S, connect=_CONNECT_S), bytearray(), -1
        while True:
            try:
                headers = {"Range": f"bytes={len(data)}-"}
                path = f"{self._base}/archives/{sha256}"
                async with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
                    if answer.status_code >= 300:
                        await answer.aread()
                        raise _make_refusal(answer)
                    del data[0 if answer.status_code == _WHOLE else len(data) :]
                    begun = len(data)
                    async for piece in answer.aiter_bytes():
                        data += piece
                break
            except (httpx.HTTPError, ssl.SSLError) as error:
                if len(data) <= begun:  # nothing has come since the last break
                    cause = error or type(error).__name__
                    raise Unavailable(f"no answer from {self._http.base_url}: {cause}") from error
                begun = len(data)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Unavailable(f"the code archive {sha256} has arrived damaged")
        return bytes(data)

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, self._base + path, **request)
        except (httpx.HTTPError, ssl.SSLError) as error:
            message = str(error) or type(error).__name__
            if _NOT_VERIFIED in message:
                message = f"the certificate of the service cannot be verified ({message}): see `shoal join --ca-file`"
            raise Unavailable(f"no answer from {self._http.base_url}: {message}") from error
        if answer.status_code < 300:
            return answer
        raise _make_refusal(answer)


def _make_refusal(answer: httpx.Response) -> DialError:
    return make_error(answer.status_code, _read_detail(answer), answer.headers.get("Retry-After", ""))


def _read_detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.request.url.copy_with(query=None)} has answered {answer.status_code}: is this a Shoal service?"


_THREADS = 32
_KEPT_S = 30.0
"""An archive that was read is kept this long for orders that come again."""
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

    def disconnect(self) -> None:
        """Leave the cluster. The connection is not used any more."""

    def snapshot(self) -> ClusterSnapshot:
        """The cluster as it is now. Raises ConnectionStale: call `reconnect`."""

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` when a node has come or gone, from any thread. Return a function that ends this."""

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
            self._tasks[sha256] = asyncio.create_task(self._fetch_in_turn(sha256))
            self._tasks[sha256].add_done_callback(lambda task: self._forget_later(sha256, task))
        return await asyncio.shield(self._tasks[sha256])

    async def _fetch_in_turn(self, sha256: str) -> bytes:
        async with self._turn:
            return await self._read(sha256)

    def _forget_later(self, sha256: str, task: asyncio.Task[bytes]) -> None:
        kept_s = 0.0 if task.cancelled() or task.exception() else _KEPT_S
        task.get_loop().call_later(kept_s, self._tasks.pop, sha256, None)


class OrderExecutor:
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
            return Answer(
                number=order.number, value=to_json(value, inf_nan_mode="constants", serialize_unknown=True).decode()
            )
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
        value = await (call() if inspect.iscoroutinefunction(method) else self._call_in_thread(call))
        return value[:MAX_WORDS] if isinstance(value, str) else value

    async def _upload_code(self, job_id: str, attempt: int, sha256: str) -> str:
        if uri := await self._call_in_thread(lambda: self._ray.hold_code(job_id, attempt, sha256)):
            return uri
        archive = await self._downloads.archive(sha256)
        return await self._call_in_thread(lambda: self._ray.upload_code(job_id, attempt, archive))

    async def _call_in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
