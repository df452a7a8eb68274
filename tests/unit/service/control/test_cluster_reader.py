"""The control plane's look at the cluster, when Ray's head answers too late."""

import asyncio
import gc
from typing import Any

from doubles.event_loop import Hangs, run, settle
from doubles.fake_clock import FakeClock
from doubles.fake_cluster import FakeCluster
from doubles.fake_clusters import FakeClusters
from shoal_service.cluster.errors import ClusterUnreachable
from shoal_service.clusters.snapshot import ClusterSnapshot
from shoal_service.control.cluster_reader import ClusterReader
from shoal_service.store.store import Store


class SilentCluster(FakeCluster):
    """Its head does not answer until the test does."""

    def __init__(self) -> None:
        super().__init__()
        self.question = Hangs()

    def snapshot(self, *, fresh: bool = False) -> ClusterSnapshot:
        raise self.question


def test_an_error_that_comes_after_the_deadline_is_not_reported_as_one_that_nobody_retrieved(store: Store) -> None:
    unretrieved: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
        cluster, clock = SilentCluster(), FakeClock()
        reading = asyncio.create_task(ClusterReader(store, FakeClusters.single(cluster), clock, "50%").read(None, {}))
        await clock.advance(5.0)
        assert await reading is False
        del reading
        cluster.question.answer(ClusterUnreachable("the head died meanwhile"))
        await settle()
        gc.collect()

    run(main())
    assert not unretrieved
