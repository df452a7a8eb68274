"""The objects that routes use. `create_app` makes a `Context` and passes it to each route; there is no global state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from shoal_api.http.access.authentication import Authenticator
from shoal_api.http.changes import Changes
from shoal_api.http.followers import OverviewReader
from shoal_api.http.streams import DEFAULT_PACE, Pace
from shoal_service.control.job_storage import JobStorage, Verifications
from shoal_service.control.planning import PlanningProcesses
from shoal_service.control.retention import RetentionCollector
from shoal_service.control.submission import SubmitContext
from shoal_service.control.supervisor_reports import SupervisorEndpoint
from shoal_service.core.webhooks import UNRESTRICTED, WebhookRules
from shoal_service.fleet_views import ClusterView, StartForecast
from shoal_service.planner import HardwareProfile
from shoal_service.planner.gpus import PROFILES
from shoal_service.store import Store
from shoal_service.store.many_curves import CurveCache
from shoal_service.views import JobView
from shoal_workers.contract import JobSpec, Stacks
from shoal_workers.contract.checks.places import EVERYWHERE, AllowedPlaces


class ClusterSource(Protocol):
    """The API's view of the cluster."""

    def snapshot(self) -> ClusterView:
        """Called on worker threads; it must answer from memory and never raise."""
        ...

    def expected_start(self, spec: JobSpec) -> StartForecast | None:
        """See `ControlLoop.expected_start`. Called on worker threads."""
        ...

    async def stacks(self, job_id: str, *, rank: int | None = None, native: bool = False) -> Stacks | None:
        """See `ControlLoop.stacks`. Called on the event loop."""
        ...

    async def why_not_in(self, job: JobView, cluster: str) -> str:
        """Say why the job cannot run in that cluster, with the way out and without a full stop; empty if it can. Called
        on the event loop. Raises ClusterNotFound."""
        ...


@dataclass(frozen=True)
class Context:
    """The objects that routes use."""

    store: Store
    cluster: ClusterSource
    scrape: Callable[..., tuple[bytes, str]]
    """Makes the metrics: the header `Accept`, and the projects if not all -> body and media type. Called on worker
    threads."""
    version: str
    storage: JobStorage
    """Storage of the jobs, for their profiles and checkpoints."""
    retention: RetentionCollector
    planning: PlanningProcesses
    authenticator: Authenticator
    supervisor_endpoint: SupervisorEndpoint
    """Takes the reports of supervisors, and has their directives."""
    session_s: float = 12 * 3600.0
    """Lifetime of a session of the web page, in seconds."""
    pace: Pace = DEFAULT_PACE
    profiles: Mapping[str, HardwareProfile] = field(default_factory=lambda: PROFILES)
    """The hardware that the planner knows, by name."""
    warnings: Callable[[], tuple[str, ...]] = tuple
    """Returns the problems of a service that is ready all the same. Called on worker threads; it must answer from
    memory."""
    exposure: str = ""
    """A warning about what job code can read of the service; empty if it can read nothing."""
    grafana_url: str = ""
    places: AllowedPlaces = EVERYWHERE
    """What the paths and URLs of a spec may name."""
    webhooks: WebhookRules = UNRESTRICTED
    """What the webhooks of a spec may do."""
    clock: Callable[[], float] = time.time
    changes: Changes = field(default_factory=Changes)
    verifications: Verifications = field(default_factory=Verifications)
    curves: CurveCache = field(default_factory=CurveCache)

    @cached_property
    def overviews(self) -> OverviewReader:
        return OverviewReader(self.store)

    def submit_context(self, note: str) -> SubmitContext:
        """Return what is known now about where a submitted job will run; `note` begins the note of its status."""
        nodes = self.cluster.snapshot().nodes
        profiles = tuple(self.profiles.values())
        return SubmitContext(profiles=profiles, nodes=nodes, note=note, places=self.places, webhooks=self.webhooks)
