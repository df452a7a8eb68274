"""Which node has a bad link."""

from shoal_service.core.culprit import Ends, whose_link
from shoal_workers.contract.suspects import Link, Resource

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def link(peer: str, rtt_s: float = 0.0005, sent: int = 1000, resent: int = 0) -> Link:
    return Link(peer_ip=peer, rtt_s=rtt_s, sent=sent, resent=resent)


def test_the_node_at_which_all_slow_connections_end_is_suspected() -> None:
    found = whose_link(
        [
            Ends(0, A, [link(B), link(C, 0.08)]),
            Ends(1, B, [link(A), link(C, 0.081)]),
            Ends(2, C, [link(A, 0.08), link(B, 0.081)]),
        ]
    )
    assert found is not None
    assert (found.resource, found.ranks, found.node_ip) == (Resource.NETWORK, (2,), C)
    assert "10.0.0.1 - 10.0.0.3: a round trip takes 80 ms" in found.evidence


def test_so_is_the_one_that_loses_packets_with_all_its_ranks() -> None:
    found = whose_link(
        [
            Ends(0, A, [link(B, resent=40), link(C, resent=45)]),
            Ends(1, A, [link(B, resent=38)]),
            Ends(2, B, [link(A), link(C)]),
            Ends(3, C, [link(A, resent=12), link(B, resent=0)]),
        ]
    )
    assert found is not None and (found.ranks, found.node_ip) == ((0, 1), A)


def test_of_two_nodes_the_connection_is_named_and_no_node() -> None:
    found = whose_link([Ends(0, A, [link(B, 0.2)]), Ends(1, B, [link(A, 0.2)])])
    assert found is not None and (found.ranks, found.node_ip) == ((), "")
    assert found.evidence == (f"{A} - {B}: a round trip takes 200 ms",)


def test_good_connections_and_those_within_a_node_accuse_nobody() -> None:
    assert whose_link([Ends(0, A, [link(B), link(A, 9.0)]), Ends(1, B, [link(A, resent=1)])]) is None
    assert whose_link([]) is None


def test_a_single_bad_connection_of_three_suspects_neither_end() -> None:
    found = whose_link(
        [Ends(0, A, [link(B, 0.1), link(C)]), Ends(1, B, [link(A, 0.1), link(C)]), Ends(2, C, [link(A), link(B)])]
    )
    assert found is not None and found.ranks == ()
