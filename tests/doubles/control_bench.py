"""ControlBench: the control loop with a real store, a fake cluster and a fake clock."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from doubles.event_loop import settle
from doubles.fake_clock import FakeClock
from doubles.fake_cluster import FakeCluster
from doubles.fake_clusters import FakeClusters
from shoal_service.control.config import ControlConfig
from shoal_service.control.control_loop import ControlLoop
from shoal_service.control.supervisor_reports import SupervisorEndpoint
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import Policy
from shoal_service.store import submissions
from shoal_service.store.store import Store
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState

SPEC: dict[str, Any] = {
    "data": {"corpus": "python-stdlib"},
    "stop": {"steps": 4},
    "elasticity": {"min_workers": 1, "max_workers": 2},
}


def node(name: str = "n1", *, cpus: float = 2.0, alive: bool = True) -> Node:
    return Node(node_id=name, ip="10.0.0.1", alive=alive, cpus=cpus, gpus=0.0, memory_gib=8.0)


class ControlBench:
    def __init__(
        self,
        store: Store,
        *nodes: Node,
        owner: str = "me",
        policy: Policy = decide,
        scale_out: bool = False,
        others: Mapping[str, Sequence[Node]] | None = None,
    ) -> None:
        """`nodes`: of the cluster `default`, the service's own; `others`: by name of another cluster."""
        self.store = store
        self.clock = FakeClock()
        self._endpoint = SupervisorEndpoint(store, self.clock)
        self.cluster = self.make_cluster(*(nodes or (node(),)))
        self.clusters = FakeClusters.single(self.cluster)
        for name, theirs in (others or {}).items():
            self.clusters.join(name, self.make_cluster(*theirs))
        config = ControlConfig(owner=owner, lease_ttl_s=9.0, checkpoint_url="/checkpoints", scale_out=scale_out)
        self.loop = ControlLoop(store, self.clusters, self.clock, config, policy=policy)

    def make_cluster(self, *nodes: Node) -> FakeCluster:
        return FakeCluster(nodes, endpoint=self._endpoint, clock=self.clock)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """After the first pass."""
        stop = asyncio.Event()
        task = asyncio.create_task(self.loop.run(stop))
        await settle()
        yield
        stop.set()
        await self.clock.advance(5.0)
        await task

    def submit(self, **spec: Any) -> str:
        document = parse_spec({**SPEC, **spec})
        return self.store.writing(submissions.create)(document, idempotency_key=None, now=self.clock.time())[0].id

    def state(self, job_id: str) -> JobState:
        return self.store.get_job(job_id).status.state
