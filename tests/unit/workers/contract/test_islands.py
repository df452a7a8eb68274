"""The section `islands` of a spec: what is refused, in words that name the setting, and how its files are named."""

from typing import Any

import pytest

from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.islands import IslandsSpec, announcement_file, round_folder


def _parse(**islands: Any) -> IslandsSpec:
    spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}, "islands": islands})
    assert spec.islands is not None
    return spec.islands


@pytest.mark.parametrize(
    ("islands", "message"),
    [
        ({"num": 2, "index": 2}, "islands.index 2: islands.num 2 has the indices 0 to 1."),
        ({"num": 2, "quorum": 3}, "islands.quorum 3 is more than islands.num 2."),
        ({"num": 3, "clusters": ["east", "west"]}, "islands.clusters names 2 clusters for 3 islands. Name each."),
        (
            {"num": 2, "every_steps": 10, "lands_after_steps": 10},
            "islands.lands_after_steps 10 is not less than the 10 steps of a round (islands.every_steps / "
            "islands.fragments): a round lands before the next one ends.",
        ),
        (
            {"num": 2, "every_steps": 10, "fragments": 2, "lands_after_steps": 5},
            "islands.lands_after_steps 5 is not less than the 5 steps of a round",
        ),
        (
            {"num": 2, "every_steps": 10, "fragments": 4},
            "islands.every_steps 10 is not a multiple of islands.fragments 4.",
        ),
        ({"num": 4, "topology": "pairs", "compress": "int8"}, "Pairs exchange whole weights"),
        ({"num": 4, "topology": "pairs", "fragments": 2, "every_steps": 4}, "islands.fragments to 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_values(islands: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        _parse(**islands)
    [problem] = refused.value.problems
    assert problem.path == "islands" and message in problem.message


@pytest.mark.parametrize(
    ("path", "islands"),
    [
        ("islands.num", {"num": 65}),
        ("islands.num", {"num": 0}),
        ("islands.compress", {"num": 2, "compress": "fp4"}),
        ("islands.outer.lr", {"num": 2, "outer": {"lr": 0}}),
        ("islands.outer.momentum", {"num": 2, "outer": {"momentum": 1}}),
        ("islands.grace_s", {"num": 2, "grace_s": -1}),
        ("islands.density", {"num": 2, "compress": "sparse", "density": 0}),
        ("islands.fragments", {"num": 2, "fragments": 0}),
        ("islands.topology", {"num": 2, "topology": "ring"}),
    ],
)
def test_a_value_out_of_its_range_is_refused_at_its_path(path: str, islands: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as refused:
        _parse(**islands)
    assert [problem.path for problem in refused.value.problems] == [path]


def test_the_outer_step_is_by_default_that_of_diloco() -> None:
    outer = _parse(num=2).outer
    assert (outer.lr, outer.momentum, outer.nesterov) == (0.7, 0.9, True)


def test_a_spec_without_islands_does_not_name_them() -> None:
    """A journal of a job without islands is as it was before there were any."""
    spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}})
    assert "islands" not in spec.model_dump()


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        (
            "validation.patience",
            {"validation": {"every_steps": 1, "patience": 2}},
            "validation.patience is 2, and islands",
        ),
        ("optimizer.ema_decay", {"optimizer": {"ema_decay": 0.9}}, "optimizer.ema_decay is set, and so is islands"),
    ],
)
def test_what_has_no_meaning_on_an_island_is_refused(path: str, changes: dict[str, Any], message: str) -> None:
    spec = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}, "islands": {"num": 2}}
    with pytest.raises(SpecError) as refused:
        parse_spec({**spec, **changes})
    [problem] = refused.value.problems
    assert problem.path == path and message in problem.message


def test_a_step_of_an_island_stands_for_the_samples_of_all() -> None:
    spec = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}, "batch": {"global_size": 8, "micro_size": 4}}
    assert parse_spec(spec).samples_per_step == 8
    assert parse_spec({**spec, "islands": {"num": 3}}).samples_per_step == 24


@pytest.mark.parametrize("num", range(1, 10))
def test_pairs_change_until_each_island_has_met_every_other_one(num: int) -> None:
    spec = IslandsSpec(num=num, topology="pairs", every_steps=10)
    num_pairs, num_turns = (num + 1) // 2, 2 * ((num + 1) // 2) - 1
    met: dict[int, list[int]] = {island: [] for island in range(num)}
    for turn in range(num_turns):
        pairs = [spec.find_islands(turn * num_pairs + pair, 10_000) for pair in range(num_pairs)]
        assert sorted(island for pair in pairs for island in pair) == [*range(num)], "each island once in a turn"
        for pair in pairs:
            for island in pair:
                met[island] += [other for other in pair if other != island]
    assert all(sorted(others) == sorted({*range(num)} - {island}) for island, others in met.items())


def test_the_last_round_of_pairs_is_of_all_islands_and_each_island_has_a_round_of_every_turn() -> None:
    spec = IslandsSpec(num=4, index=2, topology="pairs", every_steps=4)
    assert spec.first_of_all(14) == 6, "rounds end with the steps 4, 8, 12 and 13"
    assert spec.find_islands(6, 14) == spec.find_islands(7, 14) == (0, 1, 2, 3)
    rounds = [spec.next_round(0, 14)]
    while rounds[-1] < 6:
        rounds.append(spec.next_round(rounds[-1] + 1, 14))
    assert [number // 2 for number in rounds] == [0, 1, 2, 3]
    assert spec.first_of_all(1) == 0 and IslandsSpec(num=4).first_of_all(14) == 0


def test_names_in_the_storage_sort_by_round() -> None:
    assert sorted(map(round_folder, (10, 9, 0))) == [round_folder(0), round_folder(9), round_folder(10)]
    assert announcement_file(3) == "announced-3.json"
