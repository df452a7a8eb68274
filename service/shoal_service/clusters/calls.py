"""The calls of the control plane to a cluster, what each one is answered with, and the errors. Pure data.

A request is named by its class. The control plane validates every answer with the type that is here; the gateway that
answers has unpickled what came from nodes on which code of users runs, so it is not trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter

from shoal_service.cluster.errors import (
    ClusterError,
    ClusterUnreachable,
    RayCallFailed,
    SupervisorGone,
    SupervisorUnavailable,
)
from shoal_service.clusters.snapshot import RoomKind, UnusedPackages
from shoal_service.core.nodes import Node
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.reports import SupervisorReports
from shoal_service.signing.calls import CallName, CallRefused, Refusal, SignedCall
from shoal_service.supervisor.config import Directive, StaleEpoch, SupervisorConfig
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.messages import Stacks

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


class SilentSupervisor(OfAttempt):
    pass


class ReplaceSupervisor(OfAttempt):
    silent_node: str
    public_key: str


class UnrecordedStarts(OfAttempt):
    pass


class LastEnds(OfAttempt):
    pass


class Reap(OfAttempt):
    pass


class UploadCode(OfAttempt):
    """The gateway reads the archive from the service."""

    sha256: str


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


# The calls to a supervisor, see `supervisor_calls.py`.


class Pull(OfAttempt):
    after: int
    wait_s: float
    epoch: int
    signed: SignedCall | None


class Direct(OfAttempt):
    directive: Directive
    signed: SignedCall | None


class TakeStacks(OfAttempt):
    rank: int | None
    native: bool
    epoch: int
    signed: SignedCall | None


class Release(OfAttempt):
    epoch: int
    signed: SignedCall | None


ANSWERS: Mapping[type[Frozen], TypeAdapter[Any]] = {
    LookNow: TypeAdapter(None),
    StartSupervisor: TypeAdapter(None),
    KeepReady: TypeAdapter(None),
    FindSupervisor: TypeAdapter(bool),
    SilentSupervisor: TypeAdapter(Words),
    ReplaceSupervisor: TypeAdapter(bool),
    UnrecordedStarts: TypeAdapter(Count),
    LastEnds: TypeAdapter(tuple[ProcessEnd, ...]),
    Reap: TypeAdapter(Count),
    UploadCode: TypeAdapter(Words),
    FaultOfNode: TypeAdapter(Words),
    ListUnusedPackages: TypeAdapter(tuple[UnusedPackages, ...]),
    RemovePackages: TypeAdapter(bool),
    RequestRoom: TypeAdapter(None),
    Pull: TypeAdapter(SupervisorReports),
    Direct: TypeAdapter(None),
    TakeStacks: TypeAdapter(Stacks | None),
    Release: TypeAdapter(None),
}
REQUESTS = {kind.__name__: kind for kind in ANSWERS}

_ERRORS: dict[str, type[ClusterError]] = {
    kind.__name__: kind for kind in (ClusterUnreachable, RayCallFailed, SupervisorGone, SupervisorUnavailable)
}


class Failure(Frozen):
    """An error of a call."""

    kind: str
    words: Words
    epochs: tuple[int, int] | None = None
    """Of StaleEpoch: that of the call, and the current one."""
    refused: tuple[CallName, Refusal] | None = None
    """Of CallRefused."""

    @staticmethod
    def of(error: Exception) -> Failure:
        words = (str(error) or type(error).__name__)[:MAX_WORDS]
        if isinstance(error, StaleEpoch):
            return Failure(kind="StaleEpoch", words=words, epochs=(error.epoch, error.current))
        if isinstance(error, CallRefused):
            return Failure(kind="CallRefused", words=words, refused=(error.call, error.refusal))
        if (kind := type(error).__name__) in _ERRORS:
            return Failure(kind=kind, words=words)
        return Failure(kind=RayCallFailed.__name__, words=f"{type(error).__name__}: {words}"[:MAX_WORDS])

    def error(self) -> Exception:
        if self.epochs is not None:
            return StaleEpoch(*self.epochs)
        if self.refused is not None:
            return CallRefused(*self.refused)
        return _ERRORS.get(self.kind, RayCallFailed)(self.words)
