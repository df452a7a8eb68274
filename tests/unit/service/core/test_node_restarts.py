"""The pauses before a dead node is started again."""

from shoal_service.core.node_restarts import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    STEADY_S,
    NodeLife,
    seen,
    started,
    starts_at,
)


def test_a_node_that_runs_is_not_started() -> None:
    assert starts_at(NodeLife()) is None
    assert starts_at(seen(NodeLife(), True, 10.0)) is None


def test_a_dead_node_is_started_after_a_pause_from_its_death_on() -> None:
    dead = seen(seen(NodeLife(), True, 10.0), False, 50.0)
    assert starts_at(dead) == 50.0 + FIRST_PAUSE_S
    assert seen(dead, False, 52.0) == dead, "further looks do not put it off"


def test_the_pause_doubles_with_each_start_in_vain_up_to_a_limit() -> None:
    life, pauses = seen(NodeLife(), False, 0.0), []
    for _ in range(20):
        at = starts_at(life)
        assert at is not None and life.dead_since_mono is not None
        pauses.append(at - life.dead_since_mono)
        life = seen(started(life, at), False, at + 1.0)
    assert pauses[:4] == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == LONGEST_PAUSE_S and pauses == sorted(pauses)


def test_a_node_that_dies_soon_after_each_start_is_not_started_ever_faster() -> None:
    life = seen(NodeLife(), False, 0.0)
    life = seen(started(life, 5.0), True, 6.0)
    life = seen(life, False, 8.0)
    assert starts_at(life) == 8.0 + 2 * FIRST_PAUSE_S


def test_a_steady_node_begins_with_the_first_pause_again() -> None:
    life = seen(started(seen(NodeLife(), False, 0.0), 5.0), True, 6.0)
    life = seen(seen(life, True, 6.0 + STEADY_S), False, 400.0)
    assert starts_at(life) == 400.0 + FIRST_PAUSE_S
