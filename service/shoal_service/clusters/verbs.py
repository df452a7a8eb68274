"""The one table of verbs: what the control plane asks of a cluster, and how each verb looks on the wire.

A verb is the signature of a method and a row of VERBS. Everything else follows from them: the document of its
arguments, the check of its answer, the method of `JoinedCluster` that writes the order, and the call in the gateway,
which hands the arguments to the method of the same name of `RayCluster`, or of `OrderExecutor` for GatewayVerbs.

    JoinedCluster.reap("j", 1)  ->  order "Reap" {"job_id": "j", "attempt": 1}  ->  RayCluster.reap("j", 1)
                           1    <-  answer "1", validated as Count              <-  1

The gateway that answers has unpickled what came from nodes on which code of users runs, so it is not trusted: an answer
is used only after it was validated with the return type that stands here, which bounds texts and counts. Pure data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, get_type_hints

from pydantic import TypeAdapter, create_model

from shoal_service.clusters.wire import Count, FoundSupervisor, RoomKind, UnusedPackages, Words
from shoal_service.core.nodes import Node
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.home import Home
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.contract import Frozen


class RayVerbs(Protocol):
    """Verbs that are carried out with Ray. Each may raise ClusterUnreachable. In the gateway some of them block."""

    async def start_supervisor(
        self, config: SupervisorConfig, *, avoid_nodes: frozenset[str], places: Mapping[str, int]
    ) -> None:
        """Starts the supervisor of an attempt. Idempotent: an attempt has one supervisor. One that was given another
        `home` is replaced.

        It is kept off `avoid_nodes` if there are other nodes. `places`: how many of its workers are expected on which
        node, once others have given these places back; their processes may start at once. The cluster fills in the
        address of `config.home`.
        """

    async def keep_ready(self, avoid_nodes: frozenset[str]) -> None:
        """Has a process started, now and then, in which the next supervisor begins at once. It is called again and
        again."""

    async def find_supervisor(self, job_id: str, attempt: int) -> FoundSupervisor | None:
        """Finds the actor of the attempt's supervisor. None if there is none, and Ray makes none any more."""

    async def why_gone(self, job_id: str, attempt: int) -> Words:
        """Why there is no supervisor, in Ray's words; empty: not known."""

    async def silent_supervisor(self, job_id: str, attempt: int) -> Words:
        """The node of the attempt's supervisor, if its host answers no connect for 1.5 s although the head answers;
        else empty."""

    async def replace_supervisor(self, job_id: str, attempt: int, silent_node: str, home: Home) -> bool:
        """Starts a supervisor with the same configuration and this home, on another node in the place of the one on
        `silent_node`; if that is empty, in the place of the one that there is. May be repeated. False if
        its configuration is not known."""

    async def unrecorded_starts(self, job_id: str, attempt: int) -> Count:
        """Processes of the attempt's supervisor that were started and have not recorded it; one of them may be about to
        do so."""

    async def last_ends(self, job_id: str, attempt: int) -> tuple[ProcessEnd, ...]:
        """How the last processes of the attempt's supervisor have ended, oldest first; empty: not known."""

    async def reap(self, job_id: str, attempt: int) -> Count:
        """Kills all actors of an attempt and deletes its journal. Returns the number of actors."""

    async def fault_of_node(self, suspect: Node, partner: str | None) -> Words:
        """The probation test of a node: what was wrong; empty: it passed. Takes some seconds."""

    async def unused_packages(self, for_s: float) -> tuple[UnusedPackages, ...]:
        """The packages that no process has used for `for_s` seconds, on all nodes that are alive and answer."""

    async def remove_packages(self, node_id: str, name: str, for_s: float) -> bool:
        """Removes a set of packages. False: they were used meanwhile, or the node does not answer."""

    async def sees_storage(self, url: str, name: str) -> Words:
        """Why nodes cannot read the checkpoint of this name in the job's directory; empty if those that answer can.
        With an empty name: why the directory is not there."""

    async def request_room(self, workers: tuple[tuple[RoomKind, int], ...]) -> None:
        """Asks the cluster's autoscaler for room for these numbers of workers by kind. Replaces the last request."""


class GatewayVerbs(Protocol):
    """Verbs that the gateway carries out itself. Each may raise ClusterUnreachable."""

    async def look_now(self) -> None:
        """The next report shows the cluster as it is after this order has arrived."""

    async def upload_code(self, job_id: str, attempt: int, sha256: str) -> Words:
        """Stores a code archive of the store in the cluster, for the runtime environments of an attempt's workers; its
        URI, the same for equal bytes. The gateway reads the archive from the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A row of the table."""

    kind: str
    """Name on the wire."""
    method: str
    parameters: tuple[str, ...]
    request: type[Frozen]
    """Document of the arguments; its fields are the parameters of the method."""
    answer: TypeAdapter[Any]
    limit_s: float
    """The control plane waits this long for the answer."""

    def make_request(self, *arguments: Any, **named: Any) -> Frozen:
        """Make the document of a call with these arguments."""
        assert len(arguments) <= len(self.parameters), f"{self.method} has the parameters {self.parameters}"
        return self.request(**dict(zip(self.parameters, arguments, strict=False)), **named)


def _row(kind: str, method: Callable[..., Any], *, limit_s: float = 60.0) -> Verb:
    hints = get_type_hints(method, include_extras=True)  # with what bounds texts and counts
    answer = hints.pop("return")
    fields: dict[str, Any] = {name: (hint, ...) for name, hint in hints.items()}
    return Verb(
        kind=kind,
        method=method.__name__,
        parameters=tuple(hints),
        request=create_model(kind, __base__=Frozen, **fields),
        answer=TypeAdapter(answer),
        limit_s=limit_s,
    )


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        verb.kind: verb
        for verb in (
            _row("StartSupervisor", RayVerbs.start_supervisor),
            _row("KeepReady", RayVerbs.keep_ready),
            _row("FindSupervisor", RayVerbs.find_supervisor),
            _row("WhyGone", RayVerbs.why_gone),
            _row("SilentSupervisor", RayVerbs.silent_supervisor),
            _row("ReplaceSupervisor", RayVerbs.replace_supervisor),
            _row("UnrecordedStarts", RayVerbs.unrecorded_starts),
            _row("LastEnds", RayVerbs.last_ends),
            _row("Reap", RayVerbs.reap),
            _row("FaultOfNode", RayVerbs.fault_of_node, limit_s=600.0),
            _row("ListUnusedPackages", RayVerbs.unused_packages, limit_s=180.0),
            _row("RemovePackages", RayVerbs.remove_packages, limit_s=180.0),
            _row("RequestRoom", RayVerbs.request_room),
            _row("LookNow", GatewayVerbs.look_now, limit_s=1.0),
            _row("UploadCode", GatewayVerbs.upload_code, limit_s=180.0),
            _row("SeesStorage", RayVerbs.sees_storage),
        )
    }
)
"""By kind. A kind that one side does not know is refused in words: the two may be of different releases."""
BY_METHOD: Mapping[str, Verb] = MappingProxyType({verb.method: verb for verb in VERBS.values()})
