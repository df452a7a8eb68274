"""Drawn tasks on plain replicas, and what plain torch allows and a sharded model does not. See test_drawn_tasks.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kit.fuzz.draw import READING, Description, Optim, Piece, Ways, draw
from kit.fuzz.lives import Limits
from kit.fuzz.outcome import outcome_of
from kit.fuzz.plans import world_of

SEEDS = (2, 5, 11, 17, 3018, 4001, 4009, 4052)
_TWO, _ONE = ({"dp_replicate": size, "shard": "none"} for size in (2, 1))
_WAYS = Ways(layout=_TWO, resumed=_TWO, killed=("backward", 4), survived=_ONE, changed=None)


def _plain(layout: Mapping[str, Any]) -> dict[str, Any]:
    return {"dp_replicate": world_of(layout), "shard": "none"}


def _on_plain_replicas(description: Description) -> Description:
    """The same task and events. With the built-in optimizer, which can be sharded, the first group of the last life
    stays sharded, so that each kind of layout reads what the other has written."""
    ways = description.ways
    resumed = ways.resumed if description.optim.kind == "builtin" else _plain(ways.resumed)
    changed = None if ways.changed is None else _plain(ways.changed)
    own = Ways(_plain(ways.layout), resumed, ways.killed, _plain(ways.survived), changed)
    return replace(description, ways=own, deterministic=False)


@pytest.mark.cells(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_task_is_right_on_plain_replicas_or_refused(seed: int, fleet: Any) -> None:
    description = draw(seed, plans=0.0, spelled=1.0) if seed > 4000 else draw(seed)
    found = outcome_of(fleet, _on_plain_replicas(description), Limits(run_s=120.0))
    assert found.is_good, found


@pytest.mark.timeout(400)
def test_what_an_optimizer_draws_and_copies_and_modules_of_a_list_act_as_in_a_plain_loop(fleet: Any) -> None:
    """Two workers, resumed, one of them killed; then one worker."""
    linear = Description(seed=1, pieces=(Piece("linear", {"bias": True}),), ways=_WAYS)
    tasks = {kind: replace(linear, optim=Optim(kind, {"declared": None})) for kind in ("own_noisy", "own_anchored")}
    tasks["modules of a list"] = replace(linear, pieces=(Piece("hidden", {"what": "module_in_a_list"}),))
    outcomes = {name: outcome_of(fleet, task, Limits(run_s=120.0)) for name, task in tasks.items()}
    assert {name: found for name, found in outcomes.items() if found.outcome != "equal"} == {}


@pytest.mark.timeout(400)
def test_parameters_that_a_forward_pass_makes_or_unfreezes_and_what_optimizers_keep_aside_are_refused(
    fleet: Any,
) -> None:
    linear = Description(seed=1, pieces=(Piece("linear", {"bias": True}),), ways=_WAYS)
    tasks = {
        what: replace(linear, pieces=(Piece("hidden", {"what": what}),)) for what in ("made_in_forward", "unfrozen")
    }
    tasks |= {
        place: replace(linear, optim=Optim("own_keeping", {"declared": None, "in": place}))
        for place in ("dict", "generator", "state")
    }
    outcomes = {name: outcome_of(fleet, task, Limits(run_s=120.0)) for name, task in tasks.items()}
    assert {name: found for name, found in outcomes.items() if found.outcome != "refused"} == {}


@pytest.mark.timeout(400)
def test_references_penalties_and_attributes_act_as_in_a_plain_loop(fleet: Any) -> None:
    """Two workers, resumed, one of them killed; then one worker."""
    linear = Description(seed=1, pieces=(Piece("linear", {"bias": True}),), ways=_WAYS)
    tasks = {
        f"reached by a {by}": replace(linear, pieces=(Piece("reached", {"by": by}),))
        for by in ("list", "tuple", "dict", "closure")
    }
    tasks |= {"penalty": replace(linear, loss="penalty"), "attributes": replace(linear, optim=READING)}
    outcomes = {name: outcome_of(fleet, task, Limits(run_s=120.0)) for name, task in tasks.items()}
    assert {name: found for name, found in outcomes.items() if found.outcome != "equal"} == {}


def test_an_optimizer_that_torch_cannot_run_on_shards_is_refused_in_words_by_a_sharded_group(fleet: Any) -> None:
    """torch.optim.Rprop, which the task says not to be elementwise: fine on whole parameters."""
    ways = replace(_WAYS, resumed={"dp_replicate": 1, "dp_shard": 2, "shard": "full"})
    pieces = (Piece("linear", {"bias": True}),)
    task = Description(seed=1, pieces=pieces, optim=Optim("rprop", {"declared": False}), ways=ways)
    found = outcome_of(fleet, task, Limits(run_s=120.0))
    assert (found.outcome, found.run) == ("late_refusal", "resume in fsdp2 full"), found
    assert "parallelism: {shard: none}, with which each worker has whole parameters" in found.detail
    assert outcome_of(fleet, replace(task, ways=_WAYS), Limits(run_s=120.0)).outcome == "equal"
