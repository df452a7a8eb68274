"""NodePackages: the packages on the nodes of all clusters. A `protocols.PackageStores`, used by the collector."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from shoal_service.cluster.errors import ClusterError, ClusterUnreachable
from shoal_service.clusters.snapshot import UnusedPackages
from shoal_service.control.protocols import Clusters

_log = logging.getLogger(__name__)


class NodePackages:
    """Removes unused sets of packages from the nodes. Used on one event loop."""

    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters
        self._places: dict[str, str] = {}
        """By node id: the cluster, of nodes on which unused packages were found."""

    async def unused_packages(self, for_s: float) -> tuple[UnusedPackages, ...]:
        """Those of the clusters that answer. Raises ClusterUnreachable: none does."""
        joined = self._clusters.joined
        asked = [one.cluster.unused_packages(for_s) for one in joined.values()]
        answers = dict(zip(joined, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        found = {name: answer for name, answer in answers.items() if not isinstance(answer, BaseException)}
        errors = {name: answer for name, answer in answers.items() if isinstance(answer, BaseException)}
        _raise_what_is_no_error_of_a_cluster(errors)
        if not found:
            raise ClusterUnreachable("; ".join(str(error) for error in errors.values()))
        for name, error in errors.items():
            _log.warning("retention.packages_unknown", extra={"cluster": name, "error": str(error)})
        self._places |= {one.node_id: name for name, answer in found.items() for one in answer}
        return tuple(one for answer in found.values() for one in answer)

    async def remove_packages(self, node_id: str, name: str, for_s: float) -> bool:
        return await self._clusters.of(self._places.get(node_id, "")).remove_packages(node_id, name, for_s)


def _raise_what_is_no_error_of_a_cluster(errors: Mapping[str, BaseException]) -> None:
    for error in errors.values():
        if not isinstance(error, ClusterError):
            raise error
