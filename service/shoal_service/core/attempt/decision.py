"""What a predicate of the attempt machine returns. A predicate reads the state and changes nothing; its caller acts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """True or false as a condition; `reason` is for people and holds the numbers that were used."""

    yes: bool
    reason: str

    def __bool__(self) -> bool:
        return self.yes
