"""`shoal nodes` and `shoal drain`, against a real server with one node, `aaaa...`."""

from typing import Any


def test_nodes_are_listed_in_both_forms(shoal: Any) -> None:
    [node] = shoal("nodes", "--json").json()
    assert node["node_id"] == "a" * 56 and node["drain"] is None
    assert "alive" in shoal("nodes").out


def test_a_node_is_drained_by_the_beginning_of_its_id_or_its_address_and_used_again(shoal: Any) -> None:
    drained = shoal("drain", "aaa", "--reason", "new disks", "--deadline-s", "90", "--json").json()
    assert drained["drain"]["reason"] == "new disks" and drained["drain"]["deadline"] is not None
    text = shoal("nodes").out
    assert "drained" in text and "new disks" in text
    assert shoal("drain", "127.0.0.1", "--undo", "--json").json()["drain"] is None


def test_an_unknown_node_ends_with_4(shoal: Any) -> None:
    ran = shoal("drain", "bbb")
    assert ran.code == 4 and "shoal nodes" in ran.err


def test_undo_cannot_be_combined_with_a_deadline(shoal: Any) -> None:
    assert shoal("drain", "aaa", "--undo", "--deadline-s", "5").code == 2


def test_a_node_is_cordoned_and_used_again(shoal: Any) -> None:
    assert shoal("cordon", "aaa", "--reason", "bad fan", "--json").json()["cordon"]["reason"] == "bad fan"
    text = shoal("nodes").out
    assert "cordoned" in text and "bad fan" in text
    assert shoal("cordon", "aaa", "--undo", "--json").json()["cordon"] is None
