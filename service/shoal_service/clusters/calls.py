"""The calls of the control plane to a cluster, what each one is answered with, and the errors. Pure data.

A request is named by its class. The control plane validates every answer with the type that is here; the gateway that
answers has unpickled what came from nodes on which code of users runs, so it is not trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter

from shoal_service.cluster.errors import ClusterError, ClusterUnreachable, RayCallFailed
from shoal_service.clusters.snapshot import FoundSupervisor, RoomKind, UnusedPackages
from shoal_service.core.nodes import Node
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.home import Home
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.contract.base import Frozen

MAX_WORDS = 4_000
"""Letters of an error's message."""
Count = Annotated[int, Field(ge=0)]
Words = Annotated[str, StringConstraints(max_length=MAX_WORDS)]


class LookNow(Frozen):
    """Report the cluster as it is after this order has arrived."""


class StartSupervisor(Frozen):
    config: SupervisorConfig
    avoid_nodes: frozenset[str]
    places: dict[str, int]


class KeepReady(Frozen):
    avoid_nodes: frozenset[str]


class OfAttempt(Frozen):
    """The base of calls about one attempt."""

    job_id: str
    attempt: int


class FindSupervisor(OfAttempt):
    pass


class WhyGone(OfAttempt):
    pass


class SilentSupervisor(OfAttempt):
    pass


class ReplaceSupervisor(OfAttempt):
    silent_node: str
    home: Home


class UnrecordedStarts(OfAttempt):
    pass


class LastEnds(OfAttempt):
    pass


class Reap(OfAttempt):
    pass


class UploadCode(OfAttempt):
    """The gateway reads the archive from the service."""

    sha256: str


class SeesStorage(Frozen):
    """The question whether this cluster can read the storage of a job that may go on in it."""

    url: str
    """URL of the job's directory."""
    name: str
    """Name of the job's newest checkpoint; empty: it has none."""


class FaultOfNode(Frozen):
    suspect: Node
    partner: str | None


class ListUnusedPackages(Frozen):
    for_s: float


class RemovePackages(Frozen):
    node_id: str
    name: str
    for_s: float


class RequestRoom(Frozen):
    workers: tuple[tuple[RoomKind, int], ...]


ANSWERS: Mapping[type[Frozen], TypeAdapter[Any]] = {
    LookNow: TypeAdapter(None),
    StartSupervisor: TypeAdapter(None),
    KeepReady: TypeAdapter(None),
    FindSupervisor: TypeAdapter(FoundSupervisor | None),
    WhyGone: TypeAdapter(Words),
    SilentSupervisor: TypeAdapter(Words),
    ReplaceSupervisor: TypeAdapter(bool),
    UnrecordedStarts: TypeAdapter(Count),
    LastEnds: TypeAdapter(tuple[ProcessEnd, ...]),
    Reap: TypeAdapter(Count),
    UploadCode: TypeAdapter(Words),
    SeesStorage: TypeAdapter(Words),
    FaultOfNode: TypeAdapter(Words),
    ListUnusedPackages: TypeAdapter(tuple[UnusedPackages, ...]),
    RemovePackages: TypeAdapter(bool),
    RequestRoom: TypeAdapter(None),
}
REQUESTS = {kind.__name__: kind for kind in ANSWERS}

_ERRORS: dict[str, type[ClusterError]] = {kind.__name__: kind for kind in (ClusterUnreachable, RayCallFailed)}


class Failure(Frozen):
    """An error of a call."""

    kind: str
    words: Words

    @staticmethod
    def of(error: Exception) -> Failure:
        words = (str(error) or type(error).__name__)[:MAX_WORDS]
        if (kind := type(error).__name__) in _ERRORS:
            return Failure(kind=kind, words=words)
        return Failure(kind=RayCallFailed.__name__, words=f"{type(error).__name__}: {words}"[:MAX_WORDS])

    def error(self) -> Exception:
        return _ERRORS.get(self.kind, RayCallFailed)(self.words)
