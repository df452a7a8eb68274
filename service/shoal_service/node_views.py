"""The resources of the REST API about cordons, labels of clusters, notices and maintenance windows. Pure data, as those
in `views`.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.placing import Moment

_Reference = Annotated[str, Field(min_length=1, max_length=64)]


class CordonRequest(Frozen):
    """The request to place no new worker on a node."""

    reason: str = Field("cordon requested", min_length=1, max_length=500)
    """Why, for people; shown with the node."""


class ClusterPatch(Frozen):
    """Changes of a cluster."""

    labels: dict[str, str | None] = Field(max_length=64)
    """Merged by name; null removes one. They are added to those of its nodes, and the rules for names and values are
    those of `worker.selector`."""


class NoticeRequest(Frozen):
    """The cloud's notice that it will take a node away."""

    deadline_s: float = Field(30.0, ge=0, le=30 * 86400, allow_inf_nan=False)
    """Seconds until then. Google Cloud and Azure give 30, AWS gives 120."""
    deadline_at: Moment | None = None
    """The same as a time, which has precedence: seconds since 1970, or ISO 8601 with a zone, as AWS writes it."""
    reason: str = Field("preemption notice", min_length=1, max_length=500)
    """For people; shown with the node and in the histories of the jobs that leave it."""


class WindowRequest(Frozen):
    """The request for a maintenance window."""

    nodes: tuple[_Reference, ...] = Field(min_length=1, max_length=1000)
    """Ids or addresses of nodes. A machine that is started anew has the same address and another id."""
    begins_at: Moment
    """The nodes are empty by then: seconds since 1970, or ISO 8601 with a zone."""
    ends_at: Moment
    """The nodes are used again."""
    reason: str = Field("maintenance", min_length=1, max_length=500)
    """For people; shown with the nodes and in the histories of the jobs that leave them."""

    @model_validator(mode="after")
    def _lasts(self) -> Self:
        if self.ends_at <= self.begins_at:
            raise ValueError(f"ends_at {self.ends_at:g} is not after begins_at {self.begins_at:g}.")
        return self


class MaintenanceWindow(Frozen):
    """A time in which nodes are not used."""

    window_id: str
    nodes: tuple[str, ...]
    """Ids or addresses. A machine that is started anew has the same address and another id."""
    begins_at: float
    """The nodes are empty by then."""
    ends_at: float
    """The nodes are used again."""
    reason: str


class WindowView(MaintenanceWindow):
    """A maintenance window, as the API shows it."""

    drains_at: float
    """When the nodes begin to drain: as early as recent drains took twice."""
