"""Serve the gateways of clusters, which call this API: take their reports, return orders and code archives.

Every control plane answers, with the lease or without, because all data are in the store. Routes for operators are in
`operations.py`.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Annotated

from fastapi import Path, Query, Request
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import Needs
from shoal_api.http.changes import NO_JOB
from shoal_api.http.json_router import AppContext, Caller, ClusterName, JsonRouter, Reading
from shoal_api.http.problems import InvalidRequest
from shoal_api.http.request_bodies import JSON_TYPES, JsonBody, read_body, require_media_type
from shoal_api.http.streams import poll
from shoal_service.clusters.wire import MAX_ORDERS, ClusterReport, ClusterSnapshot, Order, OrderPage, ReportReceipt
from shoal_service.core.access import Permission
from shoal_service.core.gateways import Incoming
from shoal_service.home import MAX_WAIT_S
from shoal_service.store import GatewayRefused, NotFound, Topic, Transaction, archives, cluster_links
from shoal_service.store.cluster_links import StoredReport
from shoal_service.telemetry.tallies import Limit
from shoal_workers.contract.plain_text import first_problem

_RANGE = re.compile(r"bytes=(\d{1,12})-", re.ASCII)
_REREAD_S = 0.25
"""Pause between two reads of the orders that other control planes may have written."""
_SNAPSHOT: TypeAdapter[ClusterSnapshot] = TypeAdapter(ClusterSnapshot)
Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="Hexadecimal SHA-256 of the archive.")]
_REPORT = JsonBody(ClusterReport, {"life": "00112233445566aa", "number": 1, "error": "Ray does not answer yet"})

router = JsonRouter("/v1/clusters", "clusters")


@router.route(
    "POST /{cluster}/reports",
    Needs(Permission.CLUSTER_SERVE, is_audited=False),
    "Report a cluster",
    body=_REPORT,
    raises=[GatewayRefused],
)
async def report(request: Request, context: AppContext, caller: Caller, cluster: ClusterName) -> ReportReceipt:
    """Stores the state of the cluster and answers to orders. The gateway sends a report once a second, and at once
    after a change. A report that was stored before changes nothing."""
    require_media_type(request, JSON_TYPES)
    text = await read_body(request, Limit.ARCHIVE_BYTES)

    def store_report() -> ReportReceipt:
        stored = _parse_report(text, caller.token_id)
        number, cancelled = context.store.writing(cluster_links.take_report)(cluster, stored, now=context.clock())
        return ReportReceipt(number=number, cancelled=cancelled)

    return await run_in_threadpool(store_report)


@router.route(
    "GET /{cluster}/orders",
    Permission.CLUSTER_SERVE,
    "Read the orders to a cluster",
    raises=[GatewayRefused],
)
async def orders(
    request: Request,
    context: AppContext,
    cluster: ClusterName,
    life: Annotated[str, Query(pattern=r"^[0-9a-f]{16}$", description="Of the gateway, as in its reports.")],
    after: Annotated[int, Query(ge=0, le=2**53, description="Only orders with a higher number.")] = 0,
    wait_s: Annotated[
        float, Query(ge=0, le=MAX_WAIT_S, description="How long to wait for an order if there is none.")
    ] = 0.0,
) -> OrderPage:
    """Returns the orders without an answer, by number."""
    read_page = partial(context.store.reading(_read_orders), cluster, life, after)
    wake_soon = asyncio.get_running_loop().call_soon_threadsafe

    def is_answer(page: OrderPage) -> bool:
        return bool(page.items) or page.newest < after  # less after a restored database; the gateway must know it

    with (
        context.changes.watching(NO_JOB) as watch,
        context.store.subscribe(lambda _: wake_soon(watch.set), Topic.ORDERS.narrow_to(cluster)),
    ):
        return await poll(
            context.changes, watch, request, read_page, is_answer=is_answer, wait_s=wait_s, reread_s=_REREAD_S
        )


@router.route(
    "GET /{cluster}/archives/{sha256}",
    Permission.CLUSTER_SERVE,
    "Read a code archive that an order names",
    responses={200: {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}},
    raises=[NotFound],
)
def archive(request: Request, tx: Reading, cluster: ClusterName, sha256: Sha256) -> Response:
    """Returns the archive while the order that names it has no answer. With `Range: bytes=N-` it returns the rest from
    byte N, so that a gateway continues where its connection broke."""
    data = archives.get(tx, sha256) if cluster_links.may_read_archive(tx, cluster, sha256) else None
    if data is None:
        raise NotFound("No open order to this cluster names this archive.")
    byte_range = _RANGE.fullmatch(request.headers.get("range", ""))
    start = int(byte_range[1]) if byte_range is not None else 0
    if start == 0 or start >= len(data):
        return Response(data, media_type="application/zip")
    headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
    return Response(data[start:], status_code=206, headers=headers, media_type="application/zip")


def _parse_report(text: bytes, token_id: str) -> StoredReport:
    try:
        document = ClusterReport.model_validate_json(text)
    except ValidationError as error:
        raise InvalidRequest(f"The report is not valid: {first_problem(error)}") from None
    return StoredReport(
        sender=Incoming(
            document.life, token_id, document.number, document.takes_over, document.ray_cluster, document.replaces
        ),
        address=document.address,
        error=document.error,
        snapshot=None if document.snapshot is None else _SNAPSHOT.dump_json(document.snapshot).decode(),
        answers=[(answer.number, answer.model_dump_json()) for answer in document.answers],
        running=document.running,
        labels=document.labels,
        is_last=document.is_last,
    )


def _read_orders(tx: Transaction, cluster: str, life: str, after: int) -> OrderPage:
    rows, newest = cluster_links.read_open_orders(tx, cluster, life, after=after, limit=MAX_ORDERS)
    items = tuple(Order(**row._mapping) for row in rows)
    return OrderPage(items=items, newest=newest)
