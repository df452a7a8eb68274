"""Which optimizer a step updates, and with which batch."""

from __future__ import annotations

import pytest

from shoal_workers.engine.task.alternation import Alternation

PATTERNS = {"d": ["judge.*"], "g": ["maker.*"]}


def _seen(alternation: Alternation, steps: int) -> list[tuple[str, int]]:
    return [(alternation.name(step), alternation.batch(step)) for step in range(steps)]


def test_different_optimizers_share_a_batch() -> None:
    found = _seen(Alternation(PATTERNS, ["d", "g"]), 4)
    assert found == [("d", 0), ("g", 0), ("d", 1), ("g", 1)]


def test_an_optimizer_that_was_updated_with_a_batch_gets_the_next_one() -> None:
    found = _seen(Alternation(PATTERNS, ["d", "d", "g"]), 6)
    assert found == [("d", 0), ("d", 1), ("g", 1), ("d", 2), ("d", 3), ("g", 3)]


@pytest.mark.parametrize("updates", [["d", "g"], ["d", "d", "g"], ["g", "d", "g", "g", "d"]])
def test_the_steps_of_some_batches_are_those_before_the_next_batch(updates: list[str]) -> None:
    alternation = Alternation(PATTERNS, updates)
    for batches in range(12):
        steps = alternation.num_steps(batches)
        assert alternation.batch(steps) == batches
        assert steps == 0 or alternation.batch(steps - 1) == batches - 1


@pytest.mark.parametrize("updates", [["d", "g"], ["d", "d", "g"], ["g", "d", "g", "g", "d"]])
def test_updates_are_counted_by_optimizer(updates: list[str]) -> None:
    alternation = Alternation(PATTERNS, updates)
    done = {"d": 0, "g": 0}
    for step in range(13):
        name = alternation.name(step)
        found = alternation.optimizers(step)
        assert {one: state.num_updates for one, state in found.items()} == done
        assert [one for one, state in found.items() if state.is_updated] == [name]
        assert alternation.is_first(step) == (done[name] == 0)
        done[name] += 1


def test_each_parameter_has_one_optimizer() -> None:
    alternation = Alternation({"d": ["judge.*", "scale"], "g": ["maker.*"]}, ["d", "g"])
    members = alternation.members(["judge.0.weight", "maker.1", "scale"])
    assert members == {"d": {"judge.0.weight", "scale"}, "g": {"maker.1"}}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["judge.a", "maker.a", "other"], "'other' belongs to none of the optimizers d, g"),
        (["judge.a", "makes.a"], r"optimizers\['g'\] is 'maker\.\*', which matches no parameter"),
    ],
)
def test_a_parameter_or_an_optimizer_without_the_other_is_refused(names: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Alternation(PATTERNS, ["d", "g"]).members(names)
