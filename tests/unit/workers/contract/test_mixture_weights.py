"""Which weights of a mixture hold from which step: as planned, unless the steps were trained before it was known."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.mixture_weights import (
    LEAD_S,
    InForce,
    WeightChange,
    began,
    earliest_step,
    from_json,
    in_force,
    late,
    planned,
    to_json,
)
from shoal_workers.contract.training_settings import changes, settings_of, with_settings

A, B, C = (1.0, 0.0), (0.5, 0.5), (0.0, 2.0)
STEPS = st.lists(st.integers(1, 40), max_size=4, unique=True).map(sorted)
WANTED = STEPS.flatmap(
    lambda steps: st.lists(st.sampled_from([A, B, C]), min_size=len(steps), max_size=len(steps)).map(
        lambda weights: tuple(map(InForce, steps, weights))
    )
)


def test_a_change_of_a_later_step_takes_effect_as_planned() -> None:
    wanted = (InForce(4, A), InForce(9, B))
    assert in_force((), wanted, 0) == in_force((), wanted, 3) == wanted
    assert in_force(began(wanted, 5), wanted, 5) == wanted
    assert late(wanted, in_force((), wanted, 3)) is None


def test_a_change_that_comes_too_late_takes_effect_at_the_first_step_of_the_group() -> None:
    wanted = (InForce(4, A), InForce(9, B))
    found = in_force((), wanted, 6)
    assert found == (InForce(7, A), InForce(9, B))
    assert late(wanted, found) == InForce(7, A)
    assert in_force(began(found, 8), wanted, 8) == found  # the next group: as it was trained, not as it was planned
    assert in_force(began(found, 6), wanted, 6) == found


def test_a_group_that_goes_back_before_a_late_change_has_it_as_planned() -> None:
    wanted = (InForce(4, A),)
    assert in_force(began(in_force((), wanted, 6), 2), wanted, 2) == wanted


def test_a_change_that_is_taken_back_ends_with_the_steps_that_had_it() -> None:
    assert in_force((InForce(4, A),), (), 6) == (InForce(4, A), InForce(7, None))


@given(before=WANTED, after=WANTED, at=st.integers(0, 40), then=st.integers(0, 40))
def test_what_was_trained_stays_true_and_the_rest_follows_the_spec(
    before: tuple[InForce, ...], after: tuple[InForce, ...], at: int, then: int
) -> None:
    first = in_force((), before, 0)
    second = in_force(began(first, at), after, at)
    for step in range(1, 60):
        expected = _at(first, step) if step <= at else _at(after, step)
        assert _at(second, step) == expected
    assert [one.at_step for one in second] == sorted({one.at_step for one in second})
    if then >= at:  # a kill and a new group change nothing
        assert [_at(in_force(began(second, then), after, then), step) for step in range(60)] == [
            _at(second, step) for step in range(60)
        ]
    assert from_json(json.loads(json.dumps(to_json(second)))) == second


def _at(found: tuple[InForce, ...], step: int) -> tuple[float, ...] | None:
    weights = None
    for one in found:
        if one.at_step <= step:
            weights = one.weights
    return weights


def test_a_change_is_planned_for_the_first_step_of_which_all_workers_learn() -> None:
    assert earliest_step(7, 0.5, 3.0, is_training=False) == 8
    assert earliest_step(7, None, 0.0, is_training=True) == 9
    assert earliest_step(7, 60.0, 0.0, is_training=True) == 10
    assert earliest_step(7, 0.5, 0.0, is_training=True) == 9 + 2 * LEAD_S
    assert earliest_step(7, 0.5, 3.0, is_training=True) == 9 + 2 * (LEAD_S + 3)
    assert earliest_step(7, 0.5, 1e9, is_training=True) == earliest_step(7, 0.5, 60.0, is_training=True)


def test_a_new_change_replaces_what_was_planned_from_its_step_on() -> None:
    first = planned((), {"a": 1.0, "b": 0.0}, None, 10)
    assert first == (WeightChange(at_step=10, weights={"a": 1.0, "b": 0.0}),)
    second = planned(first, {"a": 0.5, "b": 0.5}, 30, 12)
    assert [one.at_step for one in second] == [10, 30]
    third = planned(second, {"a": 0.0, "b": 1.0}, 20, 12)
    assert [(one.at_step, one.weights["b"]) for one in third] == [(10, 0.0), (20, 1.0)]
    assert planned(third, {"a": 0.0, "b": 1.0}, None, 15) == third, "a request that comes twice"
    assert planned(third, {"a": 0.0, "b": 1.0}, 20, 25) == third


SOURCES = [{"path": "web/*", "name": "web", "weight": 3}, {"path": "chats", "weight": 1}]
CHANGE = {"at_step": 5, "weights": {"web": 0.5, "chats": 0.5}}


def test_changes_are_part_of_the_settings_that_a_running_job_takes() -> None:
    before = parse_spec({"data": {"sources": SOURCES}, "stop": {"steps": 9}})
    after = parse_spec({"data": {"sources": SOURCES, "changes": [CHANGE]}, "stop": {"steps": 9}})
    assert changes(settings_of(before), settings_of(after)) == (
        "data.weights from step 5 on none -> web 0.5, chats 0.5",
    )
    assert settings_of(with_settings(before, settings_of(after))) == settings_of(after)
    assert with_settings(after, settings_of(after)).data == after.data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"paths": ["a"], "changes": [CHANGE]}, r"data\.sources is not"),
        ({"sources": SOURCES, "changes": [{**CHANGE, "weights": {"web": 1}}]}, r"sources are 'web', 'chats'"),
        ({"sources": SOURCES, "changes": [{**CHANGE, "weights": {"web": 0, "chats": 0}}]}, r"weights are all 0"),
        ({"sources": SOURCES, "changes": [CHANGE, CHANGE]}, r"at_step 5 is not after that of the change before it, 5"),
        ({"sources": [SOURCES[0], SOURCES[0]], "changes": [CHANGE]}, r"two entries .* called 'web'"),
        (
            {"sources": SOURCES, "changes": [{**CHANGE, "at_step": 1 + n} for n in range(501)]},
            r"501 changes of 2 weights each; 1,000",
        ),
    ],
)
def test_changes_that_fit_no_mixture_are_refused_in_words(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_spec({"data": data, "stop": {"steps": 9}})
