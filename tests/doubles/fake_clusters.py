"""FakeClusters: several FakeClusters, as the control plane sees those that have joined."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from doubles.fake_cluster import FakeCluster
from shoal_service.cluster.errors import ClusterUnreachable
from shoal_service.clusters.verbs import BY_METHOD
from shoal_service.control.protocols import ClusterMembership
from shoal_service.core.nodes import Cordon


class AskedCluster:
    """A FakeCluster as the control plane has it: each verb is a coroutine. Everything else is the FakeCluster's."""

    def __init__(self, cluster: FakeCluster) -> None:
        object.__setattr__(self, "cluster", cluster)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.cluster, name)
        return partial(_answer_of, value) if name in BY_METHOD else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.cluster, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.cluster, name)


async def _answer_of(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    answer = await asyncio.to_thread(method, *arguments, **named)
    return await answer if inspect.isawaitable(answer) else answer


class FakeClusters:
    """A `control.protocols.Clusters`."""

    def __init__(self, own: str = "default", /, **clusters: FakeCluster) -> None:
        """`clusters`: by name; the own one is among them."""
        self.own = own
        self.joined: Mapping[str, ClusterMembership] = {}
        self._watchers: list[Callable[[str], None]] = []
        for name, cluster in sorted(clusters.items(), key=lambda one: (one[0] != own, one[0])):
            self.join(name, cluster)

    @classmethod
    def single(cls, cluster: FakeCluster) -> FakeClusters:
        return cls("default", default=cluster)

    def join(self, name: str, cluster: Any, *, labels: Mapping[str, str] | None = None) -> None:
        cluster.watch(lambda: self._changed(name))
        if isinstance(cluster, FakeCluster):
            cluster = AskedCluster(cluster)
        self.joined = {**self.joined, name: ClusterMembership(cluster=cluster, labels=labels or {})}

    def cordon(self, name: str, reason: str) -> None:
        cordon = Cordon(reason=reason, requested_at=1.0)
        self.joined = {**self.joined, name: replace(self.joined[name], cordon=cordon)}

    def remove(self, name: str) -> None:
        self.joined = {other: one for other, one in self.joined.items() if other != name}

    def refresh(self) -> None:
        pass

    def of(self, name: str) -> Any:
        joined = self.joined.get(name or self.own)
        return joined.cluster if joined is not None else AskedCluster(AbsentCluster(name))

    def watch(self, changed: Callable[[str], None]) -> Callable[[], None]:
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def _changed(self, name: str) -> None:
        for changed in tuple(self._watchers):
            changed(name)


class AbsentCluster(FakeCluster):
    """One that has not joined: it answers no call that drivers make."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.connected = False
        self.error = ClusterUnreachable(f"no gateway speaks for the cluster {name!r}")

    def _refuse(self, *_: object, **__: object) -> None:
        assert self.error is not None
        raise self.error

    start_supervisor = find_supervisor = why_gone = silent_supervisor = replace_supervisor = _refuse  # type: ignore[assignment]
    unrecorded_starts = last_ends = reap = upload_code = keep_ready = _refuse  # type: ignore[assignment]
