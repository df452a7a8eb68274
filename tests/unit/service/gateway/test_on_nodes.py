"""Nodes with another release of Shoal than the control plane are named."""

from shoal_service.gateway.on_nodes import words_of


def test_both_releases_and_the_nodes_are_named() -> None:
    words = words_of("0.2.0", {"10.0.0.3": "0.1.0", "10.0.0.2": "0.2.0", "10.0.0.4": "none"})
    assert words == (
        " The control plane is Shoal 0.2.0, and 10.0.0.3 has 0.1.0, 10.0.0.4 has no Shoal: "
        "install the same release on every node."
    )


def test_nothing_is_said_of_equal_releases() -> None:
    assert words_of("0.2.0", {}) == words_of("0.2.0", {"10.0.0.2": "0.2.0"}) == ""


def test_of_many_nodes_some_are_named() -> None:
    assert "and 15 more nodes:" in words_of("0.2.0", {f"10.0.0.{n}": "0.1.0" for n in range(20)})
