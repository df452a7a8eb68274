"""The end of forming: all ranks have restored their state and read the same data. Called once per generation by the
engine, on all ranks.

Rank 0 gets what each rank has read, and decides; the others get the decision only. If ranks read different data, all of
them exchange what they read, and raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.state.restore import Restored
from shoal_workers.engine.task.data_identity import RankData, difference, differing_rank


@dataclass(frozen=True, slots=True)
class AllRestored:
    """The same on every rank."""

    num_bytes: int
    remote_bytes: int
    differing_rank: int | None
    """See `data_identity.differing_rank`."""
    frees_source: bool
    """No rank needs what the group was restored from any more."""

    def __str__(self) -> str:
        return json.dumps(astuple(self))

    @staticmethod
    def parse(text: str) -> AllRestored:
        return AllRestored(*json.loads(text))


def when_all_have_restored(
    group: Group, restored: Restored, own: RankData, parts: Callable[[], Mapping[str, str]]
) -> AllRestored:
    """Waits for all ranks: one of them may find a damaged file or lost memory.

    Args:
        parts: content hashes of the parts of this rank's data; called only if ranks read different data.

    Raises:
        DataDiffers: on every rank alike, ranks read different data.
        FormFailed, Fenced: as `Group.form`.
    """
    found = AllRestored.parse(group.decide("restored", f"{restored}\n{own}", _sum_up))
    if found.differing_rank is not None:
        texts = group.gather("data", json.dumps([str(own), dict(parts())]))
        data, all_parts = zip(*map(json.loads, texts), strict=True)
        raise difference([RankData.parse(text) for text in data], all_parts, found.differing_rank)
    return found


def _sum_up(texts: Sequence[str]) -> str:
    """On rank 0, from the texts of all ranks."""
    pairs = [text.split("\n") for text in texts]
    all_restored = [Restored.parse(restored) for restored, _ in pairs]
    decision = AllRestored(
        num_bytes=sum(one.num_bytes for one in all_restored),
        remote_bytes=sum(one.remote_bytes for one in all_restored),
        differing_rank=differing_rank([RankData.parse(data) for _, data in pairs]),
        frees_source=all(one.frees_source for one in all_restored),
    )
    return str(decision)
