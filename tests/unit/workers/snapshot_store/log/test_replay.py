"""Which steps can be replayed, and from what."""

from shoal_workers.snapshot_store.log.replay import Link, chain, replayable


def _links(*steps: int) -> list[Link]:
    return [Link(step, step - 1) for step in steps]


def test_a_step_is_replayed_from_the_newest_copy_before_it() -> None:
    assert chain({10, 12}, _links(11, 12, 13, 14), 14) == (12, tuple(_links(13, 14)))
    assert chain({10, 16}, _links(11, 12, 13, 14), 12) == (10, tuple(_links(11, 12)))


def test_a_copy_needs_no_entries() -> None:
    assert chain({10}, [], 10) == (10, ())


def test_a_missing_entry_ends_what_can_be_replayed() -> None:
    links = _links(11, 13, 14)
    assert chain({10}, links, 13) is None
    assert replayable({10}, links) == {11}


def test_an_older_copy_helps_if_the_newest_does_not_lead_to_the_step() -> None:
    assert chain({8, 10}, [Link(9, 8), Link(11, 9)], 11) == (10, (Link(11, 9),)), "steps 9 and 10 are the same state"
    assert chain({8, 12}, _links(9, 10), 10) == (8, tuple(_links(9, 10)))


def test_a_skipped_step_changes_nothing_and_has_no_entry() -> None:
    links = [Link(11, 10), Link(13, 11), Link(14, 13)]
    assert replayable({10}, links) == {11, 13, 14}
    assert chain({10}, links, 12) is None
    assert chain({12}, links, 14) == (12, (Link(13, 11), Link(14, 13)))


def test_without_a_copy_nothing_can_be_replayed() -> None:
    assert replayable(set(), _links(1, 2)) == set()
    assert chain(set(), _links(1, 2), 2) is None
    assert chain({5}, _links(4), 4) is None


def test_a_step_that_exists_as_a_copy_is_not_listed_again() -> None:
    assert replayable({10, 12}, _links(11, 12, 13)) == {11, 13}
