"""Exposition: the answer of /metrics, made at the time of the scrape from one snapshot of the store and from memory.

The snapshot is kept for a second, so that several scrapers cost one read. If the store does not answer, the scrape
fails (Prometheus shows `up 0`); old numbers are never shown as new ones. Nothing here asks Ray: the cluster is shown
as the control loop saw it last. Called by the HTTP edge, on worker threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from shoal_service.collector import paused_collector
from shoal_service.fleet_views import ClusterView
from shoal_service.store import Store, metrics_snapshot
from shoal_service.store.backup import newest_backup_at
from shoal_service.store.driving import MoveKind
from shoal_service.store.metrics_snapshot import Snapshot
from shoal_service.store.reporting import DropReason
from shoal_service.telemetry.families import Family, Scene, families, project_families
from shoal_service.telemetry.job_series import JobSeries, ProfileOf
from shoal_service.telemetry.metric import Labels, Value
from shoal_service.telemetry.tallies import PassTimes, RemovalTallies, RequestMetrics, WebhookTallies
from shoal_service.telemetry.text_format import OPENMETRICS, Exemplars, family, media_type_of

_CACHE_S = 1.0
_END = b"# EOF\n"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the numbers come from."""

    store: Store
    owner: str
    """Name under which this control plane takes the lease."""
    requests: RequestMetrics
    passes: PassTimes
    cluster: Callable[[], ClusterView]
    """Answers from memory."""
    profile_of: ProfileOf
    state_dir: Path
    webhooks: WebhookTallies = field(default_factory=WebhookTallies)
    removals: RemovalTallies = field(default_factory=RemovalTallies)


class Exposition:
    """Thread-safe."""

    def __init__(
        self,
        sources: Sources,
        *,
        clock: Callable[[], float] = time.time,
        clock_mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._clock_mono = clock_mono
        self._jobs = JobSeries(sources.profile_of)
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._lock = threading.Lock()
        self._cached: Snapshot | None = None
        self._cached_mono = 0.0
        self._live = metrics_snapshot.LiveJobs()
        self._rendered: dict[tuple[str, bool], tuple[Mapping[Labels, Value], Exemplars, str]] = {}

    def render(self, accept: str, projects: Collection[str] | None = None) -> tuple[bytes, str]:
        """Returns the body and its media type: OpenMetrics if the scraper's `Accept` prefers that.

        Args:
            projects: only the metrics of these projects and of their jobs are shown; None: all metrics.

        Raises:
            StoreUnavailable
        """
        with paused_collector():
            return self._render(accept, projects)

    def _render(self, accept: str, projects: Collection[str] | None) -> tuple[bytes, str]:
        media_type = media_type_of(accept)
        openmetrics = media_type == OPENMETRICS
        snapshot = self._snapshot()
        if projects is not None:
            body = self._of_projects(snapshot, frozenset(projects), openmetrics=openmetrics)
            return (body + _END if openmetrics else body), media_type
        tallies = self._sources.store.tallies
        scene = Scene(
            snapshot=snapshot,
            owner=self._sources.owner,
            now=self._clock(),
            dropped=tallies.counted(DropReason),
            moves=tallies.counted(MoveKind),
            exemplars=tallies.exemplars(),
            transactions=tallies,
            requests=self._sources.requests,
            passes=self._sources.passes,
            webhooks=self._sources.webhooks,
            removals=self._sources.removals,
            cluster=self._sources.cluster(),
            state_filesystem=_space(self._sources.state_dir),
            backed_up_at=newest_backup_at(self._sources.state_dir),
        )
        parts = [self._jobs.text(snapshot.live, openmetrics=openmetrics)]
        parts += [self._text(one, openmetrics) for one in families(scene)]
        encode: Callable[[CollectorRegistry], bytes] = generate_openmetrics if openmetrics else generate_latest
        of_process = encode(self._process)
        body = "".join(parts).encode() + of_process.removesuffix(_END)  # it ends the whole body, and no part of it
        return (body + _END if openmetrics else body), media_type

    def _of_projects(self, snapshot: Snapshot, projects: frozenset[str], *, openmetrics: bool) -> bytes:
        """Renders everything anew, because the lines that are kept are for users who see all projects."""
        live = [job for job in snapshot.live if job.spec.project in projects]
        parts = [JobSeries(self._sources.profile_of).text(live, openmetrics=openmetrics)]
        for one in project_families(snapshot, self._clock()):
            rows = {labels: value for labels, value in one.rows.items() if labels[0] in projects}
            parts.append(family(one.metric, rows, openmetrics=openmetrics, exemplars={}))
        return "".join(parts).encode()

    def _text(self, one: Family, openmetrics: bool) -> str:
        """The lines of a family. They are kept, because most families do not change between two scrapes."""
        key = (one.metric.name, openmetrics)
        known = self._rendered.get(key)
        if known is not None and known[0] == one.rows and known[1] == one.exemplars:
            return known[2]
        text = family(one.metric, one.rows, openmetrics=openmetrics, exemplars=one.exemplars)
        self._rendered[key] = one.rows, one.exemplars, text
        return text

    def _snapshot(self) -> Snapshot:
        with self._lock:  # scrapes at the same time wait for one read
            now = self._clock_mono()
            if self._cached is None or now - self._cached_mono > _CACHE_S:
                with self._sources.store.read() as tx:
                    self._cached = metrics_snapshot.read(tx, self._live, now=self._clock())
                self._cached_mono = now
            return self._cached


def _space(path: Path) -> tuple[int, int]:
    """Size and free space of a filesystem, bytes."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
