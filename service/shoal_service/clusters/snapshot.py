"""A cluster as its gateway reports it, and what is asked of it: values that both sides of the wire use. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

from pydantic import ConfigDict

from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.market import WorkerNeed

AttemptKey: TypeAlias = tuple[str, int]
"""Job id, and number of the attempt."""
_DOCUMENTED = ConfigDict(extra="forbid", use_attribute_docstrings=True)
"""For dataclasses that the REST API documents as parts of a report."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one worker of a job has reserved on a node."""

    __pydantic_config__: ClassVar = _DOCUMENTED

    worker_id: str
    job_id: str
    node_id: str
    need: WorkerNeed
    is_alive: bool = True
    """False while Ray is creating the worker, which may or may not have reserved the resources by now."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster at one moment."""

    __pydantic_config__: ClassVar = _DOCUMENTED

    nodes: tuple[Node, ...]
    free: Mapping[str, WorkerNeed] = field(default_factory=dict)
    """Resources that are not reserved, by node id. A node that is missing has not reported yet."""
    reservations: tuple[Reservation, ...] = ()
    """Reservations of the workers of all jobs."""
    attempts: frozenset[AttemptKey] = frozenset()
    """Attempts that have actors, also those of other control planes."""
    failed: frozenset[AttemptKey] = frozenset()
    """Attempts whose supervisor Ray could not create, until they are started again or reaped."""


@dataclass(frozen=True, slots=True)
class FoundSupervisor:
    """The actor of an attempt's supervisor, which may be starting."""

    dials_here: bool
    """True if it was given the address that supervisors of this cluster have now."""


@dataclass(frozen=True, slots=True)
class UnusedPackages:
    """A set of packages of `code.pip` on a node that no process uses."""

    node_id: str
    node_ip: str
    name: str
    num_bytes: int
    unused_s: float


class RoomKind(NamedTuple):
    """Workers that are alike."""

    need: WorkerNeed
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of the node, as Ray's `label_selector`; sorted."""
