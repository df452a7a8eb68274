"""Who or what is suspected of a failure or a slow-down, and the evidence; and what a rank reports for that purpose.

A suspicion of this kind is for people: no decision about the training depends on it.
"""

from __future__ import annotations

from enum import StrEnum

from shoal_workers.contract.base import Frozen


class Resource(StrEnum):
    """What is wrong with the suspect."""

    CPU = "cpu"
    """The training thread is ready to run and gets no CPU: other programs use its cores."""
    COMPUTE = "compute"
    """The rank computes for longer than the others, on a CPU or a device of its own."""
    DATA = "data"
    """Making batches takes long."""
    STORAGE = "storage"
    """Writing a checkpoint takes long, or fails."""
    NETWORK = "network"
    """The link loses or delays packets, or carries nothing."""
    PROCESS = "process"
    """The process is stopped, dead, or answers nothing."""
    PROGRAM = "program"
    """The rank calls other collectives than the others, or its code raised."""
    NUMBERS = "numbers"
    """The rank computes values that are not finite, or wrong."""


class Suspect(Frozen):
    """The most probable reason."""

    resource: Resource
    ranks: tuple[int, ...] = ()
    """Empty: no single rank, for example all of them, or a link between two nodes."""
    node_ip: str = ""
    """The node, if all its ranks are suspected for its sake."""
    evidence: tuple[str, ...]
    """What was observed, the most telling first."""

    def describe(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        who = f"rank {ranks}" if len(self.ranks) == 1 else f"ranks {ranks}" if ranks else "no single rank"
        node = f" on {self.node_ip}" if self.node_ip else ""
        return f"{who}{node} ({self.resource}): {'; '.join(self.evidence)}"


class Collective(Frozen):
    """The newest collective that the training thread of a rank has called."""

    number: int
    """Number of the collective in this generation."""
    name: str
    bytes: int
    """Size of this rank's tensors, bytes."""
    is_waiting: bool
    """True if the thread waits for a collective."""
    deviation: str = ""
    """How the calls of this step differ from those of the step before; empty: they do not, or there is none."""

    def describe(self) -> str:
        return f"{self.name} number {self.number} ({self.bytes:,} bytes)"


class Link(Frozen):
    """The connections of a rank's process groups to one other node."""

    peer_ip: str
    rtt_s: float
    """Round trip time as the kernel estimates it now; the longest of the connections."""
    sent: int
    """TCP segments with data that were sent over the last seconds."""
    resent: int
    """TCP segments that were sent again in the same time."""
