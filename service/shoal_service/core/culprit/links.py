"""Which node has a bad link: from what the kernels of all ranks know of their connections.

          A --- B   1 ms                 every bad connection ends at C, and one that does not end there is good:
          A --- C  80 ms                 C is suspected
          B --- C  81 ms

With two nodes, or if no node is an end of all bad connections, the connection is named and no node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal_service.core.quantities import duration_text
from shoal_workers.contract.suspects import Link, Resource, Suspect

_SLOW_RTT_S = 0.01
_FACTOR = 4.0
"""A connection is bad if it is this many times worse than the best one."""
_LEAST_RESENT = 2
_BAD_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Ends:
    """What one rank knows: its rank, its node, its connections."""

    rank: int
    node_ip: str
    links: Sequence[Link]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both directions between two nodes."""

    rtt_s: float
    sent: int
    resent: int

    @property
    def share(self) -> float:
        return self.resent / max(self.sent, 1)


def whose_link(known: Sequence[Ends]) -> Suspect | None:
    """None: no connection between nodes is bad."""
    pairs = _pairs(known)
    bad = {ends: words for ends in pairs if (words := _what_is_bad(ends, pairs))}
    if not bad:
        return None
    common = frozenset.intersection(*bad)
    good = [ends for ends in pairs if ends not in bad]
    evidence = tuple(
        f"{' - '.join(sorted(ends))}: {words}" for ends, words in sorted(bad.items(), key=lambda b: sorted(b[0]))
    )
    if len(common) == 1 and any(not ends & common for ends in good):
        (node_ip,) = common
        ranks = tuple(sorted(one.rank for one in known if one.node_ip == node_ip))
        rest = "; ".join(f"{' - '.join(sorted(ends))}: {duration_text(pairs[ends].rtt_s)}" for ends in good)
        return Suspect(resource=Resource.NETWORK, ranks=ranks, node_ip=node_ip, evidence=(*evidence, f"but {rest}"))
    return Suspect(resource=Resource.NETWORK, evidence=evidence)


def _pairs(known: Sequence[Ends]) -> dict[frozenset[str], _Pair]:
    found: dict[frozenset[str], _Pair] = {}
    for one in known:
        for link in one.links:
            ends = frozenset((one.node_ip, link.peer_ip))
            if len(ends) == 2:
                before = found.get(ends, _Pair(0.0, 0, 0))
                rtt_s = max(before.rtt_s, link.rtt_s)
                found[ends] = _Pair(rtt_s, before.sent + link.sent, before.resent + link.resent)
    return found


def _what_is_bad(ends: frozenset[str], pairs: Mapping[frozenset[str], _Pair]) -> str:
    """Empty: nothing."""
    this = pairs[ends]
    best_rtt = min(pair.rtt_s for pair in pairs.values())
    least_share = min(pair.share for pair in pairs.values())
    is_slow = this.rtt_s >= _SLOW_RTT_S and (len(pairs) == 1 or this.rtt_s >= _FACTOR * best_rtt)
    is_lossy = this.resent >= _LEAST_RESENT and this.share >= max(_BAD_SHARE, _FACTOR * least_share)
    words = []
    if is_lossy:
        words.append(f"{this.resent} of {this.sent} segments were sent again")
    if is_slow:
        words.append(f"a round trip takes {duration_text(this.rtt_s)}")
    return ", ".join(words)
