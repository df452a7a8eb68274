"""Which steps can be replayed from whole copies and log entries, and from what. Pure decisions about step numbers.

    whole copies   10                        26
    entries            11  12  13 ... 25  26     27  28  30     (step 29 was skipped: 30 has previous 28)
    replayable     10  11  12 ........... 25 26  27  28  30

Called by `replay`, which reads the numbers from the files, and by `entry_slots`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """One complete entry: it leads from any state with `previous` <= step < `step` to the state after `step`."""

    step: int
    previous: int


def chain(bases: Collection[int], links: Iterable[Link], wanted: int) -> tuple[int, tuple[Link, ...]] | None:
    """The newest whole copy from which the wanted step can be reached, and the entries to replay. None: none leads."""
    known = list(links)
    for base in sorted((base for base in bases if base <= wanted), reverse=True):
        path: list[Link] = []
        for link in _from(base, known):
            if link.step > wanted:
                break
            path.append(link)
        if (path[-1].step if path else base) == wanted:
            return base, tuple(path)
    return None


def replayable(bases: Collection[int], links: Iterable[Link]) -> set[int]:
    """Every step that can be reached from a whole copy by replaying at least one entry, and is none itself."""
    known = list(links)
    return {link.step for base in bases for link in _from(base, known)} - set(bases)


def _from(base: int, links: list[Link]) -> Iterator[Link]:
    """The entries that follow a state, in order."""
    step = base
    for link in sorted(links, key=lambda link: link.step):
        if link.previous <= step < link.step:
            step = link.step
            yield link
