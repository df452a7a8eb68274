"""Routes of the gateways of clusters, which dial in: reports, orders, code archives.

Each control plane answers, with the lease or without: all that is said here is in the store. Those of operators are in
`operated_clusters.py`.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import needs, unaudited
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_body, require_media_type
from shoal_api.http.edge import OPEN_ENDED, POLL
from shoal_api.http.long_poll import until_gone
from shoal_api.http.openapi import body_of
from shoal_api.http.problems import Kind, ProblemError
from shoal_service.clusters.snapshot import ClusterSnapshot
from shoal_service.clusters.wire import MAX_ORDERS, ClusterReport, Order, OrderPage, ReportReceipt
from shoal_service.core.access import Permission
from shoal_service.core.gateways import Incoming
from shoal_service.home import MAX_WAIT_S
from shoal_service.store import archives, cluster_links
from shoal_service.store.cluster_links import StoredReport, orders_of
from shoal_service.telemetry.tallies import Limit
from shoal_workers.contract.placing import CLUSTER_PATTERN

_RANGE = re.compile(r"bytes=(\d{1,12})-", re.ASCII)
_REREAD_S = 0.25
"""Seconds until this server sees what other control planes have written, at the latest."""
_SNAPSHOT: TypeAdapter[ClusterSnapshot] = TypeAdapter(ClusterSnapshot)
ClusterName = Annotated[str, Path(pattern=CLUSTER_PATTERN, description="The name under which the cluster joins.")]
Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="Hexadecimal SHA-256 of the archive.")]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/clusters", tags=["clusters"])
    store = context.store

    @router.post(
        "/{cluster}/reports",
        dependencies=[needs(Permission.CLUSTER_SERVE), unaudited()],
        response_model=ReportReceipt,
        summary="Report a cluster",
        openapi_extra=body_of("ClusterReport", JSON_TYPES),
    )
    async def report(request: Request, cluster: ClusterName) -> Response:
        """The gateway sends a report once a second, and when something has changed: the cluster, and answers to orders.
        A report that is repeated, by life and number, changes nothing."""
        require_media_type(request, JSON_TYPES)
        body = await read_body(request, Limit.ARCHIVE_BYTES)
        token_id = principal_of(request).token_id

        def take() -> ReportReceipt:
            given = _parsed(body)
            stored = StoredReport(
                sender=Incoming(
                    given.life, token_id, given.number, given.takes_over, given.ray_cluster, given.replaces
                ),
                address=given.address,
                error=given.error,
                snapshot=None if given.snapshot is None else _SNAPSHOT.dump_json(given.snapshot).decode(),
                answers=[(answer.number, answer.model_dump_json()) for answer in given.answers],
                running=given.running,
                labels=given.labels,
                is_last=given.is_last,
            )
            with store.write() as tx:
                number, cancelled = cluster_links.take_report(tx, cluster, stored, now=context.clock())
            return ReportReceipt(number=number, cancelled=cancelled)

        receipt = await run_in_threadpool(take)
        return Response(receipt.model_dump_json(), media_type="application/json")

    @router.get(
        "/{cluster}/orders",
        dependencies=[needs(Permission.CLUSTER_SERVE)],
        response_model=OrderPage,
        summary="Read the orders to a cluster",
    )
    async def orders(
        request: Request,
        cluster: ClusterName,
        life: Annotated[str, Query(pattern=r"^[0-9a-f]{16}$", description="Of the gateway, as in its reports.")],
        after: Annotated[int, Query(ge=0, le=2**53, description="Only orders with a higher number.")] = 0,
        wait_s: Annotated[
            float, Query(ge=0, le=MAX_WAIT_S, description="How long to wait for an order if there is none.")
        ] = 0.0,
    ) -> Response:
        """Returns the orders without an answer, by number."""
        page = await _poll(context, request, _Asked(cluster, life, after), wait_s)
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/{cluster}/archives/{sha256}",
        dependencies=[needs(Permission.CLUSTER_SERVE)],
        response_class=Response,
        responses={200: {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}},
        summary="Read a code archive that an order names",
    )
    async def archive(request: Request, cluster: ClusterName, sha256: Sha256) -> Response:
        """Returns the archive while the order that names it has no answer. With `Range: bytes=N-` only what comes from
        there on, so that a gateway goes on where its connection broke."""
        data = None
        if await run_in_threadpool(store.reading(cluster_links.may_read_archive), cluster, sha256):
            data = await run_in_threadpool(store.reading(archives.get), sha256)
        if data is None:
            raise ProblemError(Kind.NOT_FOUND, "No open order to this cluster names this archive.")
        start = _RANGE.fullmatch(request.headers.get("range", ""))
        begin = int(start[1]) if start is not None else 0
        if not 0 < begin < len(data):
            return Response(data, media_type="application/zip")
        headers = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
        return Response(data[begin:], status_code=206, headers=headers, media_type="application/zip")

    return router


def _parsed(body: bytes) -> ClusterReport:
    try:
        return ClusterReport.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ProblemError(Kind.INVALID_REQUEST, f"The report is not valid: {where}: {first['msg']}") from None


class _Asked:
    def __init__(self, cluster: str, life: str, after: int) -> None:
        self.cluster = cluster
        self.life = life
        self.after = after


async def _poll(context: Context, request: Request, asked: _Asked, wait_s: float) -> OrderPage:
    """Wait up to `wait_s` seconds for the first order. Raises GatewayRefused."""
    loop = asyncio.get_running_loop()
    deadline_mono = loop.time() + wait_s
    if wait_s:
        request.scope[OPEN_ENDED] = POLL
    topic = orders_of(asked.cluster)
    gone = loop.create_task(until_gone(request)) if wait_s else None
    with context.changes.waiting() as watch:
        if gone is not None:
            gone.add_done_callback(lambda _: watch.wake())
        with context.store.subscribe(lambda _: loop.call_soon_threadsafe(watch.wake), topic):
            try:
                while True:
                    watch.arm()
                    page = await run_in_threadpool(_read, context, asked)
                    left_s = deadline_mono - loop.time()
                    begins_again = page.newest < asked.after  # the gateway learns it at once: it begins a new life
                    if page.items or begins_again or left_s <= 0 or context.changes.closing:
                        return page
                    if gone is None or gone.done():
                        return page
                    await watch.wait(min(left_s, _REREAD_S))
            finally:
                if gone is not None:
                    gone.cancel()


def _read(context: Context, asked: _Asked) -> OrderPage:
    with context.store.read() as tx:
        rows, newest = cluster_links.open_orders(tx, asked.cluster, asked.life, after=asked.after, limit=MAX_ORDERS)
    items = tuple(Order(number=row.number, epoch=row.epoch, kind=row.kind, arguments=row.arguments) for row in rows)
    return OrderPage(items=items, newest=newest)
