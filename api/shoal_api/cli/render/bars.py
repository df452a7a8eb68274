"""A sum split into parts, as one line of coloured blocks, for worker-seconds and for recoveries. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

_BLOCK = "█"


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    amount: float
    style: str


def bar(parts: Sequence[Part], width: int) -> Text:
    """A line of `width` blocks; empty if all parts are zero. If `width` allows, each part above zero has a block."""
    line = Text()
    for part, blocks in zip(parts, shares([part.amount for part in parts], width), strict=True):
        line.append(_BLOCK * blocks, style=part.style)
    return line


def shares(amounts: Sequence[float], width: int) -> list[int]:
    """`width` split in proportion to the amounts, by the largest-remainder method."""
    total = sum(amounts)
    if total <= 0:
        return [0] * len(amounts)
    visible = sum(1 for amount in amounts if amount > 0)
    least = 1 if visible <= width else 0
    spare = width - least * visible
    exact = [spare * amount / total for amount in amounts]
    blocks = [int(share) + (least if amount > 0 else 0) for share, amount in zip(exact, amounts, strict=True)]
    by_remainder = sorted(range(len(amounts)), key=lambda i: exact[i] - int(exact[i]), reverse=True)
    for index in by_remainder[: width - sum(blocks)]:
        blocks[index] += 1
    return blocks
