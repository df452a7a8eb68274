"""Worker-seconds by interval, from accounts that only grow."""

import pytest

from shoal_service.core.goodput_series import Window, edges_of


def test_what_was_spent_before_the_window_does_not_count() -> None:
    window = Window(edges_of(100.0, 200.0, 2))
    window.add([(0.0, {}), (100.0, {"productive": 50.0}), (200.0, {"productive": 90.0, "queued": 10.0})])
    assert window.by_account == {"productive": [20.0, 20.0], "queued": [5.0, 5.0]}
    assert window.totals() == {"productive": 40.0, "queued": 10.0}


def test_accounts_grow_evenly_between_samples_and_stop_at_the_last_one() -> None:
    window = Window([0.0, 10.0, 20.0, 30.0])
    window.add([(5.0, {}), (15.0, {"queued": 10.0})])
    assert window.by_account["queued"] == pytest.approx([5.0, 5.0, 0.0])


def test_jobs_add_up_and_a_job_without_samples_adds_nothing() -> None:
    window = Window([0.0, 10.0])
    window.add([])
    for _ in range(2):
        window.add([(0.0, {}), (10.0, {"productive": 4.0})])
    assert window.totals() == {"productive": 8.0}


def test_seconds_that_turn_out_to_be_lost_count_where_they_are_in_the_end() -> None:
    window = Window([0.0, 10.0, 20.0])
    window.add([(0.0, {}), (10.0, {"productive": 10.0}), (20.0, {"productive": 8.0, "recomputed": 6.0})])
    assert window.by_account == {"productive": [10.0, 0.0], "recomputed": [0.0, 6.0]}


def test_the_last_edge_is_the_end_of_the_window() -> None:
    edges = edges_of(0.1, 0.7, 7)
    assert (edges[0], edges[-1], len(edges)) == (0.1, 0.7, 8)
