"""What can happen to an attempt: the closed union that `machine.step` consumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal_service.core.attempt.state import AvoidedNode, Wanted
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.memory import Holding
from shoal_workers.contract.messages import ErrorReport, Progress, ShardExit, ShardInfo, ShardNews
from shoal_workers.contract.spec import ElasticitySpec, ParallelismSpec


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    """Answer to FindCheckpoint: the newest usable one, or None."""

    name: str | None


@dataclass(frozen=True, slots=True)
class StorageUnusable:
    """The checkpoint URL cannot be read or written at all."""

    message: str


@dataclass(frozen=True, slots=True)
class ProcessWarm:
    index: int
    info: ShardInfo


@dataclass(frozen=True, slots=True)
class ProcessFailedToStart:
    """The process came up, but the user's code or data cannot be loaded in it."""

    index: int
    error: ErrorReport


@dataclass(frozen=True, slots=True)
class ProcessLost:
    """The process is gone, by whatever witness."""

    index: int
    cause: IncidentCause
    witness: str
    message: str


@dataclass(frozen=True, slots=True)
class DeathDated:
    """Whoever watched the process itself says when it died. Follows ProcessLost, which does not wait for it."""

    shard_id: str
    at: float
    """Wall-clock time, by the clock of Ray's head."""


@dataclass(frozen=True, slots=True)
class RunReturned:
    index: int
    exit: ShardExit


@dataclass(frozen=True, slots=True)
class NewsArrived:
    index: int
    item: ShardNews


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    name: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    name: str
    generation: int
    step: int
    message: str


@dataclass(frozen=True, slots=True)
class GrantChanged:
    workers: int


@dataclass(frozen=True, slots=True)
class ElasticityChanged:
    elasticity: ElasticitySpec


@dataclass(frozen=True, slots=True)
class ParallelismChanged:
    """The group takes its new layout at the next step boundary."""

    parallelism: Literal["auto"] | ParallelismSpec


@dataclass(frozen=True, slots=True)
class WantedChanged:
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Beat:
    """What a process's answer to a poll says of its training thread. Also when nothing has changed: it answers."""

    index: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class InterruptHeard:
    """The control thread has fenced that generation and is waking the training thread."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class HoldingsTold:
    """Answer to AskHoldings: what lies in the process's node's memory."""

    index: int
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class ProcessUnreachable:
    """Calls to the process fail, and it is not known to be dead: its node, or the way to it, is gone."""

    index: int
    message: str


@dataclass(frozen=True, slots=True)
class NodesAvoided:
    """Every node that must not be used: being drained, or on probation. Whole, not a change."""

    nodes: tuple[AvoidedNode, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; deadlines are looked at."""


Event = (
    CheckpointFound
    | StorageUnusable
    | ProcessWarm
    | ProcessFailedToStart
    | ProcessLost
    | DeathDated
    | RunReturned
    | NewsArrived
    | CheckpointCommitted
    | CommitFailed
    | GrantChanged
    | ElasticityChanged
    | ParallelismChanged
    | WantedChanged
    | Beat
    | InterruptHeard
    | HoldingsTold
    | ProcessUnreachable
    | NodesAvoided
    | Tick
)
