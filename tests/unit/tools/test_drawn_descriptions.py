"""The drawing of tasks: a seed is one task, every kind is drawn, and shrinking comes to an end."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kit.fuzz.draw import Description, draw, simpler
from kit.fuzz.kinds import LOSSES, OPTIMIZERS, PIECES, SPELLINGS
from kit.fuzz.plans import CHOICES, world_of
from kit.fuzz.spec import broken_rules

_MANY = range(600)


@pytest.fixture(scope="module")
def many() -> list[Description]:
    return [draw(seed) for seed in _MANY]


def test_a_seed_is_one_task_and_survives_json(many: list[Description]) -> None:
    assert [draw(seed) for seed in _MANY[:100]] == many[:100]
    assert [Description.from_json(json.loads(json.dumps(one.to_json()))) for one in many] == many
    assert len({json.dumps({**one.to_json(), "seed": 0}) for one in many}) == len(many)


def test_every_kind_and_choice_is_drawn(many: list[Description]) -> None:
    drawn = {(piece.kind, name, piece.options[name]) for one in many for piece in one.pieces for name in piece.options}
    assert drawn == {(kind, name, choice) for kind in PIECES for name in PIECES[kind] for choice in PIECES[kind][name]}
    assert {one.optim.kind for one in many} == {"builtin", *OPTIMIZERS}
    decoders = [one.decoder for one in many if one.decoder is not None]
    assert {(name, getattr(one, name)) for one in decoders for name in CHOICES} == {
        (name, choice) for name, choices in CHOICES.items() for choice in choices
    }
    axes = {axis for one in many for layout in one.ways.layouts for axis, n in layout.items() if n not in (1, "none")}
    assert axes >= {"pp", "tp", "cp", "ep", "dp_shard", "dp_replicate", "recompute"}


def test_every_size_and_spelling_is_drawn() -> None:
    spelled = [draw(seed, spelled=1.0) for seed in _MANY]
    drawn = {
        (piece.kind, name, piece.options[name])
        for one in spelled
        for piece in one.pieces
        for name in piece.options
        if piece.kind in SPELLINGS
    }
    assert drawn == {(kind, *choice) for kind in SPELLINGS for choice in _choices(SPELLINGS[kind])}
    assert {one.loss for one in spelled} >= set(LOSSES)
    assert {"by_attribute"} <= {one.optim.groups for one in spelled}
    legal = [broken_rules(one, layout) for one in spelled for layout in one.ways.layouts[:2]]
    assert set(legal) == {()}


def _choices(options: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, Any]]:
    return ((name, choice) for name, choices in options.items() for choice in choices)


def test_the_other_choices_of_a_seed_do_not_depend_on_its_spelling(many: list[Description]) -> None:
    for one in many[:50]:
        spelled = draw(one.seed, spelled=1.0)
        assert (spelled.ways, spelled.decoder, spelled.width) == (one.ways, one.decoder, one.width)


def test_every_layout_is_legal_and_the_dead_worker_is_missing(many: list[Description]) -> None:
    for one in many:
        ways = one.ways
        assert max(map(world_of, ways.layouts)) <= min(4, one.num_micro_batches)
        assert [broken_rules(one, layout) for layout in ways.layouts[:2]] == [(), ()]
        assert world_of(ways.survived) < world_of(ways.resumed) or ways.killed is None


def test_shrinking_ends(many: list[Description]) -> None:
    for one in many[:50]:
        for _ in range(200):
            smaller = list(simpler(one))
            if not smaller:
                break
            one = smaller[-1]
        assert not list(simpler(one))
