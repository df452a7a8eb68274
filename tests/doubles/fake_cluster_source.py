"""FakeClusterSource: the cluster as the API shows it; it changes only when a test changes it."""

from shoal_service.fleet_views import ClusterSummary, ClusterView, NodeView, StartForecast
from shoal_service.store.errors import ClusterNotFound
from shoal_service.views import JobView
from shoal_workers.contract.messages import Stacks
from shoal_workers.contract.spec import JobSpec


class FakeClusterSource:
    """A `shoal_api.http.context.ClusterSource`."""

    def __init__(self, *nodes: NodeView, owner: str = "me") -> None:
        self.view = ClusterView(
            connected=True,
            address="127.0.0.1:6379",
            clusters=(ClusterSummary(name="default", connected=True, silent_s=0.5, cpus_total=4.0, cpus_free=1.0),),
            nodes=tuple(node.model_copy(update={"cluster": node.cluster or "default"}) for node in nodes),
            cpus_total=4.0,
            cpus_free=1.0,
            gpus_total=0.0,
            gpus_free=0.0,
            owner=owner,
            epoch=1,
        )

        self.taken: dict[str, Stacks] = {}
        """By job: the answers of `stacks`."""

        self.why_not: dict[str, str] = {}
        """By cluster: the answers of `why_not_in`."""

        self.start: StartForecast | None = None
        """The answer of `expected_start`."""

    def expected_start(self, spec: JobSpec) -> StartForecast | None:
        return self.start

    async def stacks(self, job_id: str, *, rank: int | None = None, native: bool = False) -> Stacks | None:
        found = self.taken.get(job_id)
        if found is None or rank is None:
            return found
        return found.model_copy(update={"clusters": tuple(one for one in found.clusters if rank in one.ranks)})

    async def why_not_in(self, job: JobView, cluster: str) -> str:
        if cluster not in {one.name for one in self.view.clusters}:
            raise ClusterNotFound(cluster)
        return self.why_not.get(cluster, "")

    def snapshot(self) -> ClusterView:
        return self.view
