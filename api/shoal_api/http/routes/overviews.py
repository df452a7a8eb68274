"""Routes behind the pages: the overview of all jobs, the overview of one, and the versions of its spec."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import needs, visible_projects
from shoal_api.http.context import Context, JobId, wants_events
from shoal_api.http.documents import (
    ARCHIVED_JOBS,
    COLUMN_FORMS,
    LABEL_FORMS,
    SEARCH_WORDS,
    SORT_FORMS,
    WHERE_FORMS,
    selection_of,
    selectors_of,
)
from shoal_api.http.followers import POSITION, FleetFollower, OverviewCache, OverviewFollower, Position
from shoal_api.http.routes.nodes import nodes_of
from shoal_api.http.routes.operated_clusters import clusters_of
from shoal_api.http.routes.quotas import PROJECT_NAME
from shoal_api.http.streams import STREAMED, sse_response
from shoal_service.control.spec_io import encode
from shoal_service.core.access import Permission
from shoal_service.core.selection import MAX_SELECTORS
from shoal_service.fleet_views import FleetNode, FleetOverview, FleetTimeline
from shoal_service.store import histories, job_lists, timeline
from shoal_service.store.job_lists import FleetQuery, JobOrder
from shoal_service.views import JobOverview, Page, SpecVersion
from shoal_workers.contract.job import JobState
from shoal_workers.contract.placing import CLUSTER_PATTERN

_REFRESH_S = 1.0


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["overviews"])
    store = context.store
    cache = OverviewCache(store)

    @router.get(
        "/overview",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=FleetOverview,
        summary="Everything about all jobs",
        responses=STREAMED,
    )
    async def fleet_overview(
        request: Request,
        search: Annotated[str, Query(max_length=200, description=SEARCH_WORDS)] = "",
        state: Annotated[list[JobState], Query(max_length=20, description="Only jobs in one of these states.")] = [],  # noqa: B006
        project: Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only jobs of this project.")] = None,
        label: Annotated[list[str], Query(max_length=MAX_SELECTORS, description=LABEL_FORMS)] = [],  # noqa: B006
        cluster: Annotated[
            str | None, Query(pattern=CLUSTER_PATTERN, description="Only jobs whose newest attempt has begun there.")
        ] = None,
        where: Annotated[str, Query(max_length=2000, description=WHERE_FORMS)] = "",
        sort: Annotated[str, Query(max_length=500, description=SORT_FORMS)] = "",
        columns: Annotated[str, Query(max_length=4000, description=COLUMN_FORMS)] = "",
        archived: Annotated[bool, Query(description=ARCHIVED_JOBS)] = False,
        job: Annotated[list[str], Query(max_length=100, description="Only the jobs with these ids.")] = [],  # noqa: B006
        order: Annotated[
            JobOrder, Query(description="Used if `sort` names nothing. Jobs without the value come last.")
        ] = JobOrder.CREATED,
        descending: Annotated[bool, Query(description="The largest, or newest, first.")] = True,
        offset: Annotated[int, Query(ge=0, le=10_000_000, description="Jobs to leave out.")] = 0,
        limit: Annotated[int, Query(ge=1, le=200, description="Jobs in the answer.")] = 50,
        jobs_only: Annotated[
            bool,
            Query(
                description="Only `items`, without small curves, for a search: `total` is their number, and nothing is "
                "counted or summed over other jobs."
            ),
        ] = False,
    ) -> Response:
        """Returns a page of jobs with their progress and small curves, jobs by state, goodput of the cluster, and what
        runs on each node. With `Accept: text/event-stream`: now and after every change, as events `fleet`."""
        query = FleetQuery(
            search=search,
            states=frozenset(state),
            project=project,
            visible=visible_projects(request),
            labels=selectors_of(label),
            cluster=cluster,
            ids=frozenset(job),
            selection=selection_of(where, sort, columns, archived=archived or bool(job), now=context.clock()),
            order=order,
            descending=descending,
            offset=offset,
            limit=limit,
        )
        read = partial(_jobs_only if jobs_only else _fleet, context, query)
        if wants_events(request):
            follower = FleetFollower(lambda: read().model_dump_json())
            return sse_response(context.changes, None, follower, context.pace, min_gap_s=_REFRESH_S)
        found = await run_in_threadpool(read)
        return Response(found.model_dump_json(), media_type="application/json")

    @router.get(
        "/timeline",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=FleetTimeline,
        summary="Which job had how many workers when, and why",
    )
    async def fleet_timeline(
        request: Request,
        hours: Annotated[float, Query(gt=0, le=720, description="Length of the window, which ends now.")] = 24.0,
    ) -> Response:
        """Returns the workers of the newest jobs over time, the decisions of the scheduler with their reasons, and the
        worker-seconds by project and category."""
        until = context.clock()
        read = partial(store.reading(timeline.read), since=until - hours * 3600, until=until)
        found = await run_in_threadpool(read, visible=visible_projects(request))
        return Response(found.model_dump_json(), media_type="application/json")

    @router.get(
        "/jobs/{job_id}/overview",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=JobOverview,
        summary="Everything about a job",
        responses=STREAMED,
    )
    async def job_overview(
        request: Request,
        job_id: JobId,
        logs: Annotated[bool, Query(description="The stream also has the lines of the job's log.")] = False,
        last_event_id: Annotated[
            str | None,
            Header(alias="Last-Event-ID", pattern=POSITION, description="The last id that the client has received."),
        ] = None,
    ) -> Response:
        """Returns job, series, accounts over time, incidents, workers, events and checkpoints. The series has at most
        500 points. With `Accept: text/event-stream`: the parts as events of their names, first all of them, then those
        that change; after `Last-Event-ID` only what is new."""
        if wants_events(request):
            await run_in_threadpool(store.get_job, job_id)
            position = Position.parse(last_event_id) if last_event_id else Position()
            follower = OverviewFollower(cache, job_id, position, logs=logs)
            return sse_response(context.changes, job_id, follower, context.pace, min_gap_s=context.pace.refresh_s)
        found = await run_in_threadpool(store.reading(histories.overview), job_id)
        return Response(found.model_dump_json(), media_type="application/json")

    @router.get(
        "/jobs/{job_id}/specs",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[SpecVersion],
        summary="The versions of a job's spec",
    )
    async def spec_versions(job_id: JobId) -> Response:
        """Lists the versions, oldest first, with the time of acceptance."""
        found = await run_in_threadpool(store.reading(histories.spec_versions), job_id)
        page = Page(items=tuple(one.model_copy(update={"yaml": encode(one.spec)}) for one in found))
        return Response(page.model_dump_json(), media_type="application/json")

    return router


def _jobs_only(context: Context, query: FleetQuery) -> FleetOverview:
    found = context.store.reading(job_lists.plain_fleet_page)(query)
    return FleetOverview.model_construct(
        items=tuple(found.values()),
        total=len(found),
        num_by_state={},
        goodput=(),
        goodput_now=None,
        nodes=(),
        clusters=(),
        connected=context.cluster.snapshot().connected,
        exposure=context.exposure,
    )


def _fleet(context: Context, query: FleetQuery) -> FleetOverview:
    with context.store.read() as tx:
        items, total = job_lists.fleet(tx, query)
        num_by_state, goodput, goodput_now = job_lists.fleet_accounts(tx, query.visible)
        on_node = job_lists.jobs_by_node(tx, query.visible)
    nodes = tuple(
        FleetNode.model_construct(**dict(node), jobs=on_node.get(node.node_id, ())) for node in nodes_of(context)
    )
    return FleetOverview.model_construct(
        items=items,
        total=total,
        num_by_state=num_by_state,
        goodput=goodput,
        goodput_now=goodput_now,
        nodes=nodes,
        clusters=clusters_of(context),
        connected=context.cluster.snapshot().connected,
        exposure=context.exposure,
    )
