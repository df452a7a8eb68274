"""The documents that a gateway and the service exchange, and what a gateway's process gets at its start. Pure data.

    ClusterReport   gateway -> service: the cluster as it is now, and the answers to orders
    ReportReceipt   service -> gateway: that the report is stored, and which orders the service no longer waits for
    OrderPage       service -> gateway: the orders without an answer

`value` and `arguments` are JSON texts, read with `verbs.py`: the service passes them on without looking into them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from shoal_service.cluster.errors import ClusterError, ClusterUnreachable, RayCallFailed
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.home import Home
from shoal_workers.contract import CLUSTER_PATTERN as CLUSTER_PATTERN
from shoal_workers.contract import Frozen, LogSettings, check_labels

DEFAULT_CLUSTER = "default"
MAX_ANSWERS = 500
MAX_ORDERS = 100
MAX_WORDS = 4_000
"""Letters of an error's message."""
Words = Annotated[str, StringConstraints(max_length=MAX_WORDS)]
Count = Annotated[int, Field(ge=0)]
Number = Annotated[int, Field(ge=0, le=2**53)]
Labels = Annotated[dict[str, str], AfterValidator(check_labels)]
Life = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
"""A random name for the time in which a gateway speaks for its cluster: new with each start, and after another gateway
has taken its place."""


_ERRORS: dict[str, type[ClusterError]] = {kind.__name__: kind for kind in (ClusterUnreachable, RayCallFailed)}


class Failure(Frozen):
    """An error of a call."""

    kind: str
    words: Words

    @staticmethod
    def of(error: Exception) -> Failure:
        message = (str(error) or type(error).__name__)[:MAX_WORDS]
        if (kind := type(error).__name__) in _ERRORS:
            return Failure(kind=kind, words=message)
        return Failure(kind=RayCallFailed.__name__, words=f"{type(error).__name__}: {message}"[:MAX_WORDS])

    def error(self) -> Exception:
        return _ERRORS.get(self.kind, RayCallFailed)(self.words)


class Answer(Frozen):
    """What became of an order."""

    number: Number
    failure: Failure | None = None
    value: Annotated[str, StringConstraints(max_length=64 << 20)] = "null"
    """JSON text."""


class ClusterReport(Frozen):
    """What a gateway says, once a second and when something has changed."""

    life: Life
    number: Number
    """Rises with each report of a life. A repeated one changes nothing but the answers that were not stored."""
    takes_over: bool = False
    """Its process has just started, and none of its reports was accepted yet: it takes the place of an earlier gateway
    with the same token at once."""
    is_last: bool = False
    """The gateway ends in order; the next one need not wait."""
    ray_cluster: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{0,64}$")] = ""
    """Id of the Ray cluster; empty: Ray has not answered yet."""
    replaces: bool = False
    """It may take the name over from another Ray cluster, once that one is silent."""
    address: Words = ""
    """Address of the Ray cluster, for people."""
    snapshot: ClusterSnapshot | None = None
    """Null: as in the report before, or see `error`."""
    error: Words = ""
    """Why Ray does not answer the gateway; empty: it does."""
    labels: Labels = Field(default_factory=dict)
    """Labels of the cluster, as `shoal join --label` gives them. The first report of a life merges them into those that
    the service has."""
    answers: Annotated[tuple[Answer, ...], Field(max_length=MAX_ANSWERS)] = ()
    running: Annotated[tuple[Number, ...], Field(max_length=100_000)] = ()
    """Numbers of the orders that it carries out now."""


class ReportReceipt(Frozen):
    number: Number
    """Number of the newest report that is stored."""
    cancelled: tuple[Number, ...] = ()
    """Orders of `running` whose answers the service no longer waits for."""


class Order(Frozen):
    """Something that the gateway shall do once."""

    number: Number
    """Rises over all orders of the cluster."""
    epoch: int
    """Lease epoch of the control plane that wants it. The gateway refuses one that is lower than it has seen."""
    kind: str
    """Name of a row of `verbs.py`."""
    arguments: str
    """JSON text."""


class OrderPage(Frozen):
    """Orders without an answer, by number."""

    items: tuple[Order, ...]
    newest: Number
    """The highest number that an order of this cluster has had. Lower than a number that the gateway knows: the
    database was restored, and numbers begin there again."""


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


COMMAND = (sys.executable, "-P", "-m", "shoal_service.gateway.process")


class GatewayConfig(Frozen):
    """Written to its standard input as one line of JSON."""

    url: str
    """Address of the service."""
    token: str
    """Token by which the service knows the cluster."""
    cluster: str = Field(DEFAULT_CLUSTER, pattern=CLUSTER_PATTERN)
    """The name under which it joins."""
    labels: Labels = Field(default_factory=dict)
    """Labels of the cluster, added to those of its nodes."""
    ca: str = ""
    """Certificates in PEM that the service's one must come from; empty: the usual authorities."""
    is_same_machine: bool = False
    """The service is dialled at an address of this machine, and `ca` has its own certificate: its name is not
    checked."""
    ray_address: str
    """host:port of the Ray cluster, or auto."""
    home: Home = Home()
    """Where the supervisors of this cluster reach the service, without a token."""
    replaces: bool = False
    """It may take the name over from another Ray cluster, once that one is silent."""
    ends_with_input: bool = False
    """It ends with its standard input, and no signal ends it. Else SIGINT and SIGTERM do."""
    logs: LogSettings = LogSettings()
