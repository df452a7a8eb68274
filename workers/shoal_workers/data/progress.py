"""Progress of a preparation, as a value and in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20


class PreparePhase(StrEnum):
    VERIFYING = "verifying"
    WAITING = "waiting"
    """Another process of this node is preparing the same text."""
    TOKENISING = "tokenising"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """Progress of one preparation."""

    phase: PreparePhase
    done_bytes: int = 0
    total_bytes: int = 0
    done_files: int = 0
    total_files: int = 0
    num_processes: int = 0
    """That tokenise; 0: the one that prepares does it itself."""
    of_holder: str = ""
    """WAITING: the progress of the process that prepares, in words; empty: not known."""

    def describe(self) -> str:
        """For people: `tokenising 45 % (12.3 of 27.4 MiB, 1,203 of 2,410 files, 8 processes)`."""
        match self.phase:
            case PreparePhase.VERIFYING:
                return "verifying the token shards"
            case PreparePhase.WAITING:
                return f"another process of this node prepares the text{': ' if self.of_holder else ''}{self.of_holder}"
            case PreparePhase.READY:
                return "text ready"
            case PreparePhase.TOKENISING:
                processes = f", {self.num_processes} processes" if self.num_processes else ""
                percent = 100 * self.done_bytes // max(1, self.total_bytes)
                return (
                    f"tokenising {percent} % ({self.done_bytes / MIB:,.1f} of {self.total_bytes / MIB:,.1f} MiB, "
                    f"{self.done_files:,} of {self.total_files:,} files{processes})"
                )
