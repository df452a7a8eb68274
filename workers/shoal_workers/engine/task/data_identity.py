"""Whether all ranks read the same data, and the data that a checkpoint was made with. By content, not by name or time.

A dataset that has a `content_hash` (the built-in ones do; a task's own may) is compared by it, others are not.
Called once per generation by the engine, before the first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal_workers.engine.generation_ends import DataDiffers

_SHOWN_PARTS = 3


@dataclass(frozen=True, slots=True)
class RankData:
    """What one rank reads."""

    content_hash: str
    """Empty: its dataset has none."""
    host: str


@dataclass(frozen=True, slots=True)
class DataChange:
    """A checkpoint was made with other data than this job reads now."""

    before: str
    """Content hash, as in the checkpoint."""
    now: str


def content_hash_of(dataset: Any) -> str:
    """Returns the content hash of a dataset; empty: it has none."""
    value = getattr(dataset, "content_hash", "")
    return value if isinstance(value, str) else ""


def parts_of(dataset: Any) -> dict[str, str]:
    """Content hash of each part by the part's name; asked for only if the whole differs. Empty: it has no parts."""
    parts = getattr(dataset, "content_parts", None)
    return dict(parts()) if callable(parts) else {}


def differing_rank(ranks: Sequence[RankData]) -> int | None:
    """The first rank that reads other data than most ranks do (than rank 0, if there is no majority); None if all read
    the same."""
    counts = Counter(rank.content_hash for rank in ranks)
    if len(counts) == 1:
        return None
    usual = max(counts, key=lambda content_hash: (counts[content_hash], content_hash == ranks[0].content_hash))
    return next(number for number, rank in enumerate(ranks) if rank.content_hash != usual)


def difference(ranks: Sequence[RankData], parts: Sequence[dict[str, str]], number: int) -> DataDiffers:
    """The error that all ranks raise. `number`: as `differing_rank` says; `parts`: of every rank."""
    other = next(n for n, rank in enumerate(ranks) if rank.content_hash != ranks[number].content_hash)
    own, theirs = list(parts[number].items()), list(parts[other].items())
    names = [
        f"{mine[0]} is not {yours[0]}" for mine, yours in zip(own, theirs, strict=False) if mine[1] != yours[1]
    ] + ([f"{len(own)} files of tokens, not {len(theirs)}"] if len(own) != len(theirs) else [])
    more = f", and {len(names) - _SHOWN_PARTS} more" if len(names) > _SHOWN_PARTS else ""
    where = f": {'; '.join(names[:_SHOWN_PARTS])}{more}" if names else ""
    return DataDiffers(
        f"Rank {number} on {ranks[number].host} reads other data than rank {other} on {ranks[other].host}{where}. "
        f"Content hashes: {_shown(ranks[number].content_hash)} and {_shown(ranks[other].content_hash)}. Give all nodes "
        "the same files (and the same tokenizer and version of Python), for example on shared storage."
    )


def change_since(saved: object, now: str) -> DataChange | None:
    """`saved`: the content hash in a checkpoint. A checkpoint or a dataset without one is compared with nothing."""
    if not isinstance(saved, str) or not saved or not now or saved == now:
        return None
    return DataChange(saved, now)


def refused_change(change: DataChange, step: int) -> DataDiffers:
    """Returns the error for a job's own checkpoint: its samples are numbered in the data that it began with."""
    return DataDiffers(
        f"The data of this job has changed since step {step}: its content hash was {change.before}, now {change.now}. "
        "Some samples would be read twice, others never. Put the files (or the tokenizer) back as they were and retry "
        "the job, or let a new job go on with the new data: shoal submit SPEC --from JOB; under torchrun add "
        "--changed-spec."
    )


def _shown(content_hash: str) -> str:
    return content_hash or "none"
